"""The step on meshes of virtual devices gives the update of one device."""

import jax
import numpy as np
import pytest
import toy_model
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from toy_model import BUCKETS, samples

from crl_jax.learner import objective
from crl_jax.learner.batching import to_batch
from crl_jax.learner.optimizer import make_optimizer
from crl_jax.learner.placement import place_batch, state_shardings
from crl_jax.learner.state import init_state
from crl_jax.learner.step import make_train_step
from crl_jax.losses.aggregate import aggregate

OPTIMIZER = make_optimizer(0.01, eps=1e-3)
AXES = ("data", "fsdp")
SPECS = {"embed": PartitionSpec(None, "fsdp"), "mix": PartitionSpec("fsdp"), "scale": PartitionSpec()}


def four_devices(data: int, fsdp: int) -> Mesh:
    return Mesh(np.array(jax.devices()[:4]).reshape(data, fsdp), AXES)


def build(mesh: Mesh | None, microbatches: int = 1):
    state, shardings = init_state(toy_model.init(), OPTIMIZER), None
    if mesh is not None:
        shardings = state_shardings(state, OPTIMIZER, {k: NamedSharding(mesh, spec) for k, spec in SPECS.items()}, mesh)
        state = jax.device_put(state, shardings)
    step = make_train_step(
        None,
        OPTIMIZER,
        objective.actor(),
        temperature=1.0,
        allowed=None,
        microbatches=microbatches,
        mesh=mesh,
        shardings=shardings,
        model=toy_model,
    )
    return step, state


@pytest.mark.parametrize(("shape", "microbatches"), [((4, 1), 1), ((2, 2), 2)])
def test_L12_mesh_gives_the_update_of_one_device(shape: tuple[int, int], microbatches: int) -> None:
    mesh = four_devices(*shape)
    batches = [to_batch(samples(7, seed), **BUCKETS) for seed in (0, 1)]
    alone, expected = build(None)
    step, state = build(mesh, microbatches)
    for batch in batches:
        expected, expected_sums = alone(expected, batch)
        state, sums = step(state, place_batch(batch, mesh, AXES))
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=1e-5), (state, sums), (expected, expected_sums)
        )

    assert step._cache_size() == 1  # type: ignore[attr-defined]
    for moments in (state.opt_state[1][0].mu, state.opt_state[1][0].nu):
        assert moments["mix"].sharding.spec == SPECS["mix"]
    assert state.params["embed"].sharding.spec == SPECS["embed"]


@pytest.mark.parametrize("count", [1, 2, 4])
def test_L12_every_token_weighs_the_same_on_whatever_device_it_lies(count: int) -> None:
    """Eight tokens of loss 1 in one row, two of loss 6 in the next, two rows of padding: mean 2.0 (3.5 if each device took its own)."""
    sharding = NamedSharding(Mesh(np.array(jax.devices()[:count]), ("data",)), PartitionSpec("data"))
    mask = np.zeros((4, 8), np.bool_)
    mask[0], mask[1, :2] = True, True
    losses = jax.device_put(np.repeat([[1.0], [6.0], [9.0], [9.0]], 8, axis=1).astype(np.float32), sharding)
    total = jax.jit(aggregate)(losses, jax.device_put(mask, sharding))
    assert (total.mean(), int(total.count)) == (2.0, 10)


def test_K13_scalars_of_the_optimiser_span_the_mesh() -> None:
    mesh = four_devices(2, 2)
    _, state = build(mesh)
    scalars = [leaf for leaf in jax.tree.leaves(state) if leaf.ndim == 0]
    assert len(scalars) >= 4
    assert all(len(leaf.sharding.device_set) == 4 for leaf in scalars)


def test_rows_that_do_not_divide_are_an_error() -> None:
    mesh = four_devices(4, 1)
    with pytest.raises(ValueError, match="6 rows do not divide over 4 shards"):
        place_batch(to_batch(samples(3), **BUCKETS | {"row_buckets": (6,)}), mesh, AXES)


def test_explicit_mesh_axes_are_refused() -> None:
    _, state = build(None)
    explicit = jax.make_mesh((4, 1), AXES, axis_types=(jax.sharding.AxisType.Explicit,) * 2, devices=jax.devices()[:4])
    with pytest.raises(ValueError, match=r"AxisType\.Auto"):
        make_train_step(None, OPTIMIZER, objective.actor(), temperature=1.0, allowed=None, mesh=explicit, shardings=state, model=toy_model)
