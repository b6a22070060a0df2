"""One turn of the engine thread: admit, extend everything that is pending, generate for everything that is ready, read the results.

Owns: the decode state and the weights in use. Promises: one version of the weights per turn; the dispatches of a turn are queued before
the first result is waited for. Does not: know threads or futures.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from crl_jax.errors import UserError
from crl_jax.serving.engine import Emitted, SlotEngine
from crl_jax.serving.scheduler import Request, Scheduler, Session, group_rows

Pending = tuple[Any, list[tuple[Session, Request]], bool]  # a dispatch's result, whose rows they are, and whether generate made it


class WeightsDiverged(UserError, FloatingPointError):
    """Nothing can be sampled from the published weights. Ends a run before the learner has refused enough updates to give up."""


class EngineTurn:
    """``step`` does all work there is for the requests in the scheduler, one round at a time."""

    def __init__(self, engine: SlotEngine, scheduler: Scheduler, params: Any, version: int, clock: Callable[[], float]) -> None:
        self._engine = engine
        self._scheduler = scheduler
        self._params = params
        self._version = version
        self._clock = clock
        self._state = engine.init_decode_state()
        self._busy_s = 0.0
        self._dispatches = {"extend_dispatches": 0, "generate_dispatches": 0}

    def swap(self, params: Any, version: int) -> None:
        """Uses ``params`` (by reference) from the next dispatch on."""
        self._params = params
        self._version = version
        self._scheduler.swap()

    def step(self) -> None:
        """One round; returns at once when nothing runs."""
        start_s = self._clock()
        self._scheduler.admit(start_s)
        if not self._scheduler.running:
            return
        pending = self._extend()
        pending += self._generate(just_extended={id(s) for _, owners, _ in pending for s, _ in owners})
        for result, owners, fed in pending:
            for (session, request), emitted in zip(owners, result.fetch(), strict=True):
                self._check_finite(emitted)
                self._scheduler.note_sampled(session, request, emitted, self._version, fed)
        self._busy_s += self._clock() - start_s

    def stats(self) -> dict[str, int | float]:
        """Counters since the start: dispatches by kind and together, seconds at work, seconds requests waited for a slot."""
        scheduler = self._scheduler
        return {
            **self._dispatches,
            "dispatches": sum(self._dispatches.values()),
            "busy_s": self._busy_s,
            "queue_wait_s": scheduler.queue_wait_s,
            "free_slots": len(scheduler.free),
            "open_sessions": len(scheduler.sessions),
        }

    def _extend(self) -> list[Pending]:
        """Dispatches every pending input, grouped by size."""
        pending: list[Pending] = []
        for group in group_rows(self._scheduler.to_extend(), self._engine.row_buckets, self._engine.chunk_buckets):
            self._state, result = self._engine.extend(self._params, self._state, [row for _, row in group])
            self._dispatches["extend_dispatches"] += 1
            for session, row in group:
                self._scheduler.note_extended(session, len(row.tokens))
            pending.append((result, [(s, s.request) for s, _ in group if s.request is not None], False))
        return pending

    def _generate(self, just_extended: set[int]) -> list[Pending]:
        """Dispatches some steps for every request that can go on, those whose first token is being sampled right now included."""
        owners, left = [], 0
        for session in self._scheduler.running.values():
            request = session.request
            if request is None or not request.decoding:
                continue
            remaining = request.limit - len(request.ids) - (id(session) in just_extended)
            if remaining > 0:
                owners.append((session, request))
                left = max(left, remaining)
        if not owners:
            return []
        slots = [s.slot for s, _ in owners if s.slot is not None]
        self._state, result = self._engine.generate(self._params, self._state, slots, min(left, self._engine.max_steps))
        self._dispatches["generate_dispatches"] += 1
        return [(result, owners, True)]

    def _check_finite(self, emitted: Emitted) -> None:
        if not all(map(math.isfinite, emitted.logps)):
            raise WeightsDiverged(
                f"weights of version {self._version} give non-finite log-probs {list(emitted.logps[:4])}: training diverged; lower the "
                "learning rate, and resume from an earlier checkpoint"
            )
