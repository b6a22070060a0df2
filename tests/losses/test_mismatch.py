"""Mismatch between sampler and learner, by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from crl_jax.losses.mismatch import mismatch, mismatch_sums, over_parts

LOGPS = np.log([[0.5, 0.4, 0.9], [0.1, 0.2, 0.3]])
BEHAVIOUR = np.log([[0.25, 0.4, 0.1], [0.2, 0.2, 0.3]])
MASK = np.array([[True, True, False], [True, False, False]])  # ratios 2, 1 and 1/2


def test_three_tokens_by_hand() -> None:
    sums = mismatch_sums(mismatch(jnp.asarray(LOGPS), jnp.asarray(BEHAVIOUR), jnp.asarray(MASK)))
    assert sums["logp_gap"].mean() == pytest.approx((np.log(2) + 0 + np.log(2)) / 3, rel=1e-6)
    assert (sums["logp_gap_max"].mean(), int(sums["logp_gap_max"].count)) == (pytest.approx(np.log(2)), 1)
    assert float(sums["ess"].total) == pytest.approx(3.5**2 / 5.25, rel=1e-6)  # (2 + 1 + 1/2)^2 / (4 + 1 + 1/4)
    assert int(sums["ess"].count) == 3


def test_equal_policies_lose_nothing_and_one_heavy_token_leaves_one() -> None:
    ones, many = jnp.ones((1, 100), bool), jnp.full((1, 100), -1.0)
    same = mismatch_sums(mismatch(many, many, ones))
    assert (same["logp_gap"].mean(), same["logp_gap_max"].mean(), same["ess"].mean()) == (0.0, 0.0, 1.0)
    heavy = mismatch_sums(mismatch(many.at[0, 7].set(-0.0), many.at[0, 7].set(-50.0), ones))
    assert float(heavy["ess"].total) == pytest.approx(1.0, abs=1e-5), "of 100 tokens one carries all the weight; the ratio is clipped"
    assert heavy["logp_gap_max"].mean() == 50.0, "the difference is not"


def test_parts_give_what_the_whole_gives_and_masked_slots_may_hold_anything() -> None:
    rng = np.random.default_rng(0)
    logps, behaviour = rng.normal(-1, 1, (2, 4, 3, 5))
    mask = rng.random((4, 3, 5)) < 0.6
    behaviour[~mask] = np.nan
    stacked = jax.vmap(mismatch)(jnp.asarray(logps), jnp.asarray(behaviour), jnp.asarray(mask))
    whole = mismatch(*(jnp.asarray(x.reshape(12, 5)) for x in (logps, behaviour, mask)))
    for name, value in mismatch_sums(whole).items():
        part = mismatch_sums(over_parts(stacked))[name]
        assert (float(part.total), int(part.count)) == (pytest.approx(float(value.total), rel=1e-6), int(value.count)), name


def test_no_token_gives_empty_sums() -> None:
    sums = mismatch_sums(mismatch(jnp.zeros((1, 2)), jnp.zeros((1, 2)), jnp.zeros((1, 2), bool)))
    assert (float(sums["ess"].total), int(sums["ess"].count), int(sums["logp_gap"].count)) == (0.0, 0, 0)
