"""Messages to the engine thread and results back to event loops.

Owns: the one lock between callers and the engine thread. Promises: messages run in the order they were put; after ``close`` nothing is
accepted, and whatever was accepted is still handed over; results of one turn reach each event loop in one wake-up. Does not: know what a
message does.
"""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

Message = Callable[[], None]
IDLE_WAIT_S = 1.0  # an idle thread looks up this often, so no wait is unbounded


class Promise(NamedTuple):
    """A future and the event loop it lives in."""

    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Any]


class Inbox:
    """A queue of messages for one consumer. ``reason`` is why it was closed; ``undelivered`` counts results whose event loop was gone."""

    def __init__(self) -> None:
        self.closed = False
        self.reason: Exception | None = None
        self.undelivered = 0
        self._changed = threading.Condition()
        self._messages: list[Message] = []
        self._requests = 0

    def put(self, message: Message, *, request: bool = False, late_ok: bool = False) -> None:
        """Adds a message. Raises the reason of closing when closed, unless ``late_ok`` (then it is dropped)."""
        with self._changed:
            if self.closed:
                if late_ok:
                    return
                assert self.reason is not None
                raise self.reason
            self._messages.append(message)
            self._requests += request
            self._changed.notify()

    def close(self, reason: Exception) -> None:
        """Accepts nothing more; the first reason stays."""
        with self._changed:
            self.reason = self.reason or reason
            self.closed = True
            self._changed.notify()

    def wait(self, gather_s: float, gather_limit: int, sessions: Callable[[], int]) -> None:
        """Waits for a message; after a request, for more of them until none came for ``gather_s``, at most ``gather_limit`` times.

        Stops gathering when as many requests as open sessions are there.
        """
        with self._changed:
            if not self._messages and not self.closed:
                self._changed.wait(IDLE_WAIT_S)
            for _ in range(gather_limit):
                seen = self._requests
                if not seen or self.closed or seen >= sessions():
                    return
                self._changed.wait_for(lambda: self.closed or self._requests >= sessions(), gather_s)
                if self._requests == seen:
                    return

    def take(self) -> list[Message]:
        """All messages so far."""
        with self._changed:
            messages, self._messages, self._requests = self._messages, [], 0
        return messages


def resolve(done: list[tuple[Promise, Any]]) -> int:
    """Settles every promise in ``done`` and empties it; one wake-up per event loop. Returns how many loops' results could not be
    delivered.
    """
    by_loop: defaultdict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[Any], Any]]] = defaultdict(list)
    for promise, value in done:
        by_loop[promise.loop].append((promise.future, value))
    done.clear()
    lost = 0
    for loop, results in by_loop.items():
        try:
            loop.call_soon_threadsafe(_settle, results)
        except RuntimeError:  # the event loop is closed: nobody can be waiting
            lost += len(results)
    return lost


def _settle(results: list[tuple[asyncio.Future[Any], Any]]) -> None:
    for future, value in results:
        if future.done():
            continue
        if isinstance(value, Exception):
            future.set_exception(value)
        else:
            future.set_result(value)
