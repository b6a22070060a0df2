"""Aggregation: totals and counts that add exactly, and do not see padding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crl_jax.losses.aggregate import Aggregation, aggregate, aggregate_count

MODES: list[tuple[Aggregation, float | None]] = [
    ("token_mean", None),
    ("seq_mean_token_mean", None),
    ("seq_mean_token_sum_norm", 8.0),
]


def mean(values, mask, mode: Aggregation = "token_mean", normaliser: float | None = None) -> float:
    return aggregate(jnp.asarray(values, jnp.float32), jnp.asarray(mask, bool), mode, normaliser=normaliser).mean()


def test_modes_by_hand() -> None:
    values, mask = [[1.0, 3.0, 9.0], [5.0, 9.0, 9.0]], [[1, 1, 0], [1, 0, 0]]
    assert mean(values, mask) == pytest.approx(3.0)
    assert mean(values, mask, "seq_mean_token_mean") == pytest.approx(3.5)
    assert mean(values, mask, "seq_mean_token_sum_norm", 4.0) == pytest.approx((4 / 4 + 5 / 4) / 2)


def test_L02_mask_selects() -> None:
    values = jnp.array([[1.0, jnp.nan, 3.0]])
    mask = jnp.array([[True, False, True]])

    def loss(x: jax.Array) -> jax.Array:
        total, count = aggregate(x, mask)
        return total / count

    assert float(loss(values)) == 2.0
    assert np.array_equal(jax.grad(loss)(values), [[0.5, 0.0, 0.5]])
    assert np.isnan(mean(values, np.ones((1, 3))))


def test_L09_padding_rows_do_not_count() -> None:
    values, mask = np.ones((4, 2)), np.array([[1, 1]] * 3 + [[0, 0]])
    for mode, normaliser in MODES[:2]:
        assert mean(values, mask, mode, normaliser) == 1.0


def test_L11_L12_parts_add_to_one_global_mean() -> None:
    def parts(*rows: tuple[int, float]) -> float:
        sums = [aggregate(jnp.full((1, n), loss), jnp.ones((1, n), bool)) for n, loss in rows]
        total = sums[0]
        for s in sums[1:]:
            total = total + s
        return total.mean()

    assert parts((1, 3.0), (3, 1.0)) == pytest.approx(1.5)  # micro-batches
    assert parts((8, 1.0), (2, 6.0)) == pytest.approx(2.0)  # ranks


def test_L14_padding_length_is_invisible() -> None:
    rng = np.random.default_rng(0)
    values, mask = rng.normal(size=(2, 6)), np.array([[1, 1, 1, 1, 0, 0], [1, 1, 0, 0, 0, 0]])
    wide = [np.pad(x, ((0, 0), (0, 10))) for x in (values, mask)]
    for mode, normaliser in MODES:
        assert mean(values, mask, mode, normaliser) == pytest.approx(mean(*wide, mode, normaliser), rel=1e-6)


def test_normaliser_belongs_to_one_mode() -> None:
    ones = jnp.ones((1, 1))
    for mode, normaliser in [("token_mean", 4.0), ("seq_mean_token_sum_norm", None), ("seq_mean_token_sum_norm", 0.0)]:
        with pytest.raises(ValueError, match="normaliser"):
            aggregate(ones, ones > 0, mode, normaliser=normaliser)  # type: ignore[arg-type]


def test_nothing_to_train_on_is_zero_over_zero() -> None:
    for mode, normaliser in MODES:
        total, count = aggregate(jnp.ones((2, 2)), jnp.zeros((2, 2), bool), mode, normaliser=normaliser)
        assert (float(total), int(count)) == (0.0, 0)


SHAPE = (6, 5)  # one shape, so that every example reuses the compiled programs


@given(st.integers(0, 2**16), st.integers(1, 5), st.sampled_from(MODES))
@settings(max_examples=40, deadline=None)
def test_splits_and_permutations_change_nothing(seed: int, cut: int, mode_and_norm: tuple[Aggregation, float | None]) -> None:
    mode, normaliser = mode_and_norm
    rng = np.random.default_rng(seed)
    values, mask = rng.normal(size=SHAPE).astype(np.float32), rng.random(SHAPE) < 0.6
    whole = aggregate(values, mask, mode, normaliser=normaliser)  # type: ignore[arg-type]

    first = np.where(np.arange(SHAPE[0])[:, None] < cut, mask, False)
    parts = [aggregate(values, m, mode, normaliser=normaliser) for m in (first, mask & ~first)]  # type: ignore[arg-type]
    assert int(parts[0].count + parts[1].count) == int(whole.count) == int(aggregate_count(mask, mode))  # type: ignore[arg-type]
    np.testing.assert_allclose(float(parts[0].total + parts[1].total), float(whole.total), atol=1e-5)

    order = rng.permutation(SHAPE[0])
    shuffled = aggregate(values[order], mask[order], mode, normaliser=normaliser)  # type: ignore[arg-type]
    np.testing.assert_allclose(float(shuffled.total), float(whole.total), atol=1e-5)
