"""Schedule, clipping, decay and the dtypes of the optimiser state."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from crl_jax.learner.optimizer import make_optimizer, make_schedule
from crl_jax.models.params import flatten
from crl_jax.models.presets import TINY
from crl_jax.models.transformer import param_shapes


def test_C06_schedule_is_as_long_as_the_run() -> None:
    schedule = make_schedule("cosine", 1e-3, steps=500, warmup_steps=50)
    rates = np.array([float(schedule(n)) for n in range(0, 501, 10)])
    assert rates.argmax() == 5  # step 50
    assert rates[5] == pytest.approx(1e-3)
    assert rates[-1] == pytest.approx(0.0, abs=1e-9)
    assert float(schedule(275)) == pytest.approx(0.5e-3, rel=1e-5)  # half-way through the cosine
    linear = make_schedule("linear", 1.0, steps=10)
    assert [float(linear(n)) for n in (0, 5, 10)] == pytest.approx([1.0, 0.5, 0.0])
    assert float(make_schedule("constant", 2.0, steps=10, warmup_steps=4)(9)) == 2.0
    with pytest.raises(ValueError, match="below the run"):
        make_schedule("cosine", 1.0, steps=5, warmup_steps=5)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("constant", {0: 0.0, 1: 0.5, 2: 1.0, 4: 1.0, 6: 1.0, 9: 1.0, 12: 1.0}),
        ("linear", {0: 0.0, 1: 0.5, 2: 1.0, 4: 0.75, 6: 0.5, 9: 0.125, 10: 0.0, 12: 0.0}),
        # cos of 0, 45, 90, 135 and 180 degrees: (1 + cos) / 2
        ("cosine", {0: 0.0, 1: 0.5, 2: 1.0, 4: 0.8535534, 6: 0.5, 8: 0.1464466, 10: 0.0, 12: 0.0}),
    ],
)
def test_schedules_by_hand(kind, expected) -> None:
    """Ten updates, two of warm-up: from 0 to the peak at n = 2, and from there to n = 10 (and never below 0 after it)."""
    schedule = make_schedule(kind, 3.0, steps=10, warmup_steps=2)
    assert {n: float(schedule(n)) / 3.0 for n in expected} == pytest.approx(expected, abs=1e-6)
    assert float(make_schedule(kind, 3.0, steps=10)(0)) == 3.0, "without warm-up the first update has the peak"


def adamw(params, gradients, *, rate, b1, b2, eps, decay, clip):
    """AdamW in float64 by its definition (arXiv:1711.05101): the gradient is clipped by its global norm, then enters the moments."""
    weights = {k: np.array(v, np.float64) for k, v in params.items()}
    first, second = ({k: np.zeros_like(v) for k, v in weights.items()} for _ in range(2))
    for n, gradient in enumerate(gradients):
        norm = np.sqrt(sum((g.astype(np.float64) ** 2).sum() for g in gradient.values()))
        for k, g in gradient.items():
            g = g * min(1.0, clip / norm)
            first[k] = b1 * first[k] + (1 - b1) * g
            second[k] = b2 * second[k] + (1 - b2) * g**2
            step = first[k] / (1 - b1 ** (n + 1)) / (np.sqrt(second[k] / (1 - b2 ** (n + 1))) + eps)
            weights[k] = weights[k] - rate(n) * (step + (decay if weights[k].ndim > 1 else 0.0) * weights[k])
    return weights


def test_six_updates_equal_adamw_with_the_gradient_clipped_before_the_moments() -> None:
    """Gradients of very different sizes, some below the clip: clipping anywhere else, or each array alone, gives other moments."""
    rng = np.random.default_rng(0)
    params = {"w": rng.normal(size=(3, 4)).astype(np.float32), "scale": rng.normal(size=4).astype(np.float32)}
    sizes = (0.01, 30.0, 0.3, 100.0, 0.001, 2.0)
    gradients = [{k: (size * rng.normal(size=v.shape)).astype(np.float32) for k, v in params.items()} for size in sizes]
    numbers = {"b1": 0.8, "b2": 0.95, "eps": 1e-6}
    optimizer = make_optimizer(make_schedule("cosine", 0.1, steps=8, warmup_steps=2), weight_decay=0.3, clip_norm=1.5, **numbers)
    now, state = params, jax.jit(optimizer.init)(params)

    @jax.jit
    def update(now, state, gradient):
        updates, state = optimizer.update(gradient, state, now)
        return optax.apply_updates(now, updates), state

    for gradient in gradients:
        now, state = update(now, state, gradient)

    def rate(n: int) -> float:
        return 0.1 * (n / 2 if n < 2 else (1 + np.cos(np.pi * (n - 2) / 6)) / 2)

    expected = adamw(params, gradients, rate=rate, decay=0.3, clip=1.5, **numbers)
    for name in params:
        np.testing.assert_allclose(now[name], expected[name], rtol=2e-5, atol=1e-6)


def test_weight_decay_shrinks_matrices_and_leaves_norms_and_biases_alone() -> None:
    """With no gradient the decay is all that moves: on a model with every kind of parameter, and on adapters."""
    config = dataclasses.replace(TINY, n_layers=1, tie_embeddings=False, qkv_bias=True, qk_norm=True, post_norms=True)
    params = {name: np.ones(leaf.shape, np.float32) for name, leaf in flatten(param_shapes(config)).items()}
    optimizer = make_optimizer(0.1, weight_decay=0.5)
    zeros = jax.tree.map(np.zeros_like, params)
    updates = jax.jit(lambda zeros, params: optimizer.update(zeros, optimizer.init(params), params)[0])(zeros, params)
    shrunk = {name for name, update in updates.items() if np.allclose(update, -0.05)}
    kept = {name for name, update in updates.items() if not np.any(update)}
    assert shrunk | kept == set(params)
    layer = {*(f"layers.0.attn.{m}" for m in "qkvo"), *(f"layers.0.mlp.{m}" for m in ("gate", "up", "down"))}
    assert shrunk == {"embed.table", "head.kernel"} | layer
    assert {"layers.0.attn.q_bias", "layers.0.attn.q_norm.scale", "layers.0.attn_post_norm.scale", "final_norm.scale"} <= kept


def test_first_update_is_adam_of_the_clipped_gradient() -> None:
    params = {"w": jnp.ones((1, 2)), "b": jnp.ones(2)}
    grads = {"w": jnp.array([[30.0, 0.0]]), "b": jnp.array([0.0, 40.0])}  # norm 50
    optimizer = make_optimizer(0.1, eps=0.3, weight_decay=0.5, clip_norm=1.0)
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    # Adam's first step is g / (|g| + eps) with g clipped to (.6, .8); only the matrix decays
    np.testing.assert_allclose(updates["w"], [[-0.1 * (0.6 / 0.9 + 0.5), -0.05]], rtol=1e-5)
    np.testing.assert_allclose(updates["b"], [0.0, -0.1 * 0.8 / 1.1], rtol=1e-5)


def test_clip_norm_zero_is_off() -> None:
    optimizer = make_optimizer(0.1, eps=1.0, clip_norm=0.0)
    params = {"w": jnp.zeros((1, 1))}
    updates, _ = optimizer.update({"w": jnp.full((1, 1), 9.0)}, optimizer.init(params), params)
    assert float(updates["w"][0, 0]) == pytest.approx(-0.1 * 9.0 / 10.0, rel=1e-4)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_K07_state_dtypes_survive_three_updates(dtype) -> None:
    params = {"w": jnp.ones((2, 2), dtype)}
    optimizer = make_optimizer(make_schedule("cosine", 0.1, steps=10, warmup_steps=2))
    state = optimizer.init(params)
    dtypes = jax.tree.map(lambda x: x.dtype, state)
    for _ in range(3):
        updates, state = optimizer.update({"w": jnp.ones((2, 2), jnp.float32)}, state, params)
        params = optax.apply_updates(params, updates)
        assert jax.tree.map(lambda x: x.dtype, state) == dtypes
    assert params["w"].dtype == dtype
    assert {x.dtype for x in jax.tree.leaves(state)} == {jnp.dtype(jnp.float32), jnp.dtype(jnp.int32)}
