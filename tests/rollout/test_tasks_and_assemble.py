"""The task stream, and what becomes a training sample."""

import dataclasses

import numpy as np
import pytest

from crl_jax.experience.buffer import Sample
from crl_jax.records import Completion, Condition, Episode, Finish, Generation, GenerationKind, Group, Provenance, Status, Task, TokenLog
from crl_jax.rollout.assemble import actor_samples, extractor_samples, success_rate
from crl_jax.rollout.tasks import Goal, TaskStream, fixed_tasks
from crl_jax.seeds import derive_seed

GOALS = tuple(Goal(f"toy/{i}", f"goal {i}", "ns") for i in range(10))


def test_D04_position_fixes_the_rest_and_epochs_differ():
    stream = TaskStream(GOALS, seed=3)
    first, second = [t.env for t in stream.tasks(0, 10)], [t.env for t in stream.tasks(10, 10)]
    assert sorted(first) == sorted(second) == sorted(g.env for g in GOALS)
    assert first != second
    assert stream.tasks(13, 1)[0].env == second[3]  # ten prompts, stopped after 13: the fourth task of the second epoch comes next
    assert [t.env for t in TaskStream(GOALS, seed=3).tasks(0, 20)] == first + second
    assert [t.env for t in TaskStream(GOALS, seed=4).tasks(0, 10)] != first


def test_goals_of_different_weight_are_drawn_in_proportion_and_the_position_fixes_each():
    stream = TaskStream(tuple(dataclasses.replace(goal, weight=w) for goal, w in zip(GOALS, (6.0, 3.0, 1.0), strict=False)), seed=3)
    drawn = [task.env for task in stream.tasks(0, 1000)]
    assert [drawn.count(f"toy/{i}") / 1000 for i in range(3)] == pytest.approx([0.6, 0.3, 0.1], abs=0.05)
    assert [task.env for task in stream.tasks(500, 9)] == drawn[500:509]


def test_evaluation_tasks_never_change():
    a, b = fixed_tasks(GOALS, 12, 1, "eval"), fixed_tasks(GOALS, 12, 1, "eval")
    assert a == b
    assert len({t.seed for t in a}) == 12


def test_derived_seeds_do_not_collide_by_concatenation():
    assert derive_seed("a", "bc") != derive_seed("ab", "c")
    assert derive_seed(1, "x") != derive_seed("1", "x")
    assert 0 <= derive_seed("anything") < 2**31


def _log():
    log = TokenLog.empty().append_context([1, 2], Provenance.PROMPT)
    return log.append_completion(Completion((3, 4), (-0.1, -0.2), (0, 0), (0, 0), Finish.STOP))


def _episode(i, group, condition, reward):
    return Episode(
        id=f"e{i}",
        group_id=group,
        condition=condition,
        task=Task("toy", 0, "the same goal text", "ns"),
        log=_log(),
        turns=(),
        final_observation="",
        status=Status.TERMINATED if reward is not None else Status.ENV_ERROR,
        success=bool(reward),
        reward=reward,
    )


def _group(name, guided, free):
    rewards = [(Condition.GUIDED, r) for r in guided] + [(Condition.FREE, r) for r in free]
    return Group(name, tuple(_episode(f"{name}{i}", name, c, r) for i, (c, r) in enumerate(rewards)))


def test_halves_are_compared_with_themselves_only():
    samples, _ = actor_samples([_group("g", [1.0, 1.0], [0.0, 0.0])], normalise="mean_std")
    assert [s.advantage for s in samples] == [0, 0, 0, 0]
    pooled, _ = actor_samples([_group("g", [1.0, 1.0], [0.0, 0.0])], normalise="mean", split=False)
    assert [s.advantage for s in pooled] == [0.5, 0.5, -0.5, -0.5]


def test_L28_two_groups_of_one_goal_text_do_not_share_a_baseline():
    samples, _ = actor_samples([_group("g1", [1.0, 1.0], []), _group("g2", [0.0, 0.0], [])], normalise="mean")
    assert [s.advantage for s in samples] == [0, 0, 0, 0]


def test_L25_L27_lost_episode_leaves_baseline_and_batch():
    samples, counts = actor_samples([_group("g", [1.0, 0.0, None, 1.0], [])], normalise="mean")
    assert np.allclose([s.advantage for s in samples], [1 / 3, -2 / 3, 1 / 3])
    assert counts["unscored"] == 1


def test_R12_an_episode_out_of_turns_costs_no_other_its_reward():
    first, late, last = _group("g", [1.0, 0.0, 1.0], []).episodes
    group = Group("g", (first, dataclasses.replace(late, status=Status.TRUNCATED), last))
    samples, counts = actor_samples([group], normalise="mean")
    assert np.allclose([s.advantage for s in samples], [1 / 3, -2 / 3, 1 / 3])
    assert counts["unscored"] == 0
    assert success_rate(group.episodes) == (2, 3)


def test_shared_group_id_is_refused():
    group = _group("g", [1.0], [0.0])
    with pytest.raises(ValueError, match="unique"):
        actor_samples([group, group], normalise="mean")


def test_success_rate_counts_scored_episodes():
    episodes = _group("g", [1.0, 0.0, None], [1.0]).episodes
    assert success_rate(episodes) == (2, 3)
    assert success_rate(episodes, Condition.GUIDED) == (1, 2)


def _evidence(i, reward, trained=0, last=-1):
    return Sample(Generation(f"g{i}", GenerationKind.DISTIL, (1, 2), (3, 4), (-0.3, -0.4), (5, 5), 0), reward, 1, trained, last)


def test_extractor_advantage_is_centred_then_weighted_and_behaviour_logps_are_kept():
    evidence = [_evidence(0, 1.0), _evidence(1, -1.0), _evidence(2, 1.0, trained=3, last=0), _evidence(3, -1.0, trained=1, last=9)]
    samples, weights = extractor_samples(evidence, step=10, alpha=0.5, cooldown_steps=2)
    assert weights == [1.0, 1.0, 0.5, 0.0]
    assert np.allclose([s.advantage for s in samples], [1.0, -1.0, 0.5, 0.0])
    log = samples[0].log
    assert log.ids.tolist() == [1, 2, 3, 4]
    assert np.allclose(log.logps[log.loss_mask], [-0.3, -0.4])
    assert log.versions[log.loss_mask].tolist() == [5, 5]


def test_generations_beyond_the_bound_stay_in_the_mean_and_teach_nothing():
    """Of version 5, in a batch that version 7 learns from: two versions old."""
    evidence = [_evidence(0, 1.0), _evidence(1, -1.0), _evidence(2, 1.0)]
    evidence[2] = evidence[2]._replace(generation=dataclasses.replace(evidence[2].generation, versions=(6, 7)))
    within = extractor_samples(evidence, step=0, alpha=0.5, cooldown_steps=0, version=7, max_lag=2)
    samples, weights = extractor_samples(evidence, step=0, alpha=0.5, cooldown_steps=0, version=7, max_lag=1)
    assert (within[1], weights) == ([1.0, 1.0, 1.0], [0.0, 0.0, 1.0])
    assert np.allclose([s.advantage for s in within[0]], [2 / 3, -4 / 3, 2 / 3])
    assert np.allclose([s.advantage for s in samples], [0.0, 0.0, 2 / 3])


def test_records_are_immutable():
    with pytest.raises(dataclasses.FrozenInstanceError):
        _log().ids = np.zeros(1)


def test_L25_a_nan_reward_is_counted_as_unscored():
    samples, counts = actor_samples([_group("g", [1.0, 0.0, float("nan"), 1.0], [])], normalise="mean")
    assert np.allclose([s.advantage for s in samples], [1 / 3, -2 / 3, 1 / 3])
    assert (counts["episodes"], counts["unscored"]) == (4, 1)


def test_an_empty_batch_has_no_samples():
    assert actor_samples([], normalise="mean_std") == ([], {"episodes": 0, "unscored": 0, "zero_advantage": 0})
    assert extractor_samples([], step=0, alpha=0.5, cooldown_steps=2) == ([], [])


@pytest.mark.parametrize("column", ["logps", "versions", "states"])
def test_R07_a_completion_of_unequal_columns_never_enters_a_log(column):
    whole = Completion((3, 4), (-0.1, -0.2), (0, 0), (0, 0), Finish.STOP)
    short = dataclasses.replace(whole, **{column: getattr(whole, column)[:1]})
    with pytest.raises(ValueError, match="gives one of each"):
        TokenLog.empty().append_completion(short)
