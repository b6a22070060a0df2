"""The host bookkeeping of the sampler, without any model: slots, queues, limits and counts."""

import random
from collections import Counter, defaultdict

import pytest

from crl_jax.records import Finish, SamplingParams
from crl_jax.serving.constraint import ActionTrie
from crl_jax.serving.engine import Emitted
from crl_jax.serving.scheduler import PromptTooLong, Scheduler, group_rows

GREEDY = SamplingParams(max_new_tokens=2, temperature=0.0)


def make(slots=2, length=16) -> Scheduler:
    return Scheduler(slots, length, 2, ActionTrie.build([(3, 9), (4, 9)]))


def run(scheduler: Scheduler, token: int = 1) -> None:
    """Everything that is pending, then two generate steps, all giving ``token``."""
    scheduler.admit(0.0)
    fill(scheduler)
    for _ in range(2):
        for session in list(scheduler.running.values()):
            scheduler.note_sampled(session, session.request, Emitted([token], [-1.0], [0]), 0)


def fill(scheduler: Scheduler) -> list[tuple[str, str]]:
    """Inputs into the cache; (session, source) of each fork."""
    for session, row in scheduler.to_extend():
        scheduler.note_extended(session, len(row.tokens))
    forks = scheduler.to_fork()
    for session, source, _ in forks:
        scheduler.note_forked(session, source)
    return [(session.id, source.id) for session, source, _ in forks]


def test_V01_every_slot_is_free_after_mixed_finishes():
    scheduler = make()
    for i in range(5):
        scheduler.open(f"s{i}")
        scheduler.submit(f"s{i}", i, [1, 2], GREEDY if i % 2 else SamplingParams(5, stop_ids=(1,)), 0.0)
    scheduler.admit(0.0)
    scheduler.cancel("s4")
    while scheduler.running or scheduler.waiting:
        run(scheduler)
    assert sorted(h for h, _ in scheduler.done) == [0, 1, 2, 3, 4]
    assert {h: c.finish for h, c in scheduler.done} == {
        0: Finish.STOP,
        1: Finish.LENGTH,
        2: Finish.STOP,
        3: Finish.LENGTH,
        4: Finish.CANCELLED,
    }
    for i in range(5):
        scheduler.close(f"s{i}")
    assert sorted(scheduler.free) == [0, 1]


def test_V03_cancel_and_close_are_idempotent():
    scheduler = make()
    scheduler.cancel("nope")
    scheduler.close("nope")
    scheduler.open("a")
    scheduler.submit("a", "h", [1], GREEDY, 0.0)
    scheduler.cancel("a")
    scheduler.cancel("a")
    assert [c.finish for _, c in scheduler.done] == [Finish.CANCELLED]
    scheduler.submit("a", "next", [2], GREEDY, 0.0)
    run(scheduler)
    assert scheduler.done[-1][1].ids == (1, 1)
    scheduler.close("a")
    scheduler.close("a")
    assert len(scheduler.free) == 2


def test_R07_everything_ends_with_the_stop_token():
    scheduler = make()
    scheduler.open("a")
    scheduler.submit("a", "h", [1, 2], SamplingParams(5, stop_ids=(9,)), 0.0)
    scheduler.admit(0.0)
    ((session, row),) = scheduler.to_extend()
    assert (list(row.tokens), row.last) == ([1], 2)
    scheduler.note_extended(session, len(row.tokens))
    scheduler.note_sampled(session, session.request, Emitted([4], [-1.0], [0]), 0)
    scheduler.note_sampled(session, session.request, Emitted([5, 9], [-2.0, -3.0], [0, 0]), 0)  # the third of five
    ((_, done),) = scheduler.done
    assert (done.ids, done.logps, done.finish) == ((4, 5, 9), (-1.0, -2.0, -3.0), Finish.STOP)
    assert len(done.ids) == len(done.logps) == len(done.versions) == len(done.states)


def test_a_caller_cancels_its_own_request_only():
    scheduler = make()
    scheduler.open("a")
    scheduler.submit("a", "mine", [1], GREEDY, 0.0)
    scheduler.submit("a", "late", [1], GREEDY, 0.0)
    assert isinstance(scheduler.done.pop()[1], ValueError)
    scheduler.cancel("a", "late")
    assert scheduler.done == []
    scheduler.cancel("a", "mine")
    assert [handle for handle, _ in scheduler.done] == ["mine"]


def test_V06_prompt_plus_new_is_at_most_the_length():
    scheduler = make(length=16)
    scheduler.open("a")
    scheduler.submit("a", "exact", [1] * 10, SamplingParams(6), 0.0)
    assert scheduler.sessions["a"].request.limit == 6
    scheduler.close("a")
    scheduler.open("a")
    scheduler.submit("a", "clipped", [1] * 10, SamplingParams(7), 0.0)
    assert scheduler.sessions["a"].request.limit == 6
    scheduler.close("a")
    scheduler.open("a")
    scheduler.submit("a", "full", [1] * 16, SamplingParams(1), 0.0)
    assert isinstance(scheduler.done[-1][1], PromptTooLong)
    assert scheduler.sessions["a"].ids == []
    scheduler.submit("a", "one", [1] * 15, SamplingParams(9), 0.0)
    assert scheduler.sessions["a"].request.limit == 1


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(0),
        SamplingParams(1, temperature=-1.0),
        SamplingParams(1, top_p=0.0),
        SamplingParams(1, top_p=1.5),
        SamplingParams(1, top_k=-1),
        SamplingParams(1, stop_ids=(1, 2, 3)),
        SamplingParams(1, stop_ids=(2**40,)),
        SamplingParams(1, stop_ids=(-1,)),
        SamplingParams(1, stop_ids=None),  # type: ignore[arg-type]
        SamplingParams(1, temperature=float("nan")),
        SamplingParams(1, temperature=float("inf")),
        SamplingParams(1, temperature=1e-39),
        SamplingParams(1, top_p=float("nan")),
        SamplingParams(1, top_k=2**31),
        SamplingParams(2.5),  # type: ignore[arg-type]
    ],
)
def test_bad_parameters_are_refused_and_leave_the_session_usable(params):
    scheduler = make()
    scheduler.open("a")
    scheduler.submit("a", "bad", [1], params, 0.0)
    assert isinstance(scheduler.done[-1][1], ValueError | TypeError)
    assert scheduler.counts["refused"] == 1
    scheduler.submit("a", "good", [1], GREEDY, 0.0)
    run(scheduler)
    assert scheduler.done[-1][1].finish == Finish.LENGTH


def test_waiting_requests_are_admitted_in_order_and_idle_slots_are_evicted_longest_idle_first():
    scheduler = make(slots=2)
    for name in "abc":
        scheduler.open(name)
    for name, prompt in (("a", [1, 2, 3]), ("b", [1, 2, 4])):
        scheduler.submit(name, name, prompt, GREEDY, 0.0)
    run(scheduler)
    scheduler.submit("c", "c", [1], GREEDY, 0.0)
    scheduler.admit(0.0)
    assert scheduler.sessions["a"].slot is None
    assert scheduler.sessions["b"].slot is not None
    run(scheduler)
    scheduler.submit("a", "a2", [5], GREEDY, 0.0)
    run(scheduler)
    counts = scheduler.counts
    assert counts["evictions"] == 2
    assert counts["prefilled_tokens"] == 3 + 3 + 1 + 1
    assert counts["recomputed_tokens"] == 4  # a's prompt and the one sampled token that had been fed


def test_R14_swap_restarts_running_requests_and_invalidates_idle_ones():
    scheduler = make()
    scheduler.open("a")
    scheduler.submit("a", "h", [1, 2, 3], SamplingParams(5, temperature=0.0), 0.0)
    run(scheduler)
    scheduler.swap()
    ((session, row),) = scheduler.to_extend()
    assert (list(row.tokens), row.last) == ([1, 2, 3, 1], 1)
    assert (row.start, row.budget, row.counter) == (0, 3, 2)
    scheduler.note_extended(session, 4)
    assert scheduler.counts["recomputed_tokens"] == 4
    assert scheduler.counts["prefilled_tokens"] == 3


def test_batches_put_like_sizes_together_fill_padding_and_cut_long_inputs():
    scheduler = make(slots=8, length=64)
    for i, n in enumerate([3, 3, 3, 30, 3]):
        scheduler.open(f"s{i}")
        scheduler.submit(f"s{i}", i, [i + 1] * (n + 1), GREEDY, 0.0)
    scheduler.admit(0.0)
    groups = group_rows(scheduler.to_extend(), (2, 8), (4, 16))
    assert [[len(r.tokens) for _, r in g] for g in groups] == [[16, 3], [3, 3, 3]]
    assert groups[0][0][1].budget == 0


def test_a_prompt_that_several_sessions_share_is_computed_once():
    scheduler = make(slots=8, length=64)
    for i, prompt in enumerate([[5, 6, 7], [5, 6, 7], [5, 6], [5, 6, 7], [8]]):
        scheduler.open(f"s{i}")
        scheduler.submit(f"s{i}", i, prompt, GREEDY, 0.0)
    scheduler.admit(0.0)
    assert [s.id for s, _ in scheduler.to_extend()] == ["s0", "s2"]
    assert fill(scheduler) == [("s1", "s0"), ("s3", "s0"), ("s4", "s4")]  # s4: nothing to compute before its only id is fed
    assert all(s.request.decoding for s in scheduler.running.values())
    assert {s.id: s.cached for s in scheduler.running.values()} == {"s0": 2, "s1": 2, "s2": 1, "s3": 2, "s4": 0}
    assert (scheduler.counts["prefilled_tokens"], scheduler.counts["shared_tokens"]) == (3 + 1 + 2 + 1 + 1, 4)


def test_sessions_wait_for_a_long_shared_prompt_and_go_on_without_its_first_reader():
    scheduler = make(slots=4, length=64)
    for i in range(3):
        scheduler.open(f"s{i}")
        scheduler.submit(f"s{i}", i, list(range(20)), GREEDY, 0.0)
    scheduler.admit(0.0)
    ((session, _),) = scheduler.to_extend()
    scheduler.note_extended(session, 16)  # cut to a chunk
    assert [s.id for s, _ in scheduler.to_extend()] == ["s0"]
    assert scheduler.to_fork() == []
    scheduler.cancel("s0")
    ((session, row),) = scheduler.to_extend()
    assert (session.id, len(row.tokens)) == ("s1", 19)
    assert fill(scheduler) == [("s2", "s1")]


@pytest.mark.parametrize("seed", range(30))
def test_counters_are_what_was_computed_whatever_happens(seed):
    """Random turns, cancels, closes, evictions and swaps. The oracle keeps, per session, which positions were ever in a cache."""
    rng, scheduler, truth, known = random.Random(seed), Scheduler(4, 32, 2, None), Counter[str](), defaultdict[str, set[int]](set)
    prompts, names = [[rng.randrange(9) for _ in range(rng.choice([1, 2, 9, 17, 31]))] for _ in range(2)], []

    def computed(session, begin, end):
        for at in range(begin, end):
            if at in known[session.id]:
                truth["recomputed_tokens"] += 1
            elif session.request.start <= at < session.request.end:
                truth["prefilled_tokens"] += 1
            known[session.id].add(at)

    def turn():
        scheduler.admit(0.0)
        for session, row in [item for group in group_rows(scheduler.to_extend(), (2, 4), (4, 8)) for item in group]:
            assert list(row.tokens) == session.ids[row.start :][: len(row.tokens)]
            computed(session, row.start, row.start + len(row.tokens))
            scheduler.note_extended(session, len(row.tokens))
        for session, source, row in scheduler.to_fork():
            assert source.ids[: row.start] == session.ids[: row.start]
            if source is not session:
                truth["shared_tokens"] += row.start
                known[session.id].update(range(row.start))
            scheduler.note_forked(session, source)
        for session in [s for s in scheduler.running.values() if s.request.decoding]:
            count, at = min(rng.choice([1, 2, 3]), session.request.limit - len(session.request.ids)), len(session.ids) - 1
            computed(session, at, at + count)
            scheduler.note_sampled(
                session, session.request, Emitted([rng.randrange(9) for _ in range(count)], [0.0] * count, [0] * count), 0
            )

    for i in range(80):
        event = rng.random()
        if event < 0.2 and len(names) < 7:
            names.append(f"s{i}")
            scheduler.open(names[-1])
        elif event < 0.6 and names:
            name = rng.choice(names)
            new = [rng.randrange(9)] * rng.choice([0, 1, 3]) if scheduler.sessions[name].ids else rng.choice(prompts)
            scheduler.submit(name, i, new, SamplingParams(rng.choice([1, 2, 5])), 0.0)
        elif event < 0.68 and names:
            scheduler.cancel(rng.choice(names)) if event < 0.64 else scheduler.close(names.pop())
        elif event < 0.71:
            scheduler.swap()
        else:
            turn()
    assert {name: scheduler.counts[name] for name in truth} == truth
