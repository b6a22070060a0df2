"""Importance corrections between sampler and learner: hand-computed weights, gradients, masks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from crl_jax.losses.correction import corrected_loss

NEW = jnp.log(jnp.array([[0.9, 0.2, 0.5, 0.3], [0.6, 0.6, 0.1, 0.9]]))
OLD = jnp.log(jnp.array([[0.1, 0.4, 0.5, 0.1], [0.5, 0.5, 0.9, 0.1]]))  # ratios 9, 0.5, 1, 3 and 1.2, 1.2, (masked)
MASK = jnp.array([[True, True, True, True], [True, True, False, False]])
ADVANTAGES = jnp.array([[1.0] * 4, [-2.0] * 4])


@pytest.mark.parametrize(
    ("correction", "level", "expected"),
    [
        ("none", "token", [[1, 1, 1, 1], [1, 1, 0, 0]]),
        ("tis", "token", [[2, 0.5, 1, 2], [1.2, 1.2, 0, 0]]),
        ("icepop", "token", [[0, 0.5, 1, 0], [1.2, 1.2, 0, 0]]),
        ("tis", "sequence", [[2, 2, 2, 2], [1.44, 1.44, 0, 0]]),  # products 13.5 and 1.44
        ("icepop", "sequence", [[0, 0, 0, 0], [1.44, 1.44, 0, 0]]),
    ],
)
def test_gradient_is_the_weight_times_the_advantage(correction, level, expected) -> None:
    def loss(logps: jax.Array) -> jax.Array:
        return corrected_loss(logps, OLD, ADVANTAGES, MASK, correction=correction, level=level, low=0.4, high=2.0).loss.sum()

    np.testing.assert_allclose(jax.grad(loss)(NEW), -np.array(expected) * np.asarray(ADVANTAGES), rtol=1e-5)


def test_what_was_changed_is_marked_and_the_true_ratio_is_reported() -> None:
    got = corrected_loss(NEW, OLD, ADVANTAGES, MASK, correction="icepop", low=0.6, high=2.0)
    np.testing.assert_allclose(got.ratio, [[9, 0.5, 1, 3], [1.2, 1.2, 1, 1]], rtol=1e-5)
    assert np.asarray(got.clipped).tolist() == [[True, True, False, True], [False] * 4]


def test_masked_slots_may_hold_anything() -> None:
    broken = NEW.at[1, 2].set(jnp.nan)
    for level in ("token", "sequence"):
        value, gradient = jax.value_and_grad(
            lambda x, level=level: corrected_loss(x, OLD, ADVANTAGES, MASK, correction="tis", level=level).loss.sum()
        )(broken)
        assert bool(jnp.isfinite(value))
        assert bool(jnp.isfinite(gradient).all())


def test_long_rows_stay_finite() -> None:
    far = corrected_loss(
        jnp.zeros((1, 500)), jnp.full((1, 500), -3.0), jnp.ones((1, 500)), jnp.ones((1, 500), bool), correction="tis", level="sequence"
    )
    assert bool(jnp.isfinite(far.ratio).all())


@pytest.mark.parametrize(("low", "high"), [(-0.1, 2.0), (0.5, 0.9), (1.5, 2.0)])
def test_bounds_are_ratios_not_distances(low: float, high: float) -> None:
    with pytest.raises(ValueError, match="values of the ratio itself"):
        corrected_loss(NEW, OLD, ADVANTAGES, MASK, correction="tis", low=low, high=high)
