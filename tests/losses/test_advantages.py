"""Advantages against hand-computed values and their invariances."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crl_jax.losses.advantages import batch_advantages, group_advantages, subgroup_advantages

A = np.array
NAN = float("nan")


def test_mean_and_std_by_hand() -> None:
    rewards, groups = A([1.0, 0.0, 0.0, 1.0, 5.0, 1.0]), A([7, 7, 7, 7, 3, 3])
    # group 7: mean .5, sum of centred squares 1, std sqrt(1/3); group 3: mean 3, std sqrt(8)
    expected = A([0.8660254, -0.8660254, -0.8660254, 0.8660254, 0.7071068, -0.7071068])
    np.testing.assert_allclose(group_advantages(rewards, groups), expected, atol=1e-5)
    np.testing.assert_allclose(group_advantages(rewards, groups, normalise="mean"), A([0.5, -0.5, -0.5, 0.5, 2.0, -2.0]))


def test_subgroups_compete_inside_their_condition_only() -> None:
    rewards = A([1.0, 1.0, 0.0, 0.0, 1.0, 0.0])
    same_group, condition = A([0] * 6), A([1, 1, 0, 0, 1, 0])
    assert np.array_equal(subgroup_advantages(rewards, same_group, condition), np.zeros(6, np.float32))
    assert np.all(group_advantages(rewards, same_group) != 0)  # the cross-group ablation


def test_L05_no_variance_residue_is_divided_by() -> None:
    constant = np.full(8, 0.7, np.float32)
    assert np.array_equal(group_advantages(constant, np.zeros(8, int)), np.zeros(8))
    for n in range(2, 12):  # three times 0.1 has a mean that is not 0.1
        assert np.array_equal(group_advantages(np.full(n, 0.1), np.zeros(n, int)), np.zeros(n))
    one_failure = A([0.0] + [0.7] * 7, np.float32)
    # std = .7 / sqrt(8), so the first is -(7/8) sqrt(8); the bound (n - 1) / sqrt(n) is reached exactly
    advantages = group_advantages(one_failure, np.zeros(8, int))
    np.testing.assert_allclose(advantages, A([-2.4748737] + [0.3535534] * 7), atol=2e-5)


def test_L25_missing_reward_leaves_baseline_and_loss() -> None:
    rewards, group = A([1.0, 0.0, NAN, 1.0]), np.zeros(4, int)
    np.testing.assert_allclose(group_advantages(rewards, group, normalise="mean"), A([1 / 3, -2 / 3, 0.0, 1 / 3]), atol=1e-7)
    np.testing.assert_allclose(group_advantages(rewards, group), A([0.57735, -1.1547, 0.0, 0.57735]), atol=1e-4)
    assert np.array_equal(group_advantages(A([NAN, NAN]), A([0, 0])), np.zeros(2))
    assert np.array_equal(group_advantages(A([NAN, 4.0]), A([0, 0])), np.zeros(2))  # one scored member has no baseline


def test_L27_groups_are_matched_by_id_when_one_episode_was_lost() -> None:
    advantages = group_advantages(A([1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0]), A([0, 0, 0, 1, 1, 1, 1]))
    assert np.array_equal(advantages, np.zeros(7))


def test_L28_same_question_in_two_requests_has_two_baselines() -> None:
    assert np.array_equal(group_advantages(A([1.0, 1.0, 0.0, 0.0]), A([10, 10, 11, 11])), np.zeros(4))


def test_L16_single_member_is_finite() -> None:
    assert np.array_equal(group_advantages(A([0.5]), A([0])), np.zeros(1))
    assert group_advantages(np.zeros(0), np.zeros(0, int)).shape == (0,)


def test_batch_advantages_subtract_the_masked_mean() -> None:
    rewards, mask = A([1.0, -1.0, 1.0, NAN, 50.0]), A([True, True, True, True, False])
    np.testing.assert_allclose(batch_advantages(rewards, mask), A([2 / 3, -4 / 3, 2 / 3, 0.0, 0.0]), atol=1e-6)


def test_bad_input_is_refused() -> None:
    with pytest.raises(ValueError, match="equal length"):
        group_advantages(A([1.0, 2.0]), A([0]))
    with pytest.raises(ValueError, match="equal length"):
        subgroup_advantages(A([1.0, 2.0]), A([0, 0]), A([0]))
    with pytest.raises(ValueError, match="finite"):
        group_advantages(A([1.0, np.inf]), A([0, 0]))


rows = st.lists(
    st.tuples(st.one_of(st.floats(-5, 5, width=32), st.just(NAN), st.sampled_from([0.0, 1.0])), st.integers(0, 3), st.integers(0, 1)),
    min_size=1,
    max_size=24,
)


@given(rows, st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None)
def test_invariances(data: list[tuple[float, int, int]], random: object) -> None:
    rewards, groups, conditions = A([d[0] for d in data]), A([d[1] for d in data]), A([d[2] for d in data])
    advantages = subgroup_advantages(rewards, groups, conditions)

    order = list(range(len(data)))
    random.shuffle(order)  # type: ignore[attr-defined]
    np.testing.assert_allclose(subgroup_advantages(rewards[order], groups[order], conditions[order]), advantages[order], atol=1e-4)

    assert np.all(np.isfinite(advantages))
    assert np.all(advantages[np.isnan(rewards)] == 0)
    for key in {(g, c) for _, g, c in data}:
        members = (groups == key[0]) & (conditions == key[1]) & ~np.isnan(rewards)
        n = int(members.sum())
        assert abs(float(advantages[members].sum())) < 1e-3
        if n:
            assert np.abs(advantages[members]).max() <= (n - 1) / np.sqrt(n) + 1e-5
