"""The metrics of one step, measured by several processes, as one row.

Owns: how each kind of number is joined. Promises: sums and counts are those of all processes together, so the row does not depend on how
the episodes were shared out. Does not: talk to processes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from crl_jax.records import Sum
from crl_jax.telemetry.histogram import Histogram

_OF_FIRST = re.compile(r"bank/.*|publish/.*|\w+/(version|updates)|serve/\w+/version|host/.*|step_s")
_LARGEST = re.compile(r".*/max|rollout/collect_s|device/.*")


def pack_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """``row`` as JSON holds it: a Sum as the list of its two parts, a Histogram as its counts by value."""
    return {name: _packed(value) for name, value in row.items()}


def join_rows(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One row of several packed ones: the first's of what is shared (bank, versions, publishes), the largest of maxima, else the sum."""
    joined: dict[str, Any] = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row[name] for row in rows if name in row]
        if isinstance(values[0], list):
            joined[name] = Sum(*(sum(parts) for parts in zip(*values, strict=True)))
        elif isinstance(values[0], dict):
            counts = (Histogram({int(value): n for value, n in packed.items()}) for packed in values)
            joined[name] = sum(counts, Histogram({}))
        elif _OF_FIRST.fullmatch(name):
            joined[name] = values[0]
        else:
            joined[name] = max(values) if _LARGEST.fullmatch(name) else sum(values)
    return joined


def _packed(value: Any) -> Any:
    if isinstance(value, Sum):
        return [float(value.total), float(value.count)]
    if isinstance(value, Histogram):
        return {str(of): int(n) for of, n in value.counts.items()}
    return float(value)
