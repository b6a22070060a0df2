"""Queries that are asked at about the same time, in one call.

Owns: the open batch. Promises: a query waits at most ``wait_s`` for others; an error of a call reaches everybody in it; the answers come in
the order of the queries. Does not: send (the function it is given does).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

Item = TypeVar("Item")
Found = TypeVar("Found")


class Gather(Generic[Item, Found]):
    """Mutable, on one event loop. A call has at most ``most`` items, except for one caller's larger list, which is cut."""

    def __init__(self, send: Callable[[list[Item]], Awaitable[Sequence[Found]]], *, most: int, wait_s: float) -> None:
        self._send = send
        self._most = most
        self._wait_s = wait_s
        self._open: list[tuple[Item, asyncio.Future[Found]]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._running: set[asyncio.Task[None]] = set()
        self.batches = 0
        self.items = 0

    @property
    def waiting(self) -> int:
        """Items of the open batch."""
        return len(self._open)

    async def ask(self, items: Sequence[Item]) -> list[Found]:
        """What was found for each item. Raises what sending raises."""
        loop = asyncio.get_running_loop()
        futures: list[asyncio.Future[Found]] = []
        for item in items:
            future: asyncio.Future[Found] = loop.create_future()
            futures.append(future)
            self._open.append((item, future))
            if len(self._open) >= self._most:
                self._flush()
        if self._open and self._timer is None:
            self._timer = loop.call_later(self._wait_s, self._flush)
        return list(await asyncio.gather(*futures))

    def close(self) -> None:
        """Cancel what has not been answered."""
        if self._timer is not None:
            self._timer.cancel()
        for task in self._running:
            task.cancel()
        for _, future in self._open:
            future.cancel()

    def _flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        batch, self._open = self._open, []
        if not batch:
            return
        self.batches += 1
        self.items += len(batch)
        task = asyncio.get_running_loop().create_task(self._answer(batch))
        self._running.add(task)  # a task nobody refers to may be collected before it ran
        task.add_done_callback(self._running.discard)

    async def _answer(self, batch: list[tuple[Item, asyncio.Future[Found]]]) -> None:
        try:
            found = await self._send([item for item, _ in batch])
        except asyncio.CancelledError:
            for _, future in batch:
                future.cancel()
            raise
        except Exception as error:  # handed to everybody who asked
            for _, future in batch:
                if not future.done():
                    future.set_exception(error)
            return
        for (_, future), answer in zip(batch, found, strict=True):
            if not future.done():  # whoever asked may have given up
                future.set_result(answer)
