"""The transformer's step on 1, 2, 4 and 8 virtual devices, from mesh to mesh through a checkpoint."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy_model import VOCAB, sample

from crl_jax.checkpoint.arrays import read_tree, write_tree
from crl_jax.config.roles import RoleConfig
from crl_jax.learner import objective
from crl_jax.learner.optimizer import make_optimizer
from crl_jax.learner.packing import pack_batch
from crl_jax.learner.placement import place_batch, state_shardings
from crl_jax.learner.state import init_state
from crl_jax.learner.step import LOGIT_BYTES, SPLIT_LOGIT_BYTES, logit_bytes_on, make_train_step
from crl_jax.models import transformer
from crl_jax.models.config import ModelConfig
from crl_jax.models.forward import Execution
from crl_jax.role import Buckets, Role
from crl_jax.role_settings import execution
from crl_jax.sharding.mesh import make_mesh
from crl_jax.sharding.rules import param_shardings

CONFIG = ModelConfig(name="t", vocab_size=VOCAB + 1, d_model=16, n_layers=2, n_heads=2, n_kv_heads=2, head_dim=8, d_ff=32)
OPTIMIZER = make_optimizer(0.01, eps=1e-3)
SHAPES = ((1, 1, 1), (1, 2, 1), (1, 2, 2), (2, 2, 2))


def batch(seed: int):
    rng = np.random.default_rng(seed)
    rows = [sample(rng, 2 + i % 3, 1 + i % 4, float(rng.normal())) for i in range(14)]
    return pack_batch(rows, row_buckets=(8,), length_buckets=(20,), sequence_buckets=(2,), token_buckets=(6,))


@functools.cache
def build(shape: tuple[int, int, int], role: RoleConfig | None = None):
    """Mesh, step and placed shapes of the state; ``role`` says how to run the layers (None: the defaults of the step)."""
    mesh = make_mesh(*shape, jax.devices()[: np.prod(shape)])
    like = jax.eval_shape(lambda: init_state(transformer.init(CONFIG, jax.random.key(0)), OPTIMIZER))
    shardings = state_shardings(like, OPTIMIZER, param_shardings(CONFIG, mesh), mesh)
    step = make_train_step(
        CONFIG,
        OPTIMIZER,
        objective.actor(),
        temperature=1.0,
        allowed=None,
        logit_chunk=3,
        how=None if role is None else execution(role, mesh),
        mesh=mesh,
        shardings=shardings,
    )
    wanted = jax.tree.map(lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where), like, shardings)
    return mesh, step, wanted


def test_L12_K13_every_mesh_gives_the_same_update_and_restores_onto_the_next(tmp_path) -> None:
    """Step n runs on mesh n from the checkpoint that mesh n - 1 wrote; the reference makes all steps on one device."""
    first = init_state(transformer.init(CONFIG, jax.random.key(0)), OPTIMIZER)
    table = write_tree(tmp_path / "0", first)
    built = build(SHAPES[0])
    alone_step, alone = built[1], jax.device_put(first, jax.tree.map(lambda leaf: leaf.sharding, built[2]))
    for n, shape in enumerate(SHAPES):
        mesh, step, wanted = build(shape)
        state = read_tree(tmp_path / str(n), table, wanted, "state")
        assert all(len(leaf.sharding.device_set) == mesh.size for leaf in jax.tree.leaves(state))
        state, sums = step(state, place_batch(batch(n), mesh, ("data", "fsdp")))
        alone, expected = alone_step(alone, place_batch(batch(n), built[0], ("data", "fsdp")))
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=1e-5, rtol=1e-5), (state, sums), (alone, expected)
        )
        table = write_tree(tmp_path / str(n + 1), state)
        assert step._cache_size() == 1
    assert int(state.step) == len(SHAPES)


def test_L12_sequence_parallel_changes_the_placement_of_activations_and_not_the_update() -> None:
    """The step of mesh (1, 2, 2) above, and the same with the recipe's key set: activations between layers are cut along the sequence."""
    mesh, plain, wanted = build((1, 2, 2))
    data = place_batch(batch(0), mesh, ("data", "fsdp"))
    cut = build((1, 2, 2), RoleConfig(sequence_parallel=True, remat="full"))[1].lower(wanted, data).compile()
    rows, length = batch(0).tokens.shape
    assert f"f32[{rows // 2},{length // 2},{CONFIG.d_model}]" in cut.as_text()  # rows over fsdp, positions over tensor
    first = jax.device_get(init_state(transformer.init(CONFIG, jax.random.key(0)), OPTIMIZER))  # each step deletes what it is given
    results = [step(jax.device_put(first, jax.tree.map(lambda leaf: leaf.sharding, wanted)), data) for step in (plain, cut)]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=1e-5, rtol=1e-5), *results)
    assert np.abs(np.asarray(results[1][0].params["embed"]["table"]) - first.params["embed"]["table"]).max() > 1e-3


def test_logits_of_a_chunk_are_counted_over_all_devices_and_are_more_where_each_chunk_fetches_the_head() -> None:
    assert logit_bytes_on(make_mesh(2, 1, 2, jax.devices()[:4])) == 4 * LOGIT_BYTES
    assert logit_bytes_on(make_mesh(1, 4, 2, jax.devices())) == 8 * SPLIT_LOGIT_BYTES


class Listener:
    """A sampler that keeps what is published to it."""

    def publish(self, params, version) -> None:
        self.params, self.version = params, version


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_P06_a_publish_leaves_trainer_and_sampler_their_own_weights() -> None:
    """On two devices, with packed rows and bfloat16 compute: the next step does not delete what was published, and the reverse."""
    mesh, listener = make_mesh(1, 2, 1, jax.devices()[:2]), Listener()
    role = Role(
        "actor",
        model_config=CONFIG,
        params=transformer.init(CONFIG, jax.random.key(0)),
        optimizer=OPTIMIZER,
        objective=objective.actor(),
        sampler=listener,  # type: ignore[arg-type]
        buckets=Buckets.of(rows=6, max_length=16, max_tokens=8, packing="prefixes", multiple=2),
        temperature=1.0,
        allowed=None,
        mesh=mesh,
        how=Execution(scan_layers=True, remat="full", dtype=jnp.bfloat16),
    )
    rng = np.random.default_rng(0)
    role.publish()
    published = jax.tree.map(np.array, listener.params)
    sums = role.update([sample(rng, 3, 2, float(rng.normal())) for _ in range(6)])
    assert np.isfinite(sums["loss"].mean())
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.array, listener.params), published)
    role.publish()
    trained = jax.tree.map(np.array, role.state.params)
    assert {leaf.dtype for leaf in jax.tree.leaves(trained)} == {np.dtype(np.float32)}
    for leaf in jax.tree.leaves(listener.params):
        leaf.delete()
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.array, role.state.params), trained)
    with pytest.raises(ValueError, match="do not divide over 2 shards"):
        place_batch(batch(0)._replace(tokens=batch(0).tokens[:7]), mesh, ("data", "fsdp"))
