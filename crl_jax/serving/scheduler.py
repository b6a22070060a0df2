"""Which session gets a slot, what to compute next, and when a request is finished: host bookkeeping only, no JAX and no threads.

Owns: sessions (their token ids, how many of them are in the cache), requests, the slots, and the counters.
Promises: requests are admitted first come first served; a slot is free or belongs to exactly one session; after ``swap`` no token is
computed from keys of older weights; every request ends exactly once, in ``done``. Cancel and close are idempotent (unknown and finished
ids are no-ops).
Limits: prompt + new <= max_length exactly. A prompt that leaves no room for one token is refused with PromptTooLong; a larger
``max_new_tokens`` is clipped to the room and the completion then finishes with LENGTH.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import Any

from crl_jax.records import Completion, Finish, SamplingParams
from crl_jax.serving.constraint import COMPLETE, ROOT, UNCONSTRAINED, ActionTrie
from crl_jax.serving.engine import Emitted, Row, bucket

MIN_TEMPERATURE = 1e-6  # below it, logits divided by the temperature leave the range of float32
_INT32 = 2**31  # what the compiled programs hold


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
    state: int
    submitted_s: float
    decoding: bool = False  # its input is in the cache and its next token comes from generate
    ids: list[int] = dataclasses.field(default_factory=list)
    logps: list[float] = dataclasses.field(default_factory=list)
    versions: list[int] = dataclasses.field(default_factory=list)
    states: list[int] = dataclasses.field(default_factory=list)

    def completion(self, finish: Finish) -> Completion:
        """What was sampled so far, as the caller gets it."""
        return Completion(tuple(self.ids), tuple(self.logps), tuple(self.versions), tuple(self.states), finish)


@dataclasses.dataclass(eq=False)
class Session:
    """``cached`` ids are in the cache of ``slot``; ``computed`` is the most that ever were (recomputed tokens are counted against it)."""

    id: str
    ids: list[int] = dataclasses.field(default_factory=list)
    cached: int = 0
    computed: int = 0
    slot: int | None = None
    request: Request | None = None


class Scheduler:
    """``done`` collects (handle, Completion or exception) for the caller to take; ``counts`` only grows."""

    def __init__(self, max_slots: int, max_length: int, max_stop_ids: int, trie: ActionTrie | None) -> None:
        self.max_length = max_length
        self.max_stop_ids = max_stop_ids
        self.trie = trie
        self.sessions: dict[str, Session] = {}
        self.free = list(range(max_slots))[::-1]
        self.idle: OrderedDict[str, Session] = OrderedDict()  # sessions with a slot and no request, longest idle first
        self.waiting: OrderedDict[str, Session] = OrderedDict()  # requests without a slot, first come first
        self.running: OrderedDict[str, Session] = OrderedDict()  # requests with a slot
        self.done: list[tuple[Any, Completion | Exception]] = []
        self.counts: Counter[str] = Counter()
        self.queue_wait_s = 0.0

    def open(self, session_id: str) -> None:
        """A new session; it takes a slot with its first request."""
        self.sessions[session_id] = Session(session_id)

    def submit(self, session_id: str, handle: Any, new_ids: Sequence[int], params: SamplingParams, now_s: float) -> None:
        """Queues one request, or puts the reason why not in ``done``; a refused request leaves the session as it was, and hurts no other,
        whatever is wrong with it."""
        try:
            session = self.sessions.get(session_id)
            if session is None:
                raise KeyError(f"session {session_id!r} is not open: open() gives a new one")
            request = self._request(session, handle, new_ids, params, now_s)
        except Exception as error:
            self.counts["refused"] += 1
            self.done.append((handle, error))
            return
        session.ids.extend(new_ids)
        session.cached = min(session.cached, len(session.ids) - 1)  # generate feeds the last id: what is sampled comes from it
        session.request = request
        self.idle.pop(session_id, None)
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
            self.idle.pop(session_id, None)
            if session.slot is not None:
                self.free.append(session.slot)

    def swap(self) -> None:
        """New weights: no key in the cache is valid any more; running requests start over from their ids, keeping what they sampled."""
        self.counts["swaps"] += 1
        for session in self.sessions.values():
            session.cached = 0
            if session.request is not None:
                session.request.decoding = False

    def admit(self, now_s: float) -> None:
        """Gives slots to waiting requests: their own, a free one, or that of the session that has been idle longest (which will be
        recomputed).
        """
        for session_id, session in list(self.waiting.items()):
            if session.slot is None and not self._take_slot(session):
                continue
            request = session.request
            assert request is not None
            self.queue_wait_s += now_s - request.submitted_s
            del self.waiting[session_id]
            self.running[session_id] = session

    def to_extend(self) -> list[tuple[Session, Row]]:
        """The rows of running requests whose input, but for its last id, is not all in the cache.

        Of sessions that start with the same ids one is computed; the others are forked from it once it is in the cache (``to_fork``).
        """
        rows, seen = [], set[tuple[int, ...]]()
        pending = sorted(self._pending(), key=lambda s: -s.cached)
        lengths = _lengths_to_share(pending)
        for session in pending:
            key = tuple(session.ids) if len(session.ids) in lengths else None
            if session.cached < len(session.ids) - 1 and not (session.cached == 0 and key in seen):
                rows.append((session, self._row(session, session.cached)))
            if key is not None:
                seen.add(key)
        return rows

    def to_fork(self) -> list[tuple[Session, Session, Row]]:
        """(session, the session whose cache it takes, its row) for requests that can sample without computing more: nothing but the last id
        is missing in their own cache, or a running session has the same ids in its cache.
        """
        pending, forks = self._pending(), list[tuple[Session, Session, Row]]()
        lengths = _lengths_to_share(pending)
        sources = {tuple(s.ids): s for s in self.running.values() if len(s.ids) in lengths and s.cached == len(s.ids) - 1}
        for session in pending:
            end = len(session.ids) - 1
            source = session if session.cached == end else sources.get(tuple(session.ids)) if session.cached == 0 else None
            if source is not None:
                forks.append((session, source, self._row(session, end)))
        return forks

    def note_extended(self, session: Session, n: int) -> None:
        """``n`` more ids of the session were dispatched into the cache. Call before the tokens sampled from them are noted."""
        self._note_cached(session, session.cached + n)

    def note_forked(self, session: Session, source: Session) -> None:
        """The session took the cache of ``source``: its own, or one with the same ids."""
        end = len(session.ids) - 1
        if source is not session:
            self.counts["shared_tokens"] += end
            session.cached, session.computed = end, max(session.computed, end)
        self._note_cached(session, end)

    def note_sampled(self, session: Session, request: Request, emitted: Emitted, version: int) -> None:
        """Tokens came back; each step first put the token before it into the cache."""
        if session.request is not request or not emitted.ids:
            return  # cancelled or finished meanwhile
        session.ids.extend(emitted.ids)
        session.cached += len(emitted.ids)
        session.computed = max(session.computed, session.cached)
        request.ids.extend(emitted.ids)
        request.logps.extend(emitted.logps)
        request.states.extend(emitted.states)
        request.versions.extend([version] * len(emitted.ids))
        self.counts["decoded_tokens"] += len(emitted.ids)
        if request.state != UNCONSTRAINED and self.trie is not None:
            request.state = self.trie.advance(emitted.states[-1], emitted.ids[-1])
        if request.state == COMPLETE or emitted.ids[-1] in request.params.stop_ids:
            self._finish(session, Finish.STOP)
        elif len(request.ids) == request.limit:
            self._finish(session, Finish.LENGTH)

    def _pending(self) -> list[Session]:
        return [s for s in self.running.values() if s.request is not None and not s.request.decoding]

    def _row(self, session: Session, start: int) -> Row:
        """What is left to write after the first ``start`` ids; the last id is fed by ``generate``."""
        request = session.request
        assert request is not None
        assert session.slot is not None
        *tokens, last = session.ids[start:]
        return Row(session.slot, start, tokens, last, request.limit - len(request.ids), request.params, len(request.ids), request.state)

    def _note_cached(self, session: Session, high: int) -> None:
        """The first ``high`` ids are in the cache. The last id, which ``generate`` feeds, is counted with those before it."""
        request = session.request
        assert request is not None
        request.decoding = high == len(session.ids) - 1
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
                session.request = None
        self.waiting.clear()
        self.running.clear()

    def _request(self, session: Session, handle: Any, new_ids: Sequence[int], params: SamplingParams, now_s: float) -> Request:
        start, end = len(session.ids), len(session.ids) + len(new_ids)
        if session.request is not None:
            raise ValueError(f"session {session.id!r} already has a request in flight: await or cancel it first")
        if end == 0:
            raise ValueError("an empty prompt has nothing to sample from: give at least one id")
        warm = params.temperature == 0 or MIN_TEMPERATURE <= params.temperature < math.inf
        if params.max_new_tokens < 1 or not warm or not 0 < params.top_p <= 1 or not 0 <= params.top_k < _INT32:
            ranges = f"max_new_tokens >= 1, temperature 0 (greedy) or >= {MIN_TEMPERATURE:g}, 0 < top_p <= 1, 0 <= top_k < 2^31"
            raise ValueError(f"out of range ({ranges}): {params}")
        if not all(isinstance(i, numbers.Integral) for i in (params.max_new_tokens, params.top_k, params.seed, *params.stop_ids)):
            raise ValueError(f"max_new_tokens, top_k, seed and stop_ids must be whole numbers: {params}")
        if not all(0 <= i < _INT32 for i in params.stop_ids):
            raise ValueError(f"stop ids {params.stop_ids} are no token ids")
        if len(params.stop_ids) > self.max_stop_ids:
            raise ValueError(f"{len(params.stop_ids)} stop ids, but the engine was built with max_stop_ids={self.max_stop_ids}")
        if params.constrained and self.trie is None:
            raise ValueError("constrained sampling needs a sampler built with an action trie")
        if end >= self.max_length:
            raise PromptTooLong(f"{end} ids leave no room for a token within max_length={self.max_length}")
        limit = min(params.max_new_tokens, self.max_length - end)
        return Request(handle, params, start, end, limit, ROOT if params.constrained else UNCONSTRAINED, now_s)

    def _take_slot(self, session: Session) -> bool:
        if self.free:
            session.slot = self.free.pop()
            return True
        if not self.idle:
            return False
        _, victim = self.idle.popitem(last=False)
        self.counts["evictions"] += 1
        session.slot, victim.slot, victim.cached = victim.slot, None, 0
        return True

    def _finish(self, session: Session, finish: Finish) -> None:
        request = session.request
        assert request is not None
        self.done.append((request.handle, request.completion(finish)))
        session.request = None
        self.waiting.pop(session.id, None)
        self.running.pop(session.id, None)
        if session.slot is not None:
            self.idle[session.id] = session


def _lengths_to_share(pending: Sequence[Session]) -> set[int]:
    """Lengths of the inputs that may take another session's cache: only ids of these lengths are compared. Later turns have none."""
    return {len(session.ids) for session in pending if session.cached == 0}


def group_rows(
    rows: list[tuple[Session, Row]], row_buckets: Sequence[int], chunk_buckets: Sequence[int]
) -> list[list[tuple[Session, Row]]]:
    """Batches for ``extend``: longest first, rows of one chunk bucket together; padding rows of a batch are filled with shorter ones.

    A row longer than the largest chunk is cut to it with budget 0 (its rest comes in a later round).
    """
    longest = chunk_buckets[-1]
    cut = [(s, r if len(r.tokens) <= longest else dataclasses.replace(r, tokens=r.tokens[:longest], budget=0)) for s, r in rows]
    cut.sort(key=lambda item: -len(item[1].tokens))
    groups = []
    while cut:
        chunk = bucket(len(cut[0][1].tokens), chunk_buckets)
        same = sum(1 for _, r in cut if bucket(len(r.tokens), chunk_buckets) == chunk)
        size = bucket(min(same, row_buckets[-1]), row_buckets)
        groups.append(cut[:size])
        cut = cut[size:]
    return groups
