"""Ending a server in order.

Owns: what SIGINT and SIGTERM do while it runs. Promises: the handlers are there only inside the block. Does not: stop anything itself.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def stop_event() -> Iterator[asyncio.Event]:
    """An event that SIGINT and SIGTERM set inside the block. For the main thread's event loop."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in _SIGNALS:
        loop.add_signal_handler(number, stop.set)
    try:
        yield stop
    finally:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)
