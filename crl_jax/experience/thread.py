"""Threads of the bank: the one that touches its files, and those that embed and search.

Owns: the threads. Promises: calls of one thread run one after the other, in the order they were made, so the writer needs no lock; every
wait has a deadline, and one that is missed says which call; a call that hangs does not keep the process from ending. Does not: know what
it runs.
"""

from __future__ import annotations

import asyncio
import functools
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class DaemonThread(Executor):
    """An executor of one daemon thread, or of several that share one queue. (Python waits for the threads of a ``ThreadPoolExecutor``
    before it exits, hung ones too.)

    With ``low_priority`` the thread gets only the CPU time that no other wants (on Linux, where threads have a priority of their own).
    Give such a thread calls that spend their time without the interpreter's lock: a thread that holds the lock and is not scheduled holds
    up every other.
    """

    def __init__(self, name: str, *, threads: int = 1, low_priority: bool = False) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._low_priority = low_priority
        self._names = [name] if threads == 1 else [f"{name}-{n}" for n in range(threads)]
        self._threads = [threading.Thread(target=self._work, name=each, daemon=True) for each in self._names]
        for thread in self._threads:
            thread.start()

    def submit(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Queue one call. Raises RuntimeError after `shutdown`."""
        if self._closed.is_set():
            raise RuntimeError("cannot schedule new calls after shutdown")
        future: Future[R] = Future()
        self._calls.put((future, functools.partial(fn, *args, **kwargs)))
        return future

    def shutdown(self, wait: bool = False, *, cancel_futures: bool = True) -> None:
        """End the threads after the calls under way; calls that have not begun are cancelled. Never waits."""
        del wait, cancel_futures
        self._closed.set()
        for _ in self._names:
            self._calls.put(None)

    def join(self, timeout_s: float) -> bool:
        """Wait after `shutdown` until the threads have ended; False at the deadline. A daemon thread that is still in foreign code when the
        process exits can take it down."""
        end = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self) -> None:
        if self._low_priority and sys.platform == "linux":
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        while (item := self._calls.get()) is not None:
            future, call = item
            if self._closed.is_set():
                future.cancel()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(call())
            except BaseException as error:  # handed to whoever waits for the call
                future.set_exception(error)


class WriterThread:
    """Mutable service: one thread, used from an event loop."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._executor = DaemonThread("crl-bank-writer")

    async def run(self, call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """The result of ``call(*args, **kwargs)``, or its exception. Raises TimeoutError after ``timeout_s``; the call itself goes on."""
        return await self.run_within(self._timeout_s, call, *args, **kwargs)

    async def run_within(self, timeout_s: float, call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """`run` with a deadline of its own, for what may take long (loading a large bank, the end of an index build)."""
        future = asyncio.get_running_loop().run_in_executor(self._executor, functools.partial(call, *args, **kwargs))
        try:
            async with asyncio.timeout(timeout_s):  # not ``wait_for``: in Python 3.11 it loses a cancellation that comes with the result
                return await future
        except TimeoutError as error:
            if future.done() and not future.cancelled():  # the call's own
                raise
            name = getattr(call, "__name__", "a call")
            late = f"{name} on the bank's thread took longer than {timeout_s:g} s: is the disk full or the embedder stuck?"
            raise TimeoutError(late) from error

    def close(self) -> None:
        """End the thread after the call under way, without waiting for it; calls that have not begun are dropped."""
        self._executor.shutdown()
