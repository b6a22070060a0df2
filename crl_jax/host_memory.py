"""The allocator's settings for a process that computes on the CPU.

Owns: ``keep_freed_memory``. Promises: it changes speed and nothing else, and does nothing where the C library is not glibc. Does not: bound
memory.

XLA on CPU asks for the temporary memory of a program at every call and frees it afterwards. glibc takes blocks of that size from the kernel
each time and gives them back, so every step touches some hundred MB of fresh pages, each a page fault that clears it: a tenth of a step's
time (measured). Kept in the heap, the same pages serve the next step. What the compiler leaves behind is given back after every
compilation: it lies in small pieces that would serve nobody.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from typing import Any

import jax.monitoring

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -2, -4, -8  # malloc.h
_TOP_PAD = 64 * 2**20
_LONG_S = 0.2  # compilations that leave enough behind to be worth some milliseconds


@functools.cache  # a process may open several runs: one listener is enough
def keep_freed_memory() -> bool:
    """Let malloc keep what is freed, in one heap for all threads. Call before the first large allocation; True when it took effect."""
    if sys.platform != "linux":
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    wanted = {_M_MMAP_MAX: 0, _M_TRIM_THRESHOLD: 2**31 - 1, _M_TOP_PAD: _TOP_PAD, _M_ARENA_MAX: 1}
    accepted = [mallopt(option, value) for option, value in wanted.items()]  # 1 each; all of them, even after one that was refused
    if min(accepted) < 1:
        return False
    jax.monitoring.register_event_duration_secs_listener(_trim_after_compilation)
    return True


def _trim_after_compilation(event: str, duration_secs: float, **_: Any) -> None:
    if event.endswith("backend_compile_duration") and duration_secs > _LONG_S:
        ctypes.CDLL(None).malloc_trim(0)
