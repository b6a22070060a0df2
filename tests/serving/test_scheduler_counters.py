"""The scheduler's counters in random play, against an oracle that keeps what every slot holds."""

import random
from collections import Counter, defaultdict

import pytest
from scheduler_toys import limits, sampled

from crl_jax.records import SamplingParams
from crl_jax.serving.prefill import group_rows
from crl_jax.serving.scheduler import Scheduler


@pytest.mark.parametrize("seed", range(30))
def test_counters_are_what_was_computed_whatever_happens(seed):
    """Random turns, cancels, closes, evictions and swaps. The oracle keeps what every slot holds and which positions of a session were ever
    in a cache, and checks that each copy and each step finds the ids it needs."""
    rng, truth, known = random.Random(seed), Counter[str](), defaultdict[str, set[int]](set)
    options = {"row_buckets": (rng.choice([1, 2]), 4), "chunk_buckets": (4, 8), "min_shared": rng.choice([1, 4])}
    scheduler = Scheduler(limits(4, 32, host_tokens=rng.choice([0, 20, 100]), **options))
    held: dict[int, list[int]] = {slot: [] for slot in range(4)}
    system = [rng.randrange(9) for _ in range(12)]
    prompts, names = [[*system[: rng.randrange(13)], *(rng.randrange(9) for _ in range(rng.choice([1, 2, 9, 17])))] for _ in range(4)], []

    def computed(session, begin, end):
        held[session.slot] = held[session.slot][:begin] + session.ids[begin:end]
        assert held[session.slot] == session.ids[:end]
        for at in range(begin, end):
            if at in known[session.id]:
                truth["recomputed_tokens"] += 1
            elif session.request.start <= at < session.request.end:
                truth["prefilled_tokens"] += 1
            known[session.id].add(at)

    def taken(session, before, n):
        truth["shared_tokens"] += n - before
        known[session.id].update(range(n))

    def move():
        for slot, row, load in scheduler.slots.moves:
            if load:
                held[slot] = row.data
                truth["restored_tokens"] += row.n
            elif not row.dropped:
                row.data = held[slot][: row.n]
        scheduler.slots.moves.clear()

    def turn():
        waiting = {s.id: s.host for s in scheduler.waiting.values() if s.slot is None}
        scheduler.admit(0.0)
        move()
        for session in scheduler.running.values():
            if session.id in waiting and waiting[session.id] is None and session.cached:
                taken(session, 0, session.cached)
        for _ in range(rng.choice([1, 9])):
            forks, extends = scheduler.plan()
            before = dict(held)
            for fork in forks:
                session, n = fork.session, fork.row.start
                assert before[fork.source][:n] == session.ids[:n]
                held[session.slot] = before[fork.source][:n]
                if fork.source != session.slot:
                    taken(session, session.cached, n)
                scheduler.note_forked(fork)
            for session, row in [item for group in group_rows(extends, options["row_buckets"], (4, 8)) for item in group]:
                assert list(row.tokens) == session.ids[row.start :][: len(row.tokens)]
                computed(session, row.start, row.start + len(row.tokens))
                scheduler.note_extended(session, len(row.tokens))
        for session in [s for s in scheduler.running.values() if s.request.decoding]:
            count, at = min(rng.choice([1, 2, 3]), session.request.limit - len(session.request.ids)), len(session.ids) - 1
            computed(session, at, at + 1)
            new = [rng.randrange(9) for _ in range(count)]
            request = session.request
            held[session.slot] += new[:-1]
            for later in range(at + 1, at + count):
                known[session.id].add(later)
            scheduler.note_sampled(session, request, sampled(new), 0)

    for i in range(120):
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
    assert sum(s.slot is not None for s in scheduler.sessions.values()) + len(scheduler.slots.free) == 4
