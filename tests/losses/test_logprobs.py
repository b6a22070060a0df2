"""Token log-probabilities: temperature, constraint, entropy, gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from crl_jax.losses.logprobs import selected_logps

V = 6
ALLOWED = np.array([[-1, -1, -1], [0, 2, 5], [3, -1, -1]], np.int32)


def oracle(logits: np.ndarray, token: int, temperature: float, options: list[int]) -> tuple[float, float]:
    """(log-prob, entropy) by definition in float64."""
    weights = {o: np.exp(logits[o] / temperature) for o in options}
    z = sum(weights.values())
    return float(np.log(weights[token] / z)), float(-sum(w / z * np.log(w / z) for w in weights.values()))


def test_L38_temperature_acts_before_the_softmax() -> None:
    scores = selected_logps(jnp.array([[[2.0, 0.0]]]), jnp.array([[0]]), 0.5)
    assert float(scores.logps[0, 0]) == pytest.approx(-0.01815, abs=1e-5)


def test_full_and_constrained_tokens_match_the_definition() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 2, (2, 3, V))
    ids, states = np.array([[4, 2, 3], [5, 1, 0]]), np.array([[0, 1, 2], [1, 0, 1]])
    scores = selected_logps(jnp.asarray(logits), jnp.asarray(ids), 0.7, jnp.asarray(ALLOWED), jnp.asarray(states))
    for b, n in np.ndindex(2, 3):
        options = list(range(V)) if states[b, n] == 0 else [o for o in ALLOWED[states[b, n]] if o >= 0]
        logp, entropy = oracle(logits[b, n], ids[b, n], 0.7, options)
        assert float(scores.logps[b, n]) == pytest.approx(logp, abs=1e-5)
        assert float(scores.entropy[b, n]) == pytest.approx(entropy, abs=1e-5)
    assert float(scores.logps[0, 2]) == 0.0  # a single legal token is certain


def test_constrained_gradient_touches_only_allowed_logits_and_is_finite() -> None:
    logits = jnp.asarray(np.random.default_rng(1).normal(size=(1, 2, V)), jnp.float32)
    ids, states = jnp.array([[2, 1]]), jnp.array([[1, 0]])

    def total(x: jax.Array) -> jax.Array:
        return selected_logps(x, ids, 0.5, jnp.asarray(ALLOWED), states).logps.sum()

    gradient = np.asarray(jax.grad(total)(logits))
    p = np.exp(np.asarray(logits[0, 0])[[0, 2, 5]] / 0.5)
    p /= p.sum()
    np.testing.assert_allclose(gradient[0, 0], [-p[0] / 0.5, 0, (1 - p[1]) / 0.5, 0, 0, -p[2] / 0.5], atol=1e-5)
    full = np.exp(np.asarray(logits[0, 1]) / 0.5)
    np.testing.assert_allclose(gradient[0, 1], (np.eye(V)[1] - full / full.sum()) / 0.5, atol=1e-5)


def test_a_token_its_state_does_not_allow_surfaces_as_nan() -> None:
    scores = selected_logps(jnp.zeros((1, 2, V)), jnp.array([[1, 0]]), 1.0, jnp.asarray(ALLOWED), jnp.array([[1, 1]]))
    assert np.array_equal(np.isnan(scores.logps), [[True, False]])


def test_large_logits_and_half_precision_stay_finite() -> None:
    logits = jnp.array([[[1e4, 0.0, -1e4]]], jnp.bfloat16)
    scores = selected_logps(logits, jnp.array([[2]]), 1.0)
    assert scores.logps.dtype == jnp.float32
    assert bool(jnp.isfinite(scores.logps).all())
    assert float(scores.entropy[0, 0]) == pytest.approx(0.0, abs=1e-3)


def test_bad_arguments_are_refused() -> None:
    logits, ids = jnp.zeros((1, 1, V)), jnp.zeros((1, 1), int)
    with pytest.raises(ValueError, match="greedy"):
        selected_logps(logits, ids, 0.0)
    with pytest.raises(ValueError, match="both"):
        selected_logps(logits, ids, 1.0, jnp.asarray(ALLOWED))
