"""GRPO, CISPO and the importance ratio: hand-computed values, gradients, finite differences."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from crl_jax.losses.cispo import cispo_loss
from crl_jax.losses.grpo import grpo_loss
from crl_jax.losses.ratio import importance_ratio

ON = jnp.ones((1, 1), bool)


def one(value: float) -> jax.Array:
    return jnp.full((1, 1), value)


def oracle_grpo(logps, old, adv, mask, low, high, level):
    out = np.zeros(logps.shape)
    for b in range(logps.shape[0]):
        used = [n for n in range(logps.shape[1]) if mask[b, n]]
        for n in used:
            log_ratio = np.mean([logps[b, m] - old[b, m] for m in used]) if level == "sequence" else logps[b, n] - old[b, n]
            r, a = np.exp(log_ratio), adv[b, n]
            out[b, n] = -min(r * a, min(max(r, 1 - low), 1 + high) * a)
    return out


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_grpo_matches_a_loop(level: str) -> None:
    rng = np.random.default_rng(0)
    logps, old, adv = rng.normal(-1, 0.5, (4, 6)), rng.normal(-1, 0.5, (4, 6)), rng.normal(0, 1, (4, 6))
    mask = rng.random((4, 6)) < 0.7
    mask[3] = False
    got = grpo_loss(*map(jnp.asarray, (logps, old, adv, mask)), clip_low=0.2, clip_high=0.3, ratio=level)  # type: ignore[arg-type]
    np.testing.assert_allclose(got.loss, oracle_grpo(logps, old, adv, mask, 0.2, 0.3, level), rtol=1e-5, atol=1e-6)
    assert not np.asarray(got.clipped)[~mask].any()


@pytest.mark.parametrize(
    ("ratio", "advantage", "gradient"),
    [(1.1, 1.0, -1.1), (1.3, 1.0, 0.0), (0.5, 1.0, -0.5), (0.5, -1.0, 0.0), (1.3, -1.0, 1.3)],  # d loss / d logp, clip 0.2
)
def test_grpo_gradient_stops_only_past_the_bound(ratio: float, advantage: float, gradient: float) -> None:
    def loss(logp: jax.Array) -> jax.Array:
        return grpo_loss(logp, one(-1.0 - np.log(ratio)), one(advantage), ON).loss.sum()

    assert float(jax.grad(loss)(one(-1.0))[0, 0]) == pytest.approx(gradient, rel=1e-5)
    assert bool(grpo_loss(one(-1.0), one(-1.0 - np.log(ratio)), one(advantage), ON).clipped[0, 0]) == (gradient == 0.0)


def test_sequence_ratio_gradient_by_finite_differences() -> None:
    rng = np.random.default_rng(1)
    old, adv = rng.normal(-1, 0.02, (2, 5)), np.array([[1.0] * 5, [-0.5] * 5])
    logps, mask = old + rng.normal(0, 0.02, (2, 5)), np.array([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]], bool)

    def loss(x: jax.Array) -> jax.Array:
        return grpo_loss(x, jnp.asarray(old), jnp.asarray(adv), jnp.asarray(mask), ratio="sequence").loss.sum()

    gradient = np.asarray(jax.grad(loss)(jnp.asarray(logps)))
    for b, n in np.ndindex(2, 5):
        bump = np.zeros((2, 5))
        bump[b, n] = 1e-5
        plus, minus = (oracle_grpo(logps + s * bump, old, adv, mask, 0.2, 0.2, "sequence").sum() for s in (1, -1))
        assert gradient[b, n] == pytest.approx((plus - minus) / 2e-5, abs=1e-4)


@pytest.mark.parametrize(("ratio", "gradient"), [(2.0, -1.28), (1.1, -1.10), (0.5, -0.9)])
def test_L18_cispo_gradient_is_the_clipped_weight_everywhere(ratio: float, gradient: float) -> None:
    def loss(logp: jax.Array) -> jax.Array:
        return cispo_loss(logp, one(-1.0 - np.log(ratio)), one(1.0), ON, eps_low=0.1, eps_high=0.28).loss.sum()

    assert float(jax.grad(loss)(one(-1.0))[0, 0]) == pytest.approx(gradient, rel=1e-5)
    assert float(loss(one(-1.0))) == pytest.approx(-gradient, rel=1e-5)  # -w A logp at logp = -1


def test_L19_eps_high_is_added_to_one() -> None:
    loss = cispo_loss(one(-1.0), one(-1.0), one(1.0), ON, eps_high=0.28)
    assert float(loss.loss[0, 0]) == pytest.approx(1.0)
    assert not bool(loss.clipped[0, 0])
    with pytest.raises(ValueError, match="added to 1"):
        cispo_loss(one(-1.0), one(-1.0), one(1.0), ON, eps_high=-0.72)  # a cap of 0.28
    with pytest.raises(ValueError, match="eps_low"):
        cispo_loss(one(-1.0), one(-1.0), one(1.0), ON, eps_low=1.2)
    with pytest.raises(ValueError, match="widths around 1"):
        grpo_loss(one(-1.0), one(-1.0), one(1.0), ON, clip_low=1.2)


@pytest.mark.parametrize("loss_fn", [grpo_loss, cispo_loss])
def test_L02_masked_nan_is_harmless_and_unmasked_nan_surfaces(loss_fn) -> None:
    logps, old = jnp.array([[-1.0, jnp.nan, -3.0]]), jnp.array([[-1.0, jnp.nan, -3.0]])
    adv = jnp.array([[1.0, jnp.nan, 1.0]])

    def loss(x: jax.Array, mask: jax.Array) -> jax.Array:
        return loss_fn(x, old, adv, mask).loss.sum()

    value, gradient = jax.value_and_grad(loss)(logps, jnp.array([[True, False, True]]))
    assert bool(jnp.isfinite(value))
    np.testing.assert_allclose(gradient, [[-1.0, 0.0, -1.0]], rtol=1e-6)
    assert bool(jnp.isnan(loss(logps, jnp.ones((1, 3), bool))))


def test_ratio_is_finite_for_any_finite_logps() -> None:
    far = importance_ratio(jnp.array([[0.0, -1e4]]), jnp.array([[-1e4, 0.0]]), jnp.ones((1, 2), bool))
    assert bool(jnp.isfinite(far).all())
    assert bool(jnp.isfinite(jnp.square(far)).all())
