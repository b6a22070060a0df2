"""Work that is done once however often it is asked for.

Owns: what is being worked on now, and recent answers in memory. Promises: two calls with one key share one piece of work, which goes on
when a caller gives up; with ``answered``, a key that was answered in the past gets that answer and no work. Does not: keep answers on disk
(the work does, in the transaction of its effect).
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

Reply = TypeVar("Reply")


class Once(Generic[Reply]):
    """Mutable, on one event loop. ``answered`` looks a key up where answers are kept; ``counts`` has ``repeated``."""

    def __init__(self, answered: Callable[[str], Awaitable[Reply | None]], counts: Counter[str]) -> None:
        self._answered = answered
        self._counts = counts
        self._running: dict[str, asyncio.Task[Reply]] = {}

    async def do(self, key: str, work: Callable[[], Awaitable[Reply]]) -> Reply:
        """The answer kept for ``key``, or that of ``work``. Raises what the work raises, to everybody who waits for it."""
        task = self._running.get(key)
        if task is None:  # no await between the look and the entry: two calls cannot both begin
            task = asyncio.get_running_loop().create_task(self._work(key, work))
            self._running[key] = task
            task.add_done_callback(lambda done: self._ended(key, done))
        else:
            self._counts["repeated"] += 1
        return await asyncio.shield(task)  # a caller whose deadline ends takes nothing with it

    async def settled(self, timeout_s: float) -> int:
        """Wait for what is being worked on; returns how much still is at the deadline."""
        if self._running:
            await asyncio.wait(list(self._running.values()), timeout=timeout_s)
        return len(self._running)

    async def _work(self, key: str, work: Callable[[], Awaitable[Reply]]) -> Reply:
        kept = await self._answered(key)
        if kept is None:
            return await work()
        self._counts["repeated"] += 1
        return kept

    def _ended(self, key: str, task: asyncio.Task[Reply]) -> None:
        self._running.pop(key, None)
        if not task.cancelled():
            task.exception()  # mark as read: whoever asked may be gone


class Recent(Generic[Reply]):
    """The newest answers in memory, up to ``most`` bytes together by ``size``: for work that leaves nothing on disk."""

    def __init__(self, size: Callable[[Reply], int], most: int = 16 * 2**20) -> None:
        self._size = size
        self._most = most
        self._total = 0
        self._found: OrderedDict[str, Reply] = OrderedDict()

    async def find(self, key: str) -> Reply | None:
        """The answer, if it is still there."""
        return self._found.get(key)

    def keep(self, key: str, reply: Reply) -> Reply:
        """``reply``, remembered; the oldest ones leave."""
        self._found[key] = reply
        self._total += self._size(reply)
        while self._total > self._most and len(self._found) > 1:
            self._total -= self._size(self._found.popitem(last=False)[1])
        return reply
