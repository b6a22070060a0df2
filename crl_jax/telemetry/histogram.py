"""Counts of small whole numbers, such as lags in versions.

Owns: ``Histogram`` and the fixed ranges it is shown in. Promises: histograms add exactly; what is shown of one has the same names at every
step, so that lines in a plot go on. Does not: hold fractions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

RANGES = ((0, 0), (1, 1), (2, 2), (3, 3), (4, 7), (8, 15), (16, None))  # first and last of each; the last range has no end


class Histogram(NamedTuple):
    """How often each value was seen. A metric like any other: trackers show it as one number for each range."""

    counts: Mapping[int, int]

    @staticmethod
    def of(values: Iterable[int]) -> Histogram:
        """Counts ``values``."""
        return Histogram(Counter(int(value) for value in values))

    def __add__(self, other: Histogram) -> Histogram:  # type: ignore[override]
        return Histogram(Counter(self.counts) + Counter(other.counts))

    def shown(self) -> dict[str, int]:
        """Counts by range: ``0``, ``1``, ``2``, ``3``, ``4_7``, ``8_15``, ``16_up``; empty when nothing was counted. A value below 0 counts
        as 0."""
        if not self.counts:
            return {}
        found = dict.fromkeys((_name(*limits) for limits in RANGES), 0)
        for value, count in self.counts.items():
            found[_name(*next(r for r in reversed(RANGES) if max(0, value) >= r[0]))] += count
        return found


def _name(first: int, last: int | None) -> str:
    if last is None:
        return f"{first}_up"
    return str(first) if first == last else f"{first}_{last}"
