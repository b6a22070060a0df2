"""How much memory a process and its devices have needed.

Owns: the names of these metrics. Promises: a device that does not report (a CPU does not) is left out, and then the process's own peak is
all there is. Does not: say what holds the memory; a device memory profile beside a trace does (``capture``).
"""

from __future__ import annotations

import resource
from collections.abc import Mapping, Sequence
from typing import Any

import jax

_GIB = 2**30
_READ = {"peak_bytes_in_use": "device/peak_gib", "bytes_in_use": "device/in_use_gib", "bytes_limit": "device/limit_gib"}


def memory_metrics() -> dict[str, float]:
    """``host/peak_rss_gib`` of this process, and what its devices report, GiB."""
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"host/peak_rss_gib": peak_kib / 2**20} | of_devices([device.memory_stats() for device in jax.local_devices()])


def of_devices(stats: Sequence[Mapping[str, Any] | None]) -> dict[str, float]:
    """Of the fullest device: ``device/peak_gib``, ``device/in_use_gib``, ``device/limit_gib``; those that some device reports."""
    found: dict[str, float] = {}
    for one in stats:
        for key, name in _READ.items():
            if one and key in one:
                found[name] = max(found.get(name, 0.0), one[key] / _GIB)
    return found
