"""The one thread that touches the bank's files.

Owns: that thread. Promises: calls run one after the other, in the order they were made, so the writer needs no lock; every wait has a
deadline, and one that is missed says which call. Does not: know what it runs.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class WriterThread:
    """Mutable service: one thread, used from an event loop."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="crl-bank-writer")

    async def run(self, call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """The result of ``call(*args, **kwargs)``, or its exception. Raises TimeoutError after ``timeout_s``; the call itself goes on."""
        future = asyncio.get_running_loop().run_in_executor(self._executor, functools.partial(call, *args, **kwargs))
        try:
            return await asyncio.wait_for(future, self._timeout_s)
        except TimeoutError as error:
            if future.done() and not future.cancelled():  # the call's own
                raise
            name = getattr(call, "__name__", "a call")
            late = f"{name} on the bank's thread took longer than {self._timeout_s:g} s: is the disk full or the embedder stuck?"
            raise TimeoutError(late) from error

    def close(self) -> None:
        """End the thread after the call under way, without waiting for it; calls that have not begun are dropped."""
        self._executor.shutdown(wait=False, cancel_futures=True)
