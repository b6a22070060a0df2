"""Answers kept for a short time, so that a repeated request is not sampled twice.

Owns: what was answered to which request id. Promises: while an answer is kept, and while it is being made, the same id gives the same
bytes; an id that comes back with another body is refused; errors are not kept; memory is bounded. Does not: survive a restart.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from crl_jax.serving.http.errors import ApiError


class Answer(NamedTuple):
    """A body and the headers that go with it."""

    body: bytes
    headers: dict[str, str]


@dataclasses.dataclass
class _Entry:
    digest: str
    future: asyncio.Future[Answer]
    kept_since_s: float = 0.0


class Answers:
    """``keep_s`` seconds, at most ``limit_bytes`` of bodies. ``repeated`` counts answers given again. For one event loop."""

    def __init__(self, clock: Callable[[], float], *, keep_s: float = 120.0, limit_bytes: int = 64 << 20) -> None:
        self._clock, self._keep_s, self._limit_bytes = clock, keep_s, limit_bytes
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._bytes = 0
        self.repeated = 0

    async def once(self, name: str, digest: str, make: Callable[[], Awaitable[Answer]]) -> Answer:
        """The kept answer of request ``name``, or that of ``make``. Who waits for another caller's ``make`` takes over when it is
        cancelled.

        ``digest`` stands for the body; raises ApiError (409) when it is not the one of the first time.
        """
        self._forget()
        while (entry := self._entries.get(name)) is not None:
            if entry.digest != digest:
                raise ApiError(409, f"request id {name!r} was used for another request: give each its own", code="request_id_reused")
            try:
                answer = await asyncio.shield(entry.future)
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if not entry.future.cancelled() or (task is not None and task.cancelling()):
                    raise  # this caller was cancelled, whatever became of the other one
                continue
            self.repeated += 1
            return answer
        return await self._make(name, digest, make)

    async def _make(self, name: str, digest: str, make: Callable[[], Awaitable[Answer]]) -> Answer:
        entry = self._entries[name] = _Entry(digest, asyncio.get_running_loop().create_future())
        try:
            answer = await make()
        except BaseException as error:
            del self._entries[name]
            if isinstance(error, Exception):
                entry.future.set_exception(error)
                entry.future.exception()  # often nobody waits for it
            else:
                entry.future.cancel()
            raise
        entry.future.set_result(answer)
        entry.kept_since_s = self._clock()
        self._entries.move_to_end(name)
        self._bytes += len(answer.body)
        self._forget()
        return answer

    def _forget(self) -> None:
        """Drops what is old, and the oldest while there is too much."""
        now_s = self._clock()
        for name, entry in list(self._entries.items()):
            if not entry.future.done():
                continue
            if now_s - entry.kept_since_s < self._keep_s and self._bytes <= self._limit_bytes:
                return
            self._bytes -= len(entry.future.result().body)
            del self._entries[name]
