"""A step on adapters: only they change, the base can be shared, and what is published is base plus change."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from crl_jax.checkpoint import store
from crl_jax.learner import objective
from crl_jax.learner.lora import make_lora_step
from crl_jax.learner.optimizer import make_optimizer
from crl_jax.learner.placement import place_batch, state_shardings
from crl_jax.learner.state import LearnerState, init_state
from crl_jax.learner.step import make_train_step
from crl_jax.models import transformer
from crl_jax.models.config import ModelConfig
from crl_jax.models.lora import Lora, init_adapters, merge
from crl_jax.models.params import flatten
from crl_jax.records import TrainBatch
from crl_jax.sharding.adapters import adapter_shardings, make_merge
from crl_jax.sharding.mesh import DATA, FSDP, make_mesh
from crl_jax.sharding.rules import shard_params

CONFIG = ModelConfig("m", vocab_size=12, d_model=8, n_layers=1, n_heads=2, n_kv_heads=2, head_dim=4, d_ff=16)
LORA = Lora(rank=2, alpha=4.0, targets=("q", "o", "up"))
LR = 0.1
OPTIMIZER = make_optimizer(LR, eps=1.0, clip_norm=0.0)  # a large eps: Adam's first step is then close to lr * g / (|g| + 1)


def batch() -> TrainBatch:
    rng = np.random.default_rng(0)
    shape = (4, 3)
    return TrainBatch(
        tokens=rng.integers(0, 12, (4, 6)).astype(np.int32),
        positions=np.tile(np.arange(6, dtype=np.int32), (4, 1)),
        token_index=np.tile(np.array([2, 3, 5], np.int32), (4, 1)),
        mask=np.ones(shape, np.bool_),
        behaviour_logps=np.full(shape, -2.0, np.float32),
        advantages=rng.normal(size=shape).astype(np.float32),
        states=np.zeros(shape, np.int32),
    )


@pytest.fixture(scope="module")
def mesh() -> jax.sharding.Mesh:
    return make_mesh(1, 2, 2, jax.devices()[:4])


@pytest.fixture(scope="module")
def stepped(mesh) -> tuple[dict, LearnerState, LearnerState, dict]:
    """Base, state before and after one step on the mesh, and the sums."""
    base = shard_params(transformer.init(CONFIG, jax.random.key(0)), mesh)
    adapters = init_adapters(base, LORA, jax.random.key(1))
    state = init_state(adapters, OPTIMIZER)
    shardings = state_shardings(state, OPTIMIZER, adapter_shardings(adapters, mesh), mesh)
    before = jax.device_put(state, shardings)
    step = make_lora_step(CONFIG, OPTIMIZER, objective.supervised(), LORA, temperature=1.0, allowed=None, mesh=mesh, shardings=shardings)
    kept = jax.tree.map(np.asarray, before)
    after, sums = step(base, before, place_batch(batch(), mesh, (DATA, FSDP)))
    return base, kept, after, sums


def test_the_first_step_is_adams_on_the_projected_full_gradient(stepped) -> None:
    """b moves by Adam's first step on s a^T dL/dW, with dL/dW from plain full fine-tuning on one device; a, whose gradient is 0, stays."""
    base, before, after, sums = stepped
    plain = jax.device_put(jax.tree.map(np.asarray, base))
    descent = optax.sgd(1.0)  # the update is then -g
    state = init_state(jax.tree.map(jnp.copy, plain), descent)
    full, full_sums = make_train_step(CONFIG, descent, objective.supervised(), temperature=1.0, allowed=None)(state, batch())
    np.testing.assert_allclose(float(sums["loss"].total), float(full_sums["loss"].total), rtol=1e-5)
    change = jax.tree.map(lambda new, old: np.asarray(old, np.float64) - np.asarray(new, np.float64), full.params, plain)
    gradients, was, now = flatten(change), flatten(before.params), flatten(after.params)
    for name in ("layers.0.attn.q", "layers.0.attn.o", "layers.0.mlp.up"):
        np.testing.assert_array_equal(now[f"{name}.a"], was[f"{name}.a"])
        g = 2.0 * was[f"{name}.a"].T @ gradients[name]
        np.testing.assert_allclose(now[f"{name}.b"], -LR * g / (np.abs(g) + 1.0), atol=3e-6)
        assert np.abs(g).max() > 0.01


def test_base_is_kept_and_state_holds_adapters_only(stepped, mesh) -> None:
    base, _, after, _ = stepped
    jax.tree.map(np.testing.assert_array_equal, base, transformer.init(CONFIG, jax.random.key(0)))
    names = {f"layers.0.{m}.{part}" for m in ("attn.q", "attn.o", "mlp.up") for part in "ab"}
    assert set(flatten(after.params)) == names
    sizes = sum(leaf.size for leaf in jax.tree.leaves(after.opt_state))
    assert sizes == 2 * sum(leaf.size for leaf in jax.tree.leaves(after.params)) + sum(
        leaf.ndim == 0 for leaf in jax.tree.leaves(after.opt_state)
    )
    q = flatten(after.params)["layers.0.attn.q.b"]
    assert q.sharding.shard_shape(q.shape) == (2, 4), "columns of q over tensor, rank whole"


def test_checkpoints_hold_adapters_only_and_come_back_equal(stepped, tmp_path) -> None:
    _, _, after, _ = stepped
    store.save(tmp_path, 1, {"actor": after}, {}, keep_last=1)
    found = store.restore(tmp_path, 1, {"actor": after}).arrays["actor"]
    jax.tree.map(np.testing.assert_array_equal, found, after)


def test_published_weights_are_merged_cast_copies(stepped) -> None:
    base, _, after, _ = stepped
    published = make_merge(LORA, jnp.bfloat16, base)(after.params)
    expected = merge(base, after.params, LORA)
    for name, leaf in flatten(published).items():
        assert leaf.dtype == jnp.bfloat16
        np.testing.assert_allclose(leaf.astype(jnp.float32), flatten(expected)[name], rtol=1e-2, atol=1e-3)
