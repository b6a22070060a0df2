"""The sampler protocol, and ``EngineSampler``: a slot engine driven by one thread, used from asyncio.

Owns: the thread, the hand-over of requests and results between it and event loops, and which weights are in use.
Promises: after ``publish`` returns, the next dispatch uses the new weights and recomputes what older weights left in the cache,
in-flight requests included; requests that arrive together are computed together; an exception in the engine thread fails every waiting
and later call with that exception; every wait has a deadline.
Does not: copy or donate published parameters. They are used by reference, so the publisher must not donate them while they are in use.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from crl_jax.records import Completion, SamplingParams
from crl_jax.serving.engine import SlotEngine
from crl_jax.serving.inbox import Inbox, Message, Promise, resolve
from crl_jax.serving.progress import OnTokens, Progress
from crl_jax.serving.scheduler import PromptTooLong, Scheduler
from crl_jax.serving.turn import EngineTurn

__all__ = ["EngineSampler", "PromptTooLong", "Sampler", "SamplerClosed"]


_COUNTS = (
    "prefilled_tokens",
    "decoded_tokens",
    "recomputed_tokens",
    "shared_tokens",
    "restored_tokens",
    "offloads",
    "evictions",
    "swaps",
    "cancelled",
    "refused",
)


class SamplerClosed(RuntimeError):
    """The sampler was closed while, or before, the request ran."""


class Sampler(Protocol):
    """Token ids in, token ids and log-probabilities out, in sessions that keep their cache between turns."""

    vocab_size: int
    max_length: int
    version: int

    async def open(self) -> str:
        """A new, empty session."""
        ...

    async def generate(self, session: str, new_ids: Sequence[int], params: SamplingParams) -> Completion:
        """Appends ``new_ids`` to the session and samples a completion, which stays in the session.

        Raises PromptTooLong (only this request; the session is unchanged), ValueError for bad parameters, KeyError for an unknown session.
        """
        ...

    async def close(self, session: str) -> None:
        """Frees the session; idempotent. A request in flight ends as CANCELLED."""
        ...

    async def complete(self, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        """One completion in a session of its own."""
        ...

    async def cancel(self, session: str) -> None:
        """Ends the session's request as CANCELLED with what it has; idempotent, unknown sessions are a no-op."""
        ...

    def publish(self, params: Any, version: int) -> None:
        """Uses these weights from the next dispatch on; callable from any thread.

        A sampler may drain first: then it returns when the requests that were running have ended and the weights are in use, and raises
        TimeoutError (the older weights stay in use) past its deadline.
        """
        ...

    def stats(self) -> dict[str, int | float]:
        """Counters since the start: tokens, dispatches, seconds, swaps, evictions, open sessions, free slots."""
        ...

    async def aclose(self) -> None:
        """Stops; requests in flight fail with SamplerClosed. Raises TimeoutError past the deadline."""
        ...


class EngineSampler:
    """A ``Sampler`` over a ``SlotEngine`` (or the same engine behind JetStream's interface).

    ``host_bytes`` is the memory for keys and values of idle sessions whose slot another one needs; what does not fit is recomputed.
    ``gather_s``: an idle engine that gets a request waits this long after each arrival for more (at most ``gather_limit`` times), so
    that a burst becomes one dispatch; it does not wait when every open session has a request. ``request_timeout_s`` bounds one generate
    call. With ``drain_timeout_s`` above 0, ``publish`` waits at most so long for the running requests to end, during which no other
    starts, and no request samples from two versions; do not call it in the engine's own thread then. With 0 the weights change in the
    middle of requests. ``clock`` gives seconds and is used for measuring only; ``role`` is its name in errors and profiler traces.
    """

    def __init__(
        self,
        engine: SlotEngine,
        params: Any,
        *,
        version: int = 0,
        gather_s: float = 0.001,
        gather_limit: int = 5,
        host_bytes: int = 2**28,
        request_timeout_s: float = 600.0,
        close_timeout_s: float = 30.0,
        drain_timeout_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        role: str = "",
    ) -> None:
        self._who = f"the {role}'s sampler" if role else "the sampler"
        self.vocab_size = engine.config.vocab_size
        self.max_length = engine.max_length
        self.version = version
        self._request_timeout_s = request_timeout_s
        self._close_timeout_s = close_timeout_s
        self._drain_timeout_s = drain_timeout_s
        self._draining = threading.Lock()
        self._gather = (gather_s, gather_limit)
        self._clock = clock
        self._names = itertools.count()
        self._open: set[str] = set()
        self._max_slots = engine.max_slots
        self._inbox = Inbox()
        self._scheduler = Scheduler(engine.limits(host_bytes), engine.trie, engine.stops)
        self._progress = Progress()
        self._turn = EngineTurn(engine, self._scheduler, params, version, clock, role)
        self._thread = threading.Thread(target=self._run, name=f"sampler-{role or 'engine'}", daemon=True)
        self._thread.start()

    async def open(self) -> str:
        name = f"s{next(self._names)}"
        self._open.add(name)
        self._inbox.put(lambda: self._scheduler.open(name))
        return name

    async def generate(
        self, session: str, new_ids: Sequence[int], params: SamplingParams, *, on_tokens: OnTokens | None = None
    ) -> Completion:
        """As the protocol says; ``on_tokens`` is called in the event loop with newly sampled tokens, all of them before this returns."""
        return await self._generate(session, new_ids, params, on_tokens)

    async def _generate(
        self, session: str, new_ids: Sequence[int], params: SamplingParams, on_tokens: OnTokens | None = None, *, last: bool = False
    ) -> Completion:
        """``generate``; with ``last`` the session ends with the request, in the engine thread."""
        ids = [int(i) for i in new_ids]
        if any(not 0 <= i < self.vocab_size for i in ids):
            raise ValueError(f"token ids must be in 0..{self.vocab_size - 1}, got {min(ids)}..{max(ids)}")
        loop = asyncio.get_running_loop()
        promise = Promise(loop, loop.create_future())
        now_s = self._clock()

        def submit() -> None:
            self._scheduler.submit(session, promise, ids, params, now_s, last=last)
            if on_tokens is not None:
                self._progress.listen(self._scheduler.sessions.get(session), promise, on_tokens)

        self._inbox.put(submit, request=True)
        try:
            async with asyncio.timeout(self._request_timeout_s):
                return await promise.future
        except (asyncio.CancelledError, TimeoutError) as ended:
            self._inbox.put(lambda: self._scheduler.cancel(session, promise), late_ok=True)  # this request, not another one of the session
            if isinstance(ended, TimeoutError):
                limit = f"request_timeout_s={self._request_timeout_s:g} s"
                late = f"{self._who}: no completion within {limit}: raise it (run.collect_timeout_s in a run), or sample fewer tokens"
                raise TimeoutError(late) from ended
            raise

    async def cancel(self, session: str) -> None:
        self._inbox.put(lambda: self._scheduler.cancel(session), late_ok=True)

    async def close(self, session: str) -> None:
        self._open.discard(session)
        self._inbox.put(lambda: self._scheduler.close(session), late_ok=True)

    async def complete(self, prompt_ids: Sequence[int], params: SamplingParams, *, on_tokens: OnTokens | None = None) -> Completion:
        session = await self.open()
        try:
            return await self._generate(session, prompt_ids, params, on_tokens, last=True)
        finally:
            await self.close(session)

    @property
    def failure(self) -> Exception | None:
        """What stopped the engine (``SamplerClosed`` after ``aclose``), None while it works."""
        return self._inbox.reason

    def publish(self, params: Any, version: int) -> None:
        if self._drain_timeout_s:
            with self._draining:
                self._publish_drained(params, version)
        else:
            self._inbox.put(lambda: self._turn.swap(params, version))
        self.version = version

    def _publish_drained(self, params: Any, version: int) -> None:
        done: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._inbox.put(lambda: self._turn.swap_drained(params, version, done))
        try:
            done.result(self._drain_timeout_s)
        except TimeoutError as late:
            if done.cancel():
                limit = f"drain_timeout_s={self._drain_timeout_s:g} s"
                fix = "raise publish.drain_timeout_s, sample fewer tokens, or set publish.drain=false to swap in the middle of requests"
                raise TimeoutError(f"version {version} is not in use: requests did not end within {limit}: {fix}") from late
            done.result(self._close_timeout_s)  # the swap began in this instant

    def stats(self) -> dict[str, int | float]:
        counts = {name: self._scheduler.counts[name] for name in _COUNTS}
        return counts | self._turn.stats() | {"undelivered": self._inbox.undelivered}

    async def aclose(self) -> None:
        self._inbox.close(SamplerClosed("the sampler is closed"))
        await asyncio.to_thread(self._thread.join, self._close_timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(f"{self._who}: the engine thread did not stop within {self._close_timeout_s} s")

    def _run(self) -> None:
        """The engine thread: messages, then one turn, until closed or broken."""
        scheduler, messages = self._scheduler, deque[Message]()
        try:
            while not self._inbox.closed:
                busy = bool(scheduler.running or scheduler.waiting)
                if not busy:
                    gather_s, limit = self._gather
                    self._inbox.wait(gather_s, limit, lambda: min(len(self._open), self._max_slots))
                messages.extend(self._inbox.take())
                while messages:
                    messages.popleft()()
                self._turn.step()
                self._progress.report(scheduler.done)
                self._inbox.undelivered += resolve(scheduler.done)
            error: Exception = self._inbox.reason or SamplerClosed("the sampler is closed")
        except Exception as broken:  # supervised: every caller gets it, now and later
            broken.add_note(f"raised in the engine of {self._who}")
            error = broken
            self._inbox.close(broken)
        for message in (*messages, *self._inbox.take()):  # those that came with one that broke the engine, too
            with contextlib.suppress(Exception):  # the engine's own error is what callers get
                message()
        scheduler.fail_all(error)
        self._turn.abandon(error)
        self._inbox.undelivered += resolve(scheduler.done)
