"""One search of one namespace: the built searcher and the exact tail, masks applied, merged.

Owns: `Segment`, an immutable value. Promises: only entries that are live in it, each once, best first; with an exact searcher the exact
answer; entries removed since the build cost a second look only for the queries whose neighbours they were. Does not: lock or build.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from jaxtyping import Float

from crl_jax.experience.rows import Hits, Vectors, View, to_hits
from crl_jax.experience.scann_build import Searcher


@dataclasses.dataclass(frozen=True)
class Segment:
    """Everything a search needs; replaced, never changed. ``base`` are the rows of ``searcher`` (none without one)."""

    searcher: Searcher | None
    base: View
    tail: View

    def search(self, unit: Vectors, k: int) -> list[Hits]:
        """Per unit query the ``k`` most similar live entries, best first; among equals the older one."""
        if self.searcher is None:
            return self.tail.search(unit, k)
        found = _built(self.searcher, self.base, unit, k)
        if not self.tail.live:
            return found
        above = np.asarray([hits[k - 1].similarity if len(hits) == k else -np.inf for hits in found], np.float32)
        for i, newer in enumerate(self.tail.search(unit, k, above=above)):
            if newer:
                found[i] = sorted([*found[i], *newer], key=lambda c: -c.similarity)[:k]  # stable: the base, being older, wins ties
        return found


def _built(searcher: Searcher, base: View, unit: Vectors, k: int) -> list[Hits]:
    """Live hits of the searcher. Some more than ``k`` are asked for if entries were removed; where that leaves too few, four times as
    many, and so on; where a tree ran out of rows, the answer is worked out exactly."""
    found: list[Hits] = [[] for _ in range(len(unit))]
    todo, wanted = np.arange(len(unit)), k + min(base.dead, max(8, k))
    while len(todo):
        rows, similarities = searcher.search(unit[todo], wanted)
        good = rows >= 0
        ran_out = ~good.all(axis=1)
        if base.dead:
            good &= base.is_live(rows)
        short = good.sum(axis=1) < min(k, base.live)
        _keep(found, todo, base.ids, rows, similarities, good, k)
        if (exact := todo[short & ran_out]).size:
            for i, hits in zip(exact.tolist(), base.search(unit[exact], k), strict=True):
                found[i] = hits
        todo, wanted = todo[short & ~ran_out], 4 * wanted
    return found


def _keep(
    found: list[Hits],
    which: np.ndarray,
    ids: list[str],
    rows: np.ndarray,
    similarities: Float[np.ndarray, "q m"],
    good: np.ndarray,
    k: int,
) -> None:
    """Write the first ``k`` good columns of each row into ``found[which]``."""
    first = good & (np.cumsum(good, axis=1) <= k)
    hits = to_hits(ids, rows[first].tolist(), np.clip(similarities[first], -1.0, 1.0).tolist())  # of all queries: one pass is faster
    ends: list[int] = np.cumsum(first.sum(axis=1)).tolist()
    for i, start, end in zip(which.tolist(), [0, *ends[:-1]], ends, strict=True):
        found[i] = hits[start:end]
