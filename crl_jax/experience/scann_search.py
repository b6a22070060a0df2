"""One search of one namespace: the built searcher and the exact tail, masks applied, merged.

Owns: `Segment`, an immutable value, and the parts of a tail. Promises: only entries that are live in it, each once, best first; with an
exact searcher the exact answer; entries removed since the build cost a second look only for the queries whose neighbours they were; one
thread's work (NumPy's matrix product would wake a thread for each core in every search, and they wait for each other). Does not: lock, or
plan builds.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from crl_jax.experience.index_rows import Hits, Vectors, View, candidates
from crl_jax.experience.scann_build import LADDER, Searcher, build_searcher

_OPEN = 256  # rows of the last part of a tail up to which it is built anew with every write (a quarter of a millisecond)
RowNumbers = Int[np.ndarray, "q m"]
Cosines = Float[np.ndarray, "q m"]


class Part(NamedTuple):
    """A brute-force searcher over the rows of a block from ``start`` on."""

    start: int
    searcher: Searcher


def extended(parts: tuple[Part, ...], vectors: Vectors) -> tuple[Part, ...]:
    """Parts for all ``vectors``, whose first rows ``parts`` hold. Sizes at least halve from part to part, apart from the last, so there are
    few, and a row is built again as often as the tail doubles."""
    kept, start = list(parts), sum(part.searcher.n for part in parts)
    while kept and kept[-1].searcher.n < max(_OPEN, 2 * (len(vectors) - start)):
        start = kept.pop().start
    if start < len(vectors):
        kept.append(Part(start, build_searcher(vectors[start:], LADDER[-1])))
    return tuple(kept)


@dataclasses.dataclass(frozen=True)
class Segment:
    """Everything a search needs; replaced, never changed. ``base`` are the rows of ``searcher`` (none without one), ``parts`` those of
    ``tail``."""

    searcher: Searcher | None
    base: View
    parts: tuple[Part, ...]
    tail: View

    def search(self, unit: Vectors, k: int) -> list[Hits]:
        """Per unit query the ``k`` most similar live entries, best first."""
        found: list[tuple[RowNumbers, Cosines]] = []
        if self.searcher is not None and self.base.live:
            found.append(_nearest(self.searcher, 0, self.base, unit, k))
        if self.tail.live:
            for start, searcher in self.parts:
                rows, cosines = _nearest(searcher, start, self.tail, unit, k)
                found.append((np.where(rows >= 0, rows + self.base.n, -1), cosines))
        if not found:
            return [[] for _ in range(len(unit))]
        rows, cosines = found[0]
        if len(found) > 1:
            rows, cosines = (np.concatenate(parts, axis=1) for parts in zip(*found, strict=True))
            best = np.argsort(-cosines, axis=1, kind="stable")[:, :k]  # of equals the older, which stands further left
            rows, cosines = np.take_along_axis(rows, best, axis=1), np.take_along_axis(cosines, best, axis=1)
        return self._hits(rows, cosines)

    def _hits(self, rows: RowNumbers, cosines: Cosines) -> list[Hits]:
        """Candidates by query. They are made for all queries in one pass: this runs for every query, and a pass costs little."""
        good = rows >= 0
        numbers: list[int] = rows[good].tolist()
        built, old, new = self.base.n, self.base.ids, self.tail.ids
        names = [old[n] if n < built else new[n - built] for n in numbers]
        hits = candidates(names, np.clip(cosines[good], -1.0, 1.0).tolist())
        ends: list[int] = np.cumsum(good.sum(axis=1)).tolist()
        return [hits[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def _nearest(searcher: Searcher, start: int, view: View, unit: Vectors, k: int) -> tuple[RowNumbers, Cosines]:
    """Row numbers in ``view`` and cosines of the ``m`` nearest live rows of the searcher, whose first row is ``start``: k of them, or as
    many as are live.

    Some more than ``k`` are asked for if rows were removed; where that leaves too few, four times as many, and so on; where a tree ran out
    of rows, the answer is worked out exactly.
    """
    m = min(k, view.live if searcher.n == view.n else int(view.is_live(np.arange(start, start + searcher.n)).sum()))
    if m == 0:
        return np.zeros((len(unit), 0), np.int64), np.zeros((len(unit), 0), np.float32)
    wanted = m + min(view.dead, max(8, m))
    rows, cosines = _first_live(*searcher.search(unit, wanted), start, view, m)
    if not view.dead and searcher.setting.structure != "tree":
        return rows, cosines
    todo = np.flatnonzero(rows[:, -1] < 0)
    while len(todo) and wanted < searcher.n:
        wanted *= 4
        more, scores = searcher.search(unit[todo], wanted)
        rows[todo], cosines[todo] = _first_live(more, scores, start, view, m)
        short = rows[todo, -1] < 0
        ran_out = short & (more[:, -1] < 0)
        for i in todo[ran_out]:
            rows[i], cosines[i] = _exactly(searcher.n, start, view, unit[i], m)
        todo = todo[short & ~ran_out]
    return rows, cosines


def _first_live(rows: RowNumbers, cosines: Cosines, start: int, view: View, m: int) -> tuple[RowNumbers, Cosines]:
    """The first ``m`` columns that are filled and live; -1 and -inf where there are fewer."""
    good = rows >= 0
    rows = rows + start
    if view.dead:
        good &= view.is_live(rows)
    if not good.all():
        order = np.argsort(~good, axis=1, kind="stable")[:, :m]
        good = np.take_along_axis(good, order, axis=1)
        rows, cosines = np.take_along_axis(rows, order, axis=1), np.take_along_axis(cosines, order, axis=1)
        return np.where(good, rows, -1), np.where(good, cosines, -np.inf)
    return rows[:, :m], cosines[:, :m]


def _exactly(
    n: int, start: int, view: View, query: Float[np.ndarray, " d"], m: int
) -> tuple[Int[np.ndarray, " m"], Float[np.ndarray, " m"]]:
    scores = np.where(view.is_live(np.arange(start, start + n)), view.vectors[start : start + n] @ query, -np.inf)
    best = np.argsort(-scores, kind="stable")[:m]
    return np.where(np.isfinite(scores[best]), best + start, -1), scores[best]
