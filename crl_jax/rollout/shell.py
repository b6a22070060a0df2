"""The asynchronous side of a run: one event loop in one thread, owned by the learner's thread.

Owns: the loop, the tasks started on it, and their end. Promises: an exception in any task reaches the owner at its next call; every wait
has a deadline; ``close`` returns within its deadline and leaves no task behind. Does not: know what the tasks do.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class ShellClosed(RuntimeError):
    """A task was handed to a shell whose loop has already stopped."""


class Shell:
    """Runs coroutines on a background event loop; a context manager."""

    def __init__(self, name: str = "shell", start_timeout_s: float = 30.0):
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._ready = threading.Event()
        self._watched: set[concurrent.futures.Future[Any]] = set()
        self._thread.start()
        if not self._ready.wait(start_timeout_s):
            raise TimeoutError(f"event loop of {name} did not start within {start_timeout_s} s")

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.call_soon(self._ready.set)
        self._loop.run_forever()

    def start(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Start ``coroutine`` and return its future at once. Raises the error of any watched task that failed meanwhile."""
        try:
            self.check()
        except BaseException:
            coroutine.close()
            raise
        return self._start(coroutine)

    def _start(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        if not self._thread.is_alive():
            coroutine.close()
            raise ShellClosed("the event loop has stopped; nothing can be started on it")
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        self._watched.add(future)
        return future

    def wait(self, future: concurrent.futures.Future[T], deadline_s: float, what: str) -> T:
        """The result of ``future``; ``TimeoutError`` naming ``what`` after ``deadline_s``; the task's own exception if it failed."""
        try:
            result = future.result(timeout=deadline_s)
        except concurrent.futures.TimeoutError:
            if future.done():
                raise
            future.cancel()
            raise TimeoutError(
                f"{what} did not finish within {deadline_s:.0f} s (raise run.collect_timeout_s if this machine is that slow)"
            ) from None
        finally:
            self._watched.discard(future)
            future.cancel()  # nobody waits for it any more: the owner was interrupted; a no-op for one that has ended
        return result

    def call(self, coroutine: Coroutine[Any, Any, T], deadline_s: float, what: str) -> T:
        """``wait(start(coroutine))``."""
        return self.wait(self.start(coroutine), deadline_s, what)

    def finish(self, coroutine: Coroutine[Any, Any, T], deadline_s: float, what: str) -> T:
        """`call` for the end of a part: it runs whatever has failed meanwhile, which `close` raises."""
        return self.wait(self._start(coroutine), deadline_s, what)

    def check(self) -> None:
        """Raise the exception of the first watched task that failed."""
        for future in list(self._watched):
            if future.done() and not future.cancelled() and future.exception() is not None:
                self._watched.discard(future)
                future.result()

    def close(self, deadline_s: float = 15.0) -> None:
        """Cancel what still runs and stop the loop. Safe to call twice. Raises the error of a watched task that nobody has seen."""
        if not self._thread.is_alive():
            return
        stop = asyncio.run_coroutine_threadsafe(self._cancel_all(), self._loop)
        try:
            stop.result(timeout=deadline_s)
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(deadline_s)
            if not self._thread.is_alive():
                self._loop.close()
        self.check()

    async def _cancel_all(self) -> None:
        running = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def __enter__(self) -> Shell:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
