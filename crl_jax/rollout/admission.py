"""Which batches of episodes are under way: how far collecting may run ahead of learning.

Owns: that limit and the order. Promises: at most ``ahead + 1`` batches are under way, so an episode starts with weights at most ``ahead``
versions older than those that learn from it; batches are handed over in their order, whole, however slow one of their episodes is; the
limit follows from the step alone, so a resumed run has the same. Does not: play episodes.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Admission(Generic[T]):
    """Mutable, for one thread. ``start(step)`` begins the batch of a step, ``wait`` gives what came of it; no batch at or after ``end``."""

    def __init__(
        self,
        start: Callable[[int], concurrent.futures.Future[T]],
        wait: Callable[[concurrent.futures.Future[T], int], T],
        *,
        first: int,
        end: int,
        ahead: int,
    ) -> None:
        self._start, self._wait, self._next, self._end, self._ahead = start, wait, first, end, ahead
        self._running: dict[int, concurrent.futures.Future[T]] = {}

    @property
    def under_way(self) -> int:
        """Batches that were started and not handed over."""
        return len(self._running)

    def take(self, step: int) -> T:
        """The batch of ``step``, which is also the number of weight versions so far; waits for it.

        Later batches, up to the limit, begin now: what is slow in this one leaves room for them.
        """
        self._admit_before(step + 1 + self._ahead)
        batch = self._wait(self._running[step], step)
        del self._running[step]
        return batch

    def give_up(self) -> None:
        """Nobody will take what has been started."""
        for running in self._running.values():
            running.cancel()
        self._running.clear()

    def _admit_before(self, stop: int) -> None:
        while self._next < min(stop, self._end):
            self._running[self._next] = self._start(self._next)
            self._next += 1
