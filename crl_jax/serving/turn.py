"""One turn of the engine thread: admit, copy and compute what inputs need, generate for what is ready.

Owns: the decode state and the weights in use. Promises: one version of the weights per turn; the dispatches of a turn are queued before
the first result is waited for. Does not: know threads or futures.
"""

from __future__ import annotations

import concurrent.futures
import math
from collections.abc import Callable
from typing import Any, NamedTuple

from crl_jax.errors import UserError
from crl_jax.scopes import scope
from crl_jax.serving.engine import Emitted, Row, SlotEngine, bucket, host_row
from crl_jax.serving.prefill import group_rows
from crl_jax.serving.scheduler import Fork, Scheduler, Session
from crl_jax.serving.slots import HostRow


class WeightsDiverged(UserError, FloatingPointError):
    """Nothing can be sampled from the published weights. Ends a run before the learner has refused enough updates to give up."""


class _Drain(NamedTuple):
    """New weights that wait for the running requests to end; ``done`` is cancelled by who no longer waits for it."""

    params: Any
    version: int
    done: concurrent.futures.Future[None]


class EngineTurn:
    """``step`` does all work there is for the requests in the scheduler, one round at a time."""

    def __init__(
        self, engine: SlotEngine, scheduler: Scheduler, params: Any, version: int, clock: Callable[[], float], role: str = ""
    ) -> None:
        self._engine = engine
        self._role = role  # its name in a profiler trace
        self._scheduler = scheduler
        self._params = params
        self._version = version
        self._clock = clock
        self._state = engine.init_decode_state()
        self._drain: _Drain | None = None
        self._busy_s = 0.0
        self._dispatches = {"extend_dispatches": 0, "generate_dispatches": 0, "fork_dispatches": 0, "move_dispatches": 0}
        self._leaving: list[HostRow] = []  # rows on their way to the host

    def swap(self, params: Any, version: int) -> None:
        """Uses ``params`` (by reference) from the next dispatch on."""
        self._params = params
        self._version = version
        self._scheduler.swap()

    def swap_drained(self, params: Any, version: int, done: concurrent.futures.Future[None]) -> None:
        """Like ``swap`` once no request runs; until then none starts. ``done`` tells when; cancelling it calls the swap off."""
        self._drain = _Drain(params, version, done)
        self._scheduler.held = True

    def abandon(self, error: Exception) -> None:
        """No turn follows: who waits for a drain gets ``error``."""
        if self._drain is not None and self._drain.done.set_running_or_notify_cancel():
            self._drain.done.set_exception(error)
        self._drain = None

    def step(self) -> None:
        """One round; returns at once when nothing runs."""
        start_s = self._clock()
        self._finish_drain()
        self._scheduler.admit(start_s)
        if not self._scheduler.running:
            return
        self._move()
        self._prefill()
        self._generate()
        self._settle()
        self._busy_s += self._clock() - start_s

    def stats(self) -> dict[str, int | float]:
        """Counters since the start: dispatches by kind and together, seconds at work, seconds requests waited for a slot."""
        scheduler = self._scheduler
        return {
            **self._dispatches,
            "dispatches": sum(self._dispatches.values()),
            "busy_s": self._busy_s,
            "queue_wait_s": scheduler.queue_wait_s,
            "free_slots": len(scheduler.slots.free),
            "open_sessions": len(scheduler.sessions),
        }

    def _finish_drain(self) -> None:
        """Swaps when the last running request has ended, or gives up when nobody waits any more; then requests may start again."""
        if self._drain is None or (self._scheduler.running and not self._drain.done.cancelled()):
            return
        (params, version, done), self._drain = self._drain, None
        self._scheduler.held = False
        if done.set_running_or_notify_cancel():
            self.swap(params, version)
            done.set_result(None)

    def _move(self) -> None:
        """Rows of sessions that lost their slot to the host, and of those that got one back from it."""
        for slot, row, load in self._scheduler.slots.moves:
            if load:
                self._state = self._engine.load(self._state, slot, row.data)
            elif not row.dropped:
                row.data = self._engine.save(self._state, slot, row.room)
                self._leaving.append(row)
            self._dispatches["move_dispatches"] += load or not row.dropped
        self._scheduler.slots.moves.clear()

    def _settle(self) -> None:
        """Lets go of device copies of rows that are on the host by now."""
        for row in self._leaving:
            row.data = host_row(row.data)
        self._leaving.clear()

    def _prefill(self) -> None:
        """Dispatches inputs, grouped by size, until all are in the cache or the engine's share of a turn is used up."""
        left = self._engine.prefill_tokens
        while left > 0:
            forks, extends = self._scheduler.plan()
            if not forks and not extends:
                return
            self._fork(forks)
            for group in group_rows(extends, self._engine.row_buckets, self._engine.chunk_buckets):
                if left <= 0:
                    return
                left -= self._extend(group)

    def _extend(self, group: list[tuple[Session, Row]]) -> int:
        """Dispatches some inputs; returns how many tokens were computed, padding counted."""
        rows = [row for _, row in group]
        with scope("prefill", self._role):
            self._state = self._engine.extend(self._params, self._state, rows)
        self._dispatches["extend_dispatches"] += 1
        for session, row in group:
            self._scheduler.note_extended(session, len(row.tokens))
        return bucket(len(rows), self._engine.row_buckets) * bucket(max(len(r.tokens) for r in rows), self._engine.chunk_buckets)

    def _fork(self, forks: list[Fork]) -> None:
        """Dispatches one copy for all requests that find a part of their input in a cache."""
        if not forks:
            return
        self._state = self._engine.fork(self._state, [fork.source for fork in forks], [fork.row for fork in forks])
        self._dispatches["fork_dispatches"] += 1
        for fork in forks:
            self._scheduler.note_forked(fork)

    def _generate(self) -> None:
        """Some steps for every request whose input is in the cache, and what they gave."""
        owners = [(s, s.request) for s in self._scheduler.running.values() if s.request is not None and s.request.decoding]
        if not owners:
            return
        left = max(request.limit - len(request.ids) for _, request in owners)
        slots = [_slot(session) for session, _ in owners]
        with scope("decode", self._role):
            self._state, result = self._engine.generate(self._params, self._state, slots, min(left, self._engine.max_steps))
            sampled = result.fetch()
        self._dispatches["generate_dispatches"] += 1
        for (session, request), emitted in zip(owners, sampled, strict=True):
            self._check_finite(emitted)
            self._scheduler.note_sampled(session, request, emitted, self._version)

    def _check_finite(self, emitted: Emitted) -> None:
        if not all(map(math.isfinite, emitted.logps)):
            raise WeightsDiverged(
                f"weights of version {self._version} give non-finite log-probs {list(emitted.logps[:4])}: training diverged; lower the "
                "learning rate, and resume from an earlier checkpoint"
            )


def _slot(session: Session) -> int:
    """The slot of a session that runs."""
    assert session.slot is not None
    return session.slot
