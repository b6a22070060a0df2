"""Which session gets a slot, what to compute next, and when a request is finished: host bookkeeping only, no JAX and no threads.

Owns: sessions (their token ids, how many of them are in the cache), requests, and the counters.
Promises: requests are admitted first come first served; a slot is free or belongs to exactly one session; a beginning that sessions share
is computed once while a slot holds it; after ``swap`` no token is computed from keys of older weights; every request ends exactly once,
in ``done``. Cancel and close are idempotent (unknown and finished ids are no-ops).
Limits: prompt + new <= max_length exactly. A prompt that leaves no room for one token is refused with PromptTooLong; a larger
``max_new_tokens`` is clipped to the room and the completion then finishes with LENGTH.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

from crl_jax.records import Completion, Finish, SamplingParams
from crl_jax.serving.constraint import COMPLETE, ROOT, UNCONSTRAINED, ActionTrie
from crl_jax.serving.engine import Emitted, Row
from crl_jax.serving.limits import Limits, check_params
from crl_jax.serving.sharing import Fresh, waits
from crl_jax.serving.slots import Place, Slots, common
from crl_jax.serving.stop_strings import NONE, REACHED, StopTable


class PromptTooLong(ValueError):
    """The ids of a session plus the new ones leave no room for a single token."""


@dataclasses.dataclass(eq=False)
class Request:
    """One generate call. ``handle`` is the caller's; ``start:end`` are its new context ids in the session's ids."""

    handle: Any
    params: SamplingParams
    start: int
    end: int
    limit: int  # tokens it may sample
    state: int  # of the constraint
    text: int  # of the stop strings
    submitted_s: float
    last: bool = False  # the session ends with it
    decoding: bool = False  # its input is in the cache and its next token comes from generate
    ids: list[int] = dataclasses.field(default_factory=list)
    logps: list[float] = dataclasses.field(default_factory=list)
    versions: list[int] = dataclasses.field(default_factory=list)
    states: list[int] = dataclasses.field(default_factory=list)
    sampling_logps: list[float] = dataclasses.field(default_factory=list)

    def completion(self, finish: Finish) -> Completion:
        """What was sampled so far, as the caller gets it."""
        ids, logps, versions, states = tuple(self.ids), tuple(self.logps), tuple(self.versions), tuple(self.states)
        return Completion(ids, logps, versions, states, finish, tuple(self.sampling_logps))


@dataclasses.dataclass(eq=False, kw_only=True)
class Session(Place):
    """``computed`` is the most of its ids that ever were in a cache (recomputed tokens are counted against it)."""

    id: str
    ids: list[int] = dataclasses.field(default_factory=list)
    computed: int = 0
    request: Request | None = None

    @property
    def end(self) -> int:
        """How many ids the cache must hold before sampling: all but the last, which ``generate`` feeds."""
        return len(self.ids) - 1


class Fork(NamedTuple):
    """``session`` takes the first ``row.start`` positions of ``source``, which is its own slot when it has all it needs."""

    session: Session
    source: int
    row: Row


class Plan(NamedTuple):
    """What to dispatch next, the forks first."""

    forks: list[Fork]
    extends: list[tuple[Session, Row]]


class Scheduler:
    """``done`` collects (handle, Completion or exception) for the caller to take; ``counts`` only grows."""

    def __init__(self, limits: Limits, trie: ActionTrie | None = None, stops: StopTable | None = None) -> None:
        self.limits = limits
        self.trie = trie
        self.stops = stops
        self.counts: Counter[str] = Counter()
        self.slots = Slots(limits.max_slots, limits.host_tokens, self.counts)
        self.sessions: dict[str, Session] = {}
        self.waiting: OrderedDict[str, Session] = OrderedDict()  # requests without a slot, first come first
        self.running: OrderedDict[str, Session] = OrderedDict()  # requests with a slot
        self.done: list[tuple[Any, Completion | Exception]] = []
        self.queue_wait_s = 0.0
        self.held = False  # no request starts; those running go on

    def open(self, session_id: str) -> None:
        """A new session; it takes a slot with its first request."""
        self.sessions[session_id] = Session(id=session_id)

    def submit(
        self, session_id: str, handle: Any, new_ids: Sequence[int], params: SamplingParams, now_s: float, *, last: bool = False
    ) -> None:
        """Queues one request, or puts the reason why not in ``done``; a refused request leaves the session as it was, and hurts no other,
        whatever is wrong with it. A session ends with its ``last`` request: its slot is free at once.
        """
        try:
            session = self.sessions.get(session_id)
            if session is None:
                raise KeyError(f"session {session_id!r} is not open: open() gives a new one")
            request = self._request(session, handle, new_ids, params, now_s)
            request.last = last
        except Exception as error:
            self.counts["refused"] += 1
            self.done.append((handle, error))
            return
        session.ids.extend(new_ids)
        session.cached = min(session.cached, session.end)
        session.request = request
        self.slots.idle.pop(session_id, None)
        self.waiting[session_id] = session

    def cancel(self, session_id: str, handle: Any = None) -> None:
        """Ends the session's request, if there is one (and, with ``handle``, if it is that caller's), with what it has sampled so far."""
        session = self.sessions.get(session_id)
        if session is not None and session.request is not None and handle in (None, session.request.handle):
            self.counts["cancelled"] += 1
            self._finish(session, Finish.CANCELLED)

    def close(self, session_id: str) -> None:
        """Cancels and forgets the session and frees its slot."""
        self.cancel(session_id)
        session = self.sessions.pop(session_id, None)
        if session is not None:
            self.slots.give_back(session_id, session, session.ids)

    def swap(self) -> None:
        """New weights: no key in the cache is valid any more; running requests start over from their ids, keeping what they sampled."""
        self.counts["swaps"] += 1
        self.slots.swap(list(self.sessions.values()))
        for session in self.running.values():
            assert session.request is not None
            session.request.decoding = False

    def admit(self, now_s: float) -> None:
        """Gives slots to waiting requests (``Slots.take``), but to nobody while ``held``. What that takes to be copied is in
        ``slots.moves`` afterwards.
        """
        if self.held:
            return
        for session_id, session in list(self.waiting.items()):
            if session.slot is None:
                if not self.slots.take(session_id, session, session.ids[:-1], self.limits.min_shared):
                    continue
                session.cached = min(session.cached, session.end)
                session.computed = max(session.computed, session.cached)
            request = session.request
            assert request is not None
            self.queue_wait_s += now_s - request.submitted_s
            del self.waiting[session_id]
            self.running[session_id] = session

    def plan(self) -> Plan:
        """What the running requests need before they can sample. A session that waits for a beginning which another one computes is in no
        list yet (``sharing``).
        """
        pending = [s for s in self.running.values() if s.request is not None and not s.request.decoding]
        forks = [self._fork(s, s.slot, s.end) for s in pending if s.cached == s.end]
        extends = [s for s in pending if s.cached < s.end and not s.fresh]
        fresh = sorted((s for s in pending if s.cached < s.end and s.fresh), key=lambda s: s.ids)
        sources = [self._source(s, before) for s, before in zip(fresh, [None, *fresh], strict=False)]
        have = [max(s.cached, n) for s, (_, n) in zip(fresh, sources, strict=True)]
        candidates = [Fresh(s.ids, s.end, n) for s, n in zip(fresh, have, strict=True)]
        late = waits(candidates, [s.end - s.cached for s in extends], self.limits)
        for session, (source, n), wait in zip(fresh, sources, late, strict=True):
            if not wait and n > session.cached:
                forks.append(self._fork(session, source, n))
            elif not wait:
                extends.append(session)
        return Plan(forks, [(s, self._row(s, s.cached)) for s in extends])

    def note_extended(self, session: Session, n: int) -> None:
        """``n`` more ids of the session were dispatched into the cache. Call before the tokens sampled from them are noted."""
        self._note_cached(session, session.cached + n)

    def note_forked(self, fork: Fork) -> None:
        """The fork was dispatched."""
        session, n = fork.session, fork.row.start
        if fork.source != session.slot:
            self.counts["shared_tokens"] += n - session.cached
            session.cached, session.computed = n, max(session.computed, n)
        self._note_cached(session, n)

    def note_sampled(self, session: Session, request: Request, emitted: Emitted, version: int) -> None:
        """Tokens came back; each step first put the token before it into the cache."""
        if session.request is not request or not emitted.ids:
            return  # cancelled or finished meanwhile
        session.ids.extend(emitted.ids)
        session.cached += len(emitted.ids)
        session.computed = max(session.computed, session.cached)
        request.ids.extend(emitted.ids)
        request.logps.extend(emitted.logps)
        request.sampling_logps.extend(emitted.sampling_logps)
        request.states.extend(emitted.states)
        request.versions.extend([version] * len(emitted.ids))
        self.counts["decoded_tokens"] += len(emitted.ids)
        if request.state != UNCONSTRAINED and self.trie is not None:
            request.state = self.trie.advance(emitted.states[-1], emitted.ids[-1])
        if request.text != NONE and self.stops is not None:
            for token in emitted.ids:
                request.text = self.stops.advance(request.text, token)
        if request.state == COMPLETE or request.text == REACHED or emitted.ids[-1] in request.params.stop_ids:
            self._finish(session, Finish.STOP)
        elif len(request.ids) == request.limit:
            self._finish(session, Finish.LENGTH)

    def _source(self, session: Session, before: Session | None) -> tuple[int | None, int]:
        """(slot, how much of the session's input can be copied from it now); (None, 0) if that is not worth a copy. ``before`` is the
        session before it in sorted order, whose own input may be in the cache in part.
        """
        source, n = self.slots.longest(session.ids[:-1])
        if before is not None:
            there = min(common(before.ids, session.ids), session.end, before.cached)
            source, n = (before.slot, there) if there > n else (source, n)
        return (source, n) if n - session.cached >= self.limits.min_shared else (None, 0)

    def _fork(self, session: Session, source: int | None, n: int) -> Fork:
        assert source is not None
        row = self._row(session, n)
        return Fork(session, source, row if n == session.end else dataclasses.replace(row, tokens=(), budget=0))

    def _row(self, session: Session, start: int) -> Row:
        """What is left to write after the first ``start`` ids; the last id is fed by ``generate``."""
        request = session.request
        assert request is not None
        assert session.slot is not None
        *tokens, last = session.ids[start:]
        sampled = len(request.ids)
        return Row(session.slot, start, tokens, last, request.limit - sampled, request.params, sampled, request.state, request.text)

    def _note_cached(self, session: Session, high: int) -> None:
        """The first ``high`` ids are in the cache. The last id, which ``generate`` feeds, is counted with those before it."""
        request = session.request
        assert request is not None
        request.decoding = high == session.end
        if request.decoding and session.slot is not None:
            session.fresh = False
            self.slots.remember(session.slot, session.ids[:high])
        low, counted = session.cached, high + request.decoding
        fresh = max(low, session.computed)
        self.counts["recomputed_tokens"] += min(counted, fresh) - low
        self.counts["prefilled_tokens"] += max(0, min(counted, request.end) - max(fresh, request.start))
        session.cached, session.computed = high, max(session.computed, counted)

    def fail_all(self, error: Exception) -> None:
        """Every request ends with ``error``."""
        for session in self.sessions.values():
            if session.request is not None:
                self.done.append((session.request.handle, error))
                self._release(session.request)
                session.request = None
        self.waiting.clear()
        self.running.clear()

    def _request(self, session: Session, handle: Any, new_ids: Sequence[int], params: SamplingParams, now_s: float) -> Request:
        start, end = len(session.ids), len(session.ids) + len(new_ids)
        if session.request is not None:
            raise ValueError(f"session {session.id!r} already has a request in flight: await or cancel it first")
        if end == 0:
            raise ValueError("an empty prompt has nothing to sample from: give at least one id")
        check_params(params, self.limits, constrainable=self.trie is not None, stoppable=self.stops is not None)
        if end >= self.limits.max_length:
            raise PromptTooLong(f"{end} ids leave no room for a token within max_length={self.limits.max_length}")
        limit = min(params.max_new_tokens, self.limits.max_length - end)
        text = self.stops.start(params.stop_strings) if self.stops is not None else NONE  # paid back by ``_release``
        return Request(handle, params, start, end, limit, ROOT if params.constrained else UNCONSTRAINED, text, now_s)

    def _release(self, request: Request) -> None:
        if self.stops is not None:
            self.stops.release(request.params.stop_strings)

    def _finish(self, session: Session, finish: Finish) -> None:
        request = session.request
        assert request is not None
        self.done.append((request.handle, request.completion(finish)))
        self._release(request)
        session.request = None
        self.waiting.pop(session.id, None)
        self.running.pop(session.id, None)
        if request.last:
            self.close(session.id)
        elif session.slot is not None:
            self.slots.idle[session.id] = session
