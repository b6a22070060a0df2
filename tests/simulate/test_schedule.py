"""The simulated schedule: what must hold for every workload, and trivial ones by hand."""

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crl_jax.simulate.outcome import Outcome, table
from crl_jax.simulate.schedule import simulate
from crl_jax.simulate.workload import Engine, Spread, Workload

NOTHING = Spread(mean=0.0)
STILL = Workload(  # one environment, constant durations, no bank: rollout 3 x 0.5 + 2 x (0.1 + 10 x 0.02) = 2.1 s, update 1 s
    steps=4,
    environments=1,
    turns=Spread(mean=2.0),
    reply_tokens=Spread(mean=10.0),
    env_s=Spread(mean=0.5),
    actor=Engine(slots=8, prefill_s=0.1, decode_s=0.02),
    learner_s=1.0,
    learner_episode_s=0.0,
    publish_s=0.0,
    written=0.0,
    lesson_tokens=Spread(mean=1.0),
    extractor=Engine(slots=64),
)

seconds = st.floats(0.0, 2.0)


@st.composite
def spreads(draw, low: float, high: float) -> Spread:
    return Spread(mean=draw(st.floats(low, high)), cv=draw(st.sampled_from([0.0, 0.5, 2.0])))


@st.composite
def workloads(draw, **fixed) -> Workload:
    engine = st.builds(
        Engine, slots=st.integers(1, 12), prefill_s=st.floats(0, 0.1), decode_s=st.floats(0, 0.05), decode_slot_s=st.floats(0, 0.01)
    )
    fields = {
        "seed": st.integers(0, 5),
        "steps": st.integers(1, 6),
        "environments": st.integers(1, 8),
        "max_lag": st.integers(0, 4),
        "capacity": st.sampled_from([0.0, 0.7, 1.0, 2.0]),
        "turns": spreads(1, 3),
        "reply_tokens": spreads(1, 8),
        "env_s": spreads(0, 1),
        "env_workers": st.integers(0, 3),
        "actor": engine,
        "learner_s": seconds,
        "learner_episode_s": st.floats(0, 0.1),
        "publish_s": st.floats(0, 0.1),
        "bank_s": st.floats(0, 0.1),
        "lesson_tokens": spreads(1, 8),
        "extractor": engine,
        "concurrency": st.integers(1, 6),
        "bank_entries": st.integers(1, 20),
        "warmup_steps": st.integers(0, 2),
        "merge_every": st.integers(0, 2),
        "merge_s": seconds,
        "extractor_batch": st.integers(1, 4),
        "extractor_update_s": seconds,
        "buffer_capacity": st.integers(4, 8),
        "max_age_steps": st.integers(0, 3),
        "eval_every": st.integers(0, 2),
        "eval_episodes": st.integers(0, 4),
        "save_every": st.integers(0, 2),
        "save_s": st.floats(0, 0.1),
    }
    return Workload(**{name: fixed[name] if name in fixed else draw(strategy) for name, strategy in fields.items()})


def quick(test):
    return settings(max_examples=25, deadline=None, derandomize=True)(test)


def total(lags) -> int:
    return sum(lags.counts.values())


@quick
@given(workloads())
def test_lag_is_bounded_and_nothing_is_lost_or_done_twice(w: Workload) -> None:
    o = simulate(w)
    assert max(o.lags.counts) <= w.max_lag, "versions are published by the learner alone, one for each batch"
    assert min(o.lags.counts) >= 0
    assert max(o.token_lags.counts) <= max(o.lags.counts), "an episode's later replies are younger"
    assert [total(lags) for lags in o.batch_lags] == [w.environments] * w.steps
    assert o.counts["episodes"] == o.counts["submitted"] == w.steps * w.environments
    assert o.counts["distilled"] <= o.counts["submitted"]
    assert total(o.token_lags) <= o.counts["tokens"], "the rest are an evaluation's"
    assert total(o.generation_lags) == o.counts["extractor_updates"] * w.extractor_batch
    assert o.counts["buffer"] <= w.buffer_capacity
    assert len(o.step_s) == w.steps


@quick
@given(workloads())
def test_every_second_of_the_trainer_and_every_piece_of_work_is_accounted_for(w: Workload) -> None:
    o = simulate(w)
    assert sum(o.phases_s.values()) == pytest.approx(o.seconds)
    assert sum(o.step_s) == pytest.approx(o.seconds)
    slower = 1.0 if not w.capacity else max(1.0, 5 / w.capacity)  # five parts at most
    for part, work in (("learner", w.steps * w.update_s), ("extractor_learner", o.counts["extractor_updates"] * w.extractor_update_s)):
        assert work - 1e-6 <= o.busy_s[part] <= work * slower + 1e-6
    assert all(0 <= share <= 1 + 1e-9 for share in o.filled.values())
    assert all(wait >= 0 for wait in o.waits_s.values())


@quick
@given(workloads(eval_every=0, actor=Engine(slots=1, prefill_s=0.02, decode_s=0.01), capacity=0.0))
def test_one_slot_works_as_long_as_its_replies_need(w: Workload) -> None:
    o = simulate(w)
    replies = sum(max(1, round(w.turns.draw(w.rng("episode", step, i)))) for step in range(w.steps) for i in range(w.environments))
    assert o.busy_s["sampler"] == pytest.approx(0.02 * replies + 0.01 * o.counts["tokens"])


@quick
@given(workloads())
def test_a_seed_fixes_everything(w: Workload) -> None:
    assert simulate(w) == simulate(w)


@quick
@given(workloads(max_lag=1))
def test_asynchronous_is_never_slower_than_in_turn_and_plays_the_same(w: Workload) -> None:
    beside, in_turn = simulate(w), simulate(w.at(w.environments, sync=True))
    assert beside.seconds <= in_turn.seconds + 1e-6
    assert beside.counts["tokens"] == in_turn.counts["tokens"]
    assert set(in_turn.lags.counts) == {0}
    assert in_turn.counts["distilled"] == in_turn.counts["submitted"], "the next batch waits for them"


@quick
@given(workloads())
def test_more_devices_are_never_slower_where_nothing_queues(w: Workload) -> None:
    wide = dataclasses.replace(
        w, actor=Engine(slots=99, decode_s=0.02), extractor=Engine(slots=99, decode_s=0.02), env_workers=0, concurrency=99
    )
    times = [simulate(dataclasses.replace(wide, capacity=capacity)).seconds for capacity in (0.5, 1.0, 2.0, 5.0, 0.0)]
    assert all(a >= b - 1e-6 for a, b in itertools.pairwise(times))
    assert times[-2] == pytest.approx(times[-1]), "five parts, five devices"


# ---------------------------------------------------------------------------------------------------------------------- by hand


def steady(o: Outcome) -> float:
    return sum(o.step_s[2:-2]) / len(o.step_s[2:-2])  # no batch is ahead at first, and none is played at last


def test_in_turn_a_step_is_the_sum_of_its_parts() -> None:
    o = simulate(STILL.at(1, sync=True))
    assert o.step_s == pytest.approx([3.1] * 4)
    assert o.phases_s["collect"] == pytest.approx(4 * 2.1)
    more = dataclasses.replace(STILL, bank_s=0.3, publish_s=0.2, other_s=0.1, save_every=1, save_s=0.4, merge_every=1, merge_s=0.5)
    assert simulate(more.at(1, sync=True)).step_s == pytest.approx([4.1, 4.6, 4.6, 4.6]), "no merge at step 0"


@pytest.mark.parametrize(
    ("max_lag", "update_s", "expected"), [(1, 1.0, 1.55), (1, 3.0, 3.0), (2, 1.0, 3.1 / 3), (2, 0.4, 2.5 / 3), (3, 0.5, 0.65)]
)
def test_beside_each_other_a_step_takes_as_long_as_the_slower_part(max_lag: int, update_s: float, expected: float) -> None:
    """A batch of 2.1 s begins with the wait for the one ``max_lag`` before, so that in its time fit ``max_lag`` steps and one wait:
    a step takes (2.1 + update) / (max_lag + 1), or the update alone where the rollout is no longer than ``max_lag`` of them."""
    roomy = dataclasses.replace(STILL, steps=24, max_lag=max_lag, learner_s=update_s, actor=Engine(slots=99, decode_s=0.03))
    o = simulate(roomy)
    assert sum(o.step_s[6:18]) / 12 == pytest.approx(expected), "batches come max_lag + 1 at a time"
    assert max(o.lags.counts) == max_lag
    assert o.seconds == pytest.approx(sum(o.phases_s.values()))


def test_replies_queue_for_slots_and_share_them() -> None:
    one_turn = dataclasses.replace(STILL, steps=1, environments=6, turns=Spread(mean=1.0), env_s=NOTHING)

    def rollout(engine: Engine) -> float:
        return simulate(dataclasses.replace(one_turn, actor=engine)).phases_s["collect"]

    assert rollout(Engine(slots=1, prefill_s=0.1, decode_s=0.02)) == pytest.approx(6 * 0.3)
    assert rollout(Engine(slots=6, decode_s=0.02)) == pytest.approx(0.2), "all at once"
    assert rollout(Engine(slots=6, decode_s=0.02, decode_slot_s=0.01)) == pytest.approx(10 * 0.08)
    assert rollout(Engine(slots=4, decode_s=0.02)) == pytest.approx(2 * 0.2), "four, then two"
    assert rollout(Engine(slots=6, prefill_s=0.1, decode_s=0.02)) == pytest.approx(6 * 0.1 + 0.2), "inputs come first"


def test_environments_queue_for_workers() -> None:
    w = dataclasses.replace(STILL, steps=1, environments=6, turns=Spread(mean=1.0), env_workers=2, actor=Engine(slots=6))
    o = simulate(w)
    assert o.phases_s["collect"] == pytest.approx(6 * 2 * 0.5 / 2), "twelve calls of half a second by two workers"
    assert o.waits_s["environments for a worker"] > 0


def test_parts_that_share_a_device_slow_each_other_down() -> None:
    """Decoding never stops, so an update of 1 s takes 2 s. A batch's 2 s of decoding last from one wait to the end of the next: twice the
    wait w at full speed and one update at half of it, so w = 0.5 s. With a device each it would be (2 + 1) / 2 s a step."""
    w = dataclasses.replace(STILL, steps=16, env_s=NOTHING, actor=Engine(slots=8, decode_s=0.1))
    assert steady(simulate(w)) == pytest.approx(1.5)
    assert steady(simulate(dataclasses.replace(w, capacity=1.0))) == pytest.approx(2.5)


def test_the_extractor_s_lag_by_hand() -> None:
    """In turn, one entry is readable: every guided episode of a step reads what the step before wrote, and each step has one update."""
    w = dataclasses.replace(STILL, steps=5, environments=2, guided=1.0, written=1.0, warmup_steps=1, bank_entries=1, extractor_batch=1)
    o = simulate(w.at(2, sync=True))
    assert o.counts["extractor_updates"] == 4
    assert dict(o.generation_lags.counts) == {0: 1, 1: 3}, "the first update comes after two steps' lessons: those of version 0"


def test_the_table_compares_with_the_synchronous_run() -> None:
    lines = table([simulate(STILL.at(1, sync=True)), simulate(STILL.at(1, sync=False))]).splitlines()
    assert lines[1].split()[:4] == ["1", "sync", "3.10", "1.00"]
    assert lines[2].split()[:6] == ["1", "lag", "<=", "1", "1.87", "0.60"]
