"""Which checkpoints are worth keeping: the newest, and the best by a metric.

Owns: the rule, and reading the metrics that checkpoints carry (record ``run``, key ``metrics``). Promises: the newest whole checkpoint is
never deleted; a damaged one, one without the metric, or with a value that is no finite number, is never among the best; of equals the
newer is better. Does not: measure anything.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import pathlib

from crl_jax.checkpoint import store
from crl_jax.checkpoint.paths import inside

RECORD = "run"


@dataclasses.dataclass(frozen=True)
class Keep:
    """The newest ``last`` checkpoints, and the ``best`` ones by ``metric`` (highest first, or ``lowest``)."""

    last: int
    best: int = 0
    metric: str = ""
    lowest: bool = False


def metrics_of(root: pathlib.Path, step: int) -> dict[str, float]:
    """The metrics that the checkpoint of ``step`` carries; none for a damaged one or one that was saved before they were kept."""
    try:
        path = inside(root, f"step_{step:08d}/records/{RECORD}.json")
        found = json.loads(path.read_text(encoding="utf-8")).get("metrics", {})
        return {str(name): float(value) for name, value in found.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def best(root: pathlib.Path, keep: Keep) -> list[int]:
    """The steps of the best checkpoints, best first."""
    if not keep.best or not keep.metric:
        return []
    sign = 1 if keep.lowest else -1
    values = {step: metrics_of(root, step).get(keep.metric, math.nan) for step in store.committed(root)}
    ranked = sorted((sign * value, -step) for step, value in values.items() if math.isfinite(value))
    whole = (-step for _, step in ranked if store.is_whole(root, -step))
    return list(itertools.islice(whole, keep.best))


def doomed(root: pathlib.Path, keep: Keep) -> list[int]:
    """The steps that `prune` would delete."""
    return store.to_prune(root, keep.last, keep=best(root, keep))


def prune(root: pathlib.Path, keep: Keep) -> list[int]:
    """Deletes what is not to be kept, and half-written steps older than the newest complete one; returns the steps."""
    return store.prune(root, keep.last, keep=best(root, keep))
