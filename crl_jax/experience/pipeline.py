"""A bounded queue whose items are worked on concurrently and settled in the order they were put.

Owns: the pending count, back-pressure, draining. Promises: ``settle`` runs one item at a time in submission order, so its effects do not
depend on which work finished first; ``prepare`` sees the items whose turn has come together before, to do for all at once what would be
slow one by one (embedding); every wait has a deadline; ``in_turn`` an item begins when that ``concurrency`` places before it is settled,
so that what it begins with does not depend on timing either. Does not: catch exceptions: they end the task, and whoever spawned it hears of
it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Generic, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")
Spawn = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]


class OrderedPipeline(Generic[Item, Result]):
    """Mutable. ``start`` spawns two tasks; ``pending`` counts items put and not yet settled."""

    def __init__(
        self,
        work: Callable[[Item], Coroutine[Any, Any, Result]],
        settle: Callable[[Result], Awaitable[None]],
        *,
        queue_size: int,
        concurrency: int,
        prepare: Callable[[Sequence[Result]], Awaitable[None]] | None = None,
        together: int = 16,
        in_turn: bool = False,
    ) -> None:
        self._work = work
        self._settle = settle
        self._prepare = prepare
        self._together = together
        self._in_turn = in_turn
        self._concurrency = concurrency
        self._queue: asyncio.Queue[Item] = asyncio.Queue(queue_size)
        self._working: asyncio.Queue[asyncio.Task[Result]] = asyncio.Queue(2 * concurrency)
        self._slots = asyncio.Semaphore(concurrency)
        self._idle = asyncio.Event()
        self._idle.set()
        self._tasks: list[asyncio.Task[None]] = []
        self._held: set[asyncio.Task[Result]] = set()
        self.pending = 0

    def start(self, spawn: Spawn) -> None:
        """Begin to work. ``spawn`` makes the tasks, so that its owner hears when one fails."""
        self._tasks = [spawn(self._take_turns())] if self._in_turn else [spawn(self._feed()), spawn(self._settle_all())]

    async def put(self, item: Item, *, timeout_s: float) -> bool:
        """False, and the item is not taken, if the queue stays full for ``timeout_s``."""
        self._count(1)  # before the queue has it: a quick worker may settle the item before this task runs again
        try:
            async with asyncio.timeout(timeout_s):
                await self._queue.put(item)
        except TimeoutError:
            self._count(-1)
            return False
        except asyncio.CancelledError:
            self._count(-1)
            raise
        return True

    async def idle(self) -> None:
        """Returns when nothing is pending. The caller sets the deadline."""
        await self._idle.wait()

    def stop(self) -> int:
        """Cancel everything; returns how many items were pending, which none is afterwards."""
        for task in [*self._tasks, *self._held]:
            task.cancel()
        lost = self.pending
        self._count(-lost)
        return lost

    async def _feed(self) -> None:
        while True:
            item = await self._queue.get()
            await self._slots.acquire()
            task = asyncio.get_running_loop().create_task(self._work(item))
            self._held.add(task)
            task.add_done_callback(self._done)
            await self._working.put(task)

    async def _take_turns(self) -> None:
        under_way: deque[asyncio.Task[Result]] = deque()

        def begin(item: Item) -> None:
            task = asyncio.get_running_loop().create_task(self._work(item))  # the call itself happens here, between two settlements
            self._held.add(task)
            task.add_done_callback(self._held.discard)
            under_way.append(task)

        while True:
            if not under_way:
                begin(await self._queue.get())
            while len(under_way) < self._concurrency and not self._queue.empty():
                begin(self._queue.get_nowait())
            await self._settle(await under_way.popleft())
            self._count(-1)

    def _done(self, task: asyncio.Task[Result]) -> None:
        self._held.discard(task)
        self._slots.release()
        if not task.cancelled():
            task.exception()  # mark as read: when one before it failed, nobody asks for it any more

    async def _settle_all(self) -> None:
        late: asyncio.Task[Result] | None = None
        while True:
            first = late or await self._working.get()
            results = [await first]
            late = None
            while len(results) < self._together and late is None and not self._working.empty():
                task = self._working.get_nowait()
                if task.done() and not task.cancelled() and task.exception() is None:
                    results.append(task.result())
                else:  # still at work, or its exception comes after what was before it is settled
                    late = task
            if self._prepare is not None:
                await self._prepare(results)
            for result in results:
                await self._settle(result)
                self._count(-1)

    def _count(self, change: int) -> None:
        self.pending += change
        if self.pending:
            self._idle.clear()
        else:
            self._idle.set()
