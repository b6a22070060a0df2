"""Diversity re-ranking against hand-worked numbers of paper Eq. 6."""

import math

import numpy as np
import pytest

from crl_jax.experience.retrieve import Candidate, Diversity, Reservations, Standing, nearest, rerank

FOUR = [Candidate(name, 0.9 - 0.1 * n) for n, name in enumerate("abcd")]
PLAIN = {"lambda_count": 0.4, "recent_steps": 2, "k": 4}


def order(counts=None, last=None, rng=None, *, utility=None, outcome=None, penalty=None, **changes):
    sides = ((counts, 0), (last, -1), (utility, 0.5), (outcome, None), (penalty, 0.0))
    standings = {c.id: Standing(*((side or {}).get(c.id, usual) for side, usual in sides)) for c in FOUR}
    return "".join(c.id for c in rerank(FOUR, standings, step=10, how=Diversity(**(PLAIN | changes)), rng=rng))


def test_without_usage_the_order_is_similarity():
    assert order() == "abcd"


@pytest.mark.parametrize(("count", "first"), [(11, "a"), (12, "b")])
def test_one_rank_is_worth_twelve_showings_at_lambda_0_4(count, first):
    assert (0.4 * math.log(1 + count) > 1) == (first == "b")  # the crossing by hand: log(12) = 2.485 < 2.5 < log(13) = 2.565
    assert order({"a": count})[0] == first


def test_recency_is_worth_one_rank_in_steps_and_ties_keep_similarity():
    assert order(last={"a": 9})[:2] == "ab"  # -0 - 1 ties with -1: the more similar stays first
    assert order({"a": 1}, {"a": 9})[:2] == "ba"
    assert order({"a": 1}, {"a": 8})[:2] == "ab"  # two steps ago is not recent any more
    assert order({"a": 1}, {"a": 9}, recent_steps=0)[:2] == "ab"


def test_what_another_run_showed_at_a_later_step_is_not_recent():
    assert order({"a": 1}, {"a": 500})[:2] == "ab"
    assert order({"a": 1}, {"a": 10})[:2] == "ba"
    assert order(last={"a": 500}, dropout_p=1.0, rng=np.random.default_rng(0)) == "abcd"


def test_similarity_is_only_a_rank_but_has_a_floor():
    assert order(min_similarity=0.75) == "ab"
    assert order(min_similarity=0.95) == ""
    assert order({"a": 200, "b": 200}) == "cadb"  # by hand: a -2.12, b -3.12, c -2, d -3


def test_unsorted_candidates_are_ranked_by_similarity():
    assert [c.id for c in rerank(FOUR[::-1], {}, step=10, how=Diversity(**PLAIN))] == list("abcd")


def test_dropout_is_seeded_and_moves_only_a_recent_winner():
    draws = [order(last={"a": 10}, dropout_p=0.5, rng=np.random.default_rng(seed)) for seed in range(40)]
    assert draws == [order(last={"a": 10}, dropout_p=0.5, rng=np.random.default_rng(seed)) for seed in range(40)]
    assert set(draws) == {"abcd", "bcda"}
    assert order(dropout_p=1.0, rng=np.random.default_rng(0)) == "abcd"
    with pytest.raises(ValueError, match="rng"):
        order(dropout_p=0.5)


def test_success_moves_an_entry_by_ranks_and_may_be_asked_for():
    assert order(utility={"b": 0.9, "a": 0.3}, utility_weight=2.0) == "bacd"  # by hand: a -0.4, b -0.2, c -2, d -3
    assert order(utility={"b": 0.9, "a": 0.3}) == "abcd"
    assert order(utility={"a": 0.3, "c": 0.49}, min_utility=0.5) == "bd", "untried entries have 0.5"


def test_a_foreign_entry_that_hurts_goes_back():
    assert order(penalty={"a": 2.5}) == "bcad"


def test_positive_and_negative_examples_together():
    assert order(outcome={"a": True, "b": True, "d": False}, contrast=True) == "adbc"
    assert order(outcome={"a": False, "c": True}, contrast=True, k=2) == "ac"
    assert order(outcome={"b": True}, contrast=True) == "bacd"


def test_exploration_is_seeded_and_shows_the_least_shown():
    counts = {"a": 1, "b": 3, "c": 1, "d": 0}
    firsts = [order(counts, rng=np.random.default_rng(seed), explore_p=0.25)[0] for seed in range(400)]
    assert firsts == [order(counts, rng=np.random.default_rng(seed), explore_p=0.25)[0] for seed in range(400)]
    assert set(firsts) == {"a", "d"}
    assert 0.18 < firsts.count("d") / 400 < 0.32
    with pytest.raises(ValueError, match="rng"):
        order(explore_p=0.5)


def test_nearest_is_what_evaluation_reads():
    assert [c.id for c in nearest(FOUR[::-1], k=2)] == ["a", "b"]
    assert nearest(FOUR, k=2, min_similarity=0.99) == []


def test_reservations_are_released_oldest_first_and_forgotten():
    reserved = Reservations(max_age_steps=2)
    reserved.take("a", step=1)
    reserved.take("a", step=3)
    assert reserved.count("a") == 2
    reserved.release("a")
    reserved.release("never")
    reserved.forget_before(3)
    assert reserved.count("a") == 1
    reserved.forget_before(6)
    assert reserved.count("a") == 0
