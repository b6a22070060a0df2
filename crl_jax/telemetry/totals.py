"""Counters of a run that goes on in another process.

Owns: what is a counter among the metrics of the parts, and its total. Promises: a resumed run's counters go on from those of its
checkpoint, whatever the parts counted while they started; gauges pass through. Does not: count.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_PARTS = ("env/", "bank/", "gate/", "serve/")  # their counters begin at 0 with every process
_GAUGES = re.compile(  # what is now; the training buffer's counts are saved with the buffer
    r"bank/(entries|size|revision|step|pending|buffer|buffer_\w+|unsearchable|redundancy/.*|lift_.*|search_(open|waiting|oldest_wait_s))"
    r"|bank/index_(?!builds|rebuilds_for_recall).*|env/memory_mib|(serve/\w+/|bank/extractor_)(free_slots|open_sessions|servers|servers_up)"
)


class Totals:
    """Mutable. ``newest`` are the totals as they were given last."""

    def __init__(self) -> None:
        self._saved: dict[str, float] = {}
        self._before: dict[str, float] = {}  # what is added to the counts of this process
        self.newest: dict[str, float] = {}

    def of(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """``metrics`` of this process with the counters of those before added."""
        now = _counters(metrics)
        before, saved = self._before, self._saved
        totals = {name: before.get(name, 0) + now.get(name, 0) for name in {**before, **now}}
        self.newest = {name: n for name, n in totals.items() if n or name in saved or not before.get(name)}  # others: only of the start
        return {name: value for name, value in metrics.items() if name not in now} | self.newest

    def go_on(self, saved: Mapping[str, float], metrics: Mapping[str, Any]) -> None:
        """From now on counters go on from ``saved``; ``metrics`` is what this process has counted until now, for nothing."""
        now = _counters(metrics)
        self._before = {name: saved.get(name, 0) - now.get(name, 0) for name in {**saved, **now}}
        self.newest = self._saved = dict(saved)


def _counters(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if name.startswith(_PARTS) and not _GAUGES.fullmatch(name)}
