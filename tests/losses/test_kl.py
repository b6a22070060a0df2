"""KL estimators: values, finiteness, and the gradient each really has."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from crl_jax.losses.kl import Estimator, kl_estimate


def test_L04_values_in_the_normal_range_and_far_outside() -> None:
    assert float(kl_estimate(jnp.array(-1.0), jnp.array(-0.5), "k3")) == pytest.approx(0.14872, abs=1e-5)
    for gap in (100.0, -100.0, 1e4):
        for estimator in ("k1", "k2", "k3"):
            value, gradient = jax.value_and_grad(lambda x, g=gap, e=estimator: kl_estimate(x, x * 0.0 + g - 1.0, e))(jnp.array(-1.0))
            assert np.isfinite([value, gradient]).all()


@pytest.mark.parametrize(("estimator", "expected"), [("k1", 0.0), ("k2", 0.1779), ("k3", 0.2000)])
def test_L31_expected_gradient_is_the_documented_one(estimator: Estimator, expected: float) -> None:
    policy, ref = jnp.array([0.7, 0.3]), jnp.log(jnp.array([0.5, 0.5]))

    def in_loss(logits: jax.Array) -> jax.Array:  # expectation over samples held fixed
        return jnp.sum(policy * kl_estimate(jax.nn.log_softmax(logits), ref, estimator))

    assert float(jax.grad(in_loss)(jnp.log(policy))[0]) == pytest.approx(expected, abs=1e-4)

    def reverse(logits: jax.Array) -> jax.Array:
        return jnp.sum(jax.nn.softmax(logits) * (jax.nn.log_softmax(logits) - ref))

    def forward(logits: jax.Array) -> jax.Array:
        return jnp.sum(jnp.exp(ref) * (ref - jax.nn.log_softmax(logits)))

    exact = {"k1": 0.0, "k2": float(jax.grad(reverse)(jnp.log(policy))[0]), "k3": float(jax.grad(forward)(jnp.log(policy))[0])}
    assert exact[estimator] == pytest.approx(expected, abs=1e-4)


def test_k1_and_k3_are_unbiased() -> None:
    p, q = np.array([0.6, 0.3, 0.1]), np.array([0.2, 0.3, 0.5])
    for estimator in ("k1", "k3"):
        estimate = float(jnp.sum(jnp.asarray(p) * kl_estimate(jnp.log(p), jnp.log(q), estimator)))
        assert estimate == pytest.approx(float(np.sum(p * np.log(p / q))), abs=1e-6)
