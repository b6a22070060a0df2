"""Weights from the learner to the sampler: the trainer's stay usable and unchanged, wherever and however the sampler wants them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from crl_jax.models.presets import TINY
from crl_jax.models.transformer import param_shapes
from crl_jax.sharding.mesh import make_mesh
from crl_jax.sharding.reshard import make_copy, make_reshard, serving_mesh
from crl_jax.sharding.rules import param_shardings

CONFIG = dataclasses.replace(TINY, n_layers=1)


def sync_of(kind: str, dtype, mesh):
    if kind == "same":
        return make_copy(dtype)
    return make_reshard(CONFIG, serving_mesh(mesh, 2), dtype)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("kind", ["same", "different"])
def test_P06_a_sync_leaves_the_trainer_its_weights(kind: str, dtype) -> None:
    """Same and different sharding, same type (where a buffer could be shared) and another one; and the trainer's next step, which gives
    its buffers away, does not reach the sampler."""
    mesh = make_mesh(1, 2, 2, jax.devices()[:4])
    rng = np.random.default_rng(0)
    values = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(np.float32), param_shapes(CONFIG))
    trainer = jax.device_put(values, param_shardings(CONFIG, mesh))
    served = sync_of(kind, dtype, mesh)(trainer)
    table = served["embed"]["table"]
    assert table.dtype == dtype
    assert (table.sharding.is_equivalent_to(trainer["embed"]["table"].sharding, 2)) == (kind == "same")
    kept = jax.tree.map(np.asarray, served)
    step = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf * 2, tree), donate_argnums=0)
    moved = step(trainer)
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, served), kept)
    for leaf in jax.tree.leaves(served):
        leaf.delete()
    jax.tree.map(lambda new, old: np.testing.assert_array_equal(new, old * 2), moved, values)
    jax.tree.map(lambda got, old: np.testing.assert_array_equal(got, old.astype(dtype)), kept, values)


def test_P06_the_sum_of_the_trainers_parameters_is_unchanged_after_the_sampler_dropped_its_own() -> None:
    mesh = make_mesh(1, 2, 2, jax.devices()[:4])
    ones = jax.tree.map(lambda leaf: np.ones(leaf.shape, np.float32), param_shapes(CONFIG))
    trainer = jax.device_put(ones, param_shardings(CONFIG, mesh))
    for kind in ("same", "different"):
        for leaf in jax.tree.leaves(sync_of(kind, jnp.float32, mesh)(trainer)):
            leaf.delete()
        assert sum(float(leaf.sum()) for leaf in jax.tree.leaves(trainer)) == sum(leaf.size for leaf in jax.tree.leaves(ones))


def test_a_sampler_of_a_size_that_does_not_divide_the_devices_is_refused() -> None:
    with pytest.raises(ValueError, match="serve_tensor=3 does not divide the 4 devices"):
        serving_mesh(make_mesh(1, 2, 2, jax.devices()[:4]), 3)
