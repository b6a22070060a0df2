"""The host bookkeeping of the sampler, without any model: slots, queues, limits and counts."""

import pytest
from scheduler_toys import limits, sampled

from crl_jax.records import Finish, SamplingParams
from crl_jax.serving.constraint import ActionTrie
from crl_jax.serving.engine import Emitted
from crl_jax.serving.prefill import group_rows, padded_tokens
from crl_jax.serving.scheduler import PromptTooLong, Scheduler

GREEDY = SamplingParams(max_new_tokens=2, temperature=0.0)


def make(slots=2, length=16, **options) -> Scheduler:
    return Scheduler(limits(slots, length, **options), ActionTrie.build([(3, 9), (4, 9)]))


def run(scheduler: Scheduler, token: int = 1) -> None:
    """Everything that is pending, then two generate steps, all giving ``token``."""
    scheduler.admit(0.0)
    fill(scheduler)
    for _ in range(2):
        for session in list(scheduler.running.values()):
            scheduler.note_sampled(session, session.request, sampled([token]), 0)


def fill(scheduler: Scheduler) -> list[tuple[str, int, int]]:
    """Inputs into the cache; (session, source slot, tokens) of each fork from another slot."""
    seen = []
    while True:
        forks, extends = scheduler.plan()
        if not forks and not extends:
            return seen
        for fork in forks:
            if fork.source != fork.session.slot:
                seen.append((fork.session.id, fork.source, fork.row.start))
            scheduler.note_forked(fork)
        for session, row in extends:
            scheduler.note_extended(session, len(row.tokens))


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
    assert sorted(scheduler.slots.free) == [0, 1]


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
    assert len(scheduler.slots.free) == 2


def test_R07_everything_ends_with_the_stop_token():
    scheduler = make()
    scheduler.open("a")
    scheduler.submit("a", "h", [1, 2], SamplingParams(5, stop_ids=(9,)), 0.0)
    scheduler.admit(0.0)
    ((session, row),) = scheduler.plan().extends
    assert (list(row.tokens), row.last) == ([1], 2)
    scheduler.note_extended(session, len(row.tokens))
    scheduler.note_sampled(session, session.request, Emitted([4], [-1.0], [-0.5], [0]), 0)
    scheduler.note_sampled(session, session.request, Emitted([5, 9], [-2.0, -3.0], [-1.5, -2.5], [0, 0]), 0)  # the third of five
    ((_, done),) = scheduler.done
    assert (done.ids, done.logps, done.sampling_logps, done.finish) == ((4, 5, 9), (-1.0, -2.0, -3.0), (-0.5, -1.5, -2.5), Finish.STOP)
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
        SamplingParams(1, min_p=1.5),
        SamplingParams(1, min_p=float("nan")),
        SamplingParams(1, forbidden_ids=(64,)),
        SamplingParams(1, forbidden_ids=(0.5,)),  # type: ignore[arg-type]
        SamplingParams(1, forbidden_ids=tuple(range(9))),
        SamplingParams(1, forbidden_ids=(3,), constrained=True),
        SamplingParams(1, stop_strings=("no pieces",)),
        SamplingParams(1, stop_strings="ab"),  # type: ignore[arg-type]
        SamplingParams(1, stop_strings=None),  # type: ignore[arg-type]
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
    scheduler = make(slots=2, min_shared=8)
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
    ((session, row),) = scheduler.plan().extends
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
    groups = group_rows(scheduler.plan().extends, (2, 8), (4, 16))
    assert [[len(r.tokens) for _, r in g] for g in groups] == [[16, 3], [3, 3, 3]]
    assert groups[0][0][1].budget == 0


def test_a_prompt_that_several_sessions_share_is_computed_once():
    scheduler = make(slots=8, length=64)
    for i, prompt in enumerate([[5, 6, 7], [5, 6, 7], [5, 6, 7], [8]]):
        scheduler.open(f"s{i}")
        scheduler.submit(f"s{i}", i, prompt, GREEDY, 0.0)
    scheduler.admit(0.0)
    forks, extends = scheduler.plan()
    assert [fork.session.id for fork in forks] == ["s3"]  # nothing to compute before its only id is fed
    assert [s.id for s, _ in extends] == ["s0"]
    assert fill(scheduler) == [("s1", 0, 2), ("s2", 0, 2)]
    assert all(s.request.decoding for s in scheduler.running.values())
    assert {s.id: s.cached for s in scheduler.running.values()} == {"s0": 2, "s1": 2, "s2": 2, "s3": 0}
    assert (scheduler.counts["prefilled_tokens"], scheduler.counts["shared_tokens"]) == (3 + 1 + 1 + 1, 4)


def test_different_prompts_that_begin_alike_share_the_beginning_where_that_costs_less():
    system = list(range(10, 42))

    def start(row_buckets):
        scheduler = make(slots=4, length=64, row_buckets=row_buckets, min_shared=8)
        for i, tail in enumerate(([1, 2], [3, 4, 5], [1, 2], [6])):
            scheduler.open(f"s{i}")
            scheduler.submit(f"s{i}", i, [*system, *tail], GREEDY, 0.0)
        scheduler.admit(0.0)
        return scheduler

    scheduler = start((1, 4))
    assert [s.id for s, _ in scheduler.plan().extends] == ["s0"]
    assert sorted(fill(scheduler)) == [("s1", 0, 32), ("s2", 0, 33), ("s3", 0, 32)]
    assert scheduler.counts["prefilled_tokens"] + scheduler.counts["shared_tokens"] == 34 + 35 + 34 + 33
    assert scheduler.counts["shared_tokens"] == 32 + 33 + 32
    assert len(start((4,)).plan().extends) == 4  # a row costs as much as four: nothing to gain by waiting


def test_a_closed_session_leaves_its_beginning_to_the_next_ones():
    scheduler = make(slots=3, length=64, min_shared=8)
    for i in range(4):
        scheduler.open(f"s{i}")
        scheduler.submit(f"s{i}", i, [*range(10, 30), i], GREEDY, 0.0)
        run(scheduler)
        scheduler.close(f"s{i}")
    assert scheduler.counts["shared_tokens"] == 3 * 20
    assert scheduler.counts["prefilled_tokens"] == 21 + 3
    scheduler.swap()
    scheduler.open("new")
    scheduler.submit("new", "new", [*range(10, 30), 1], GREEDY, 0.0)
    run(scheduler)
    assert scheduler.counts["shared_tokens"] == 3 * 20  # nothing of the old weights


def test_a_session_that_lost_its_slot_comes_back_from_the_host_and_is_not_recomputed():
    scheduler = make(slots=1, length=64, host_tokens=16)
    prompts = {"a": [1] * 9, "b": [2] * 7, "c": [3] * 12}
    for name, prompt in prompts.items():
        scheduler.open(name)
        scheduler.submit(name, name, prompt, GREEDY, 0.0)
        run(scheduler)
    saved = [(move.row.n, move.load, move.row.dropped) for move in scheduler.slots.moves]
    assert saved == [(10, False, True), (8, False, False)]  # a had to make room for b
    scheduler.slots.moves.clear()
    for name in "ba":
        scheduler.submit(name, name + "2", [5], GREEDY, 0.0)
        run(scheduler)
    counts = scheduler.counts
    assert [move.load for move in scheduler.slots.moves] == [False, True, False]
    assert (counts["restored_tokens"], counts["evictions"], counts["offloads"]) == (8, 2, 4)  # c's was dropped for b's
    assert counts["recomputed_tokens"] == 10  # a's, whose row was dropped
    assert counts["prefilled_tokens"] == 9 + 7 + 12 + 2
    scheduler.swap()
    scheduler.close("b")
    assert scheduler.slots._host_room == 16


def test_sessions_wait_for_a_long_shared_prompt_and_go_on_without_its_first_reader():
    scheduler = make(slots=4, length=64)
    for i in range(3):
        scheduler.open(f"s{i}")
        scheduler.submit(f"s{i}", i, list(range(20)), GREEDY, 0.0)
    scheduler.admit(0.0)
    ((session, _),) = scheduler.plan().extends
    scheduler.note_extended(session, 16)  # cut to a chunk
    assert scheduler.plan().forks == []
    assert [s.id for s, _ in scheduler.plan().extends] == ["s0"]
    scheduler.cancel("s0")
    ((session, row),) = scheduler.plan().extends
    assert (session.id, len(row.tokens)) == ("s1", 19)
    assert fill(scheduler) == [("s2", 1, 19)]


def test_padding_counts_in_what_a_dispatch_costs():
    sizes = limits(slots=8, row_buckets=(2, 8), chunk_buckets=(4, 16))
    assert padded_tokens([], sizes) == 0
    assert padded_tokens([3], sizes) == 2 * 4
    assert padded_tokens([3, 4, 5], sizes) == 2 * 4 + 2 * 16
    assert padded_tokens([1] * 9, sizes) == (8 + 2) * 4
    assert padded_tokens([33], sizes) == 2 * 16 + 2 * 16 + 2 * 4  # two whole chunks, one after the other, and the rest
