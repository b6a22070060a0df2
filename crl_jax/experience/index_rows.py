"""Rows of an index: unit vectors with their ids, appended and marked as removed, and the views that searches hold on to.

Owns: the buffers of one block of entries, and exact search over them. Promises: adding costs what the new rows cost (amortised), whatever
is there already; removing costs the same for any size; a `View` never changes: it shows the first ``n`` rows without those removed up to
its version, whatever is added or removed later. Does not: lock (one writer at a time; readers need no lock), or know namespaces.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from crl_jax.experience.retrieve import Candidate

Vectors = Float[np.ndarray, "n d"]
Scores = Float[np.ndarray, "q n"]
Hits = list[Candidate]

_NEVER = np.iinfo(np.int64).max  # the version at which a live row was removed
_candidate: Callable[[tuple[str, float]], Candidate] = functools.partial(tuple.__new__, Candidate)  # pyright: ignore[reportUnknownMemberType]
_SMALLEST = 64  # rows of the first buffer
_ROUNDING = 1e-5  # of a product of unit vectors, at most


def unit_rows(vectors: Vectors, *, dim: int) -> Vectors:
    """Rows scaled to length 1, float32. Raises ValueError for a wrong shape, non-finite values or a zero row."""
    rows = np.asarray(vectors, np.float32)
    if rows.ndim != 2 or rows.shape[1] != dim:
        raise ValueError(f"vectors have shape {rows.shape}, the index holds [n, {dim}]: was another embedding model used?")
    lengths = _lengths(rows)
    if not np.isfinite(rows).all():
        raise ValueError("a vector is not finite: check the embedder's output")
    if not ((lengths > 0) & (lengths < np.inf)).all():
        raise ValueError("a vector has length 0 and no direction to compare (or its length overflows): is its text empty?")
    return rows / lengths[:, None]


def has_direction(vector: Float[np.ndarray, " d"]) -> bool:
    """Whether a cosine with this vector is defined: it is finite and so is its length, which is not 0."""
    return bool(0 < _lengths(np.asarray(vector, np.float32)[None, :])[0] < np.inf)


def usable(queries: Vectors, *, dim: int, k: int) -> tuple[Vectors, list[int]]:
    """Unit rows of the queries that have a direction, and their positions: one that has none, or is not finite, keeps no other of its batch
    from an answer. Raises ValueError for k < 1 or a wrong shape."""
    if k < 1:
        raise ValueError(f"k={k}: ask for at least one neighbour")
    rows = np.asarray(queries, np.float32)
    if rows.ndim != 2 or rows.shape[1] != dim:
        raise ValueError(f"queries of shape {rows.shape} must be [q, {dim}]: was another embedding model used?")
    lengths = _lengths(rows)
    good = (lengths > 0) & (lengths < np.inf)
    if good.all():
        return rows / lengths[:, None], list(range(len(rows)))
    return rows[good] / lengths[good, None], np.flatnonzero(good).tolist()


def _lengths(rows: Vectors) -> Float[np.ndarray, " n"]:
    with np.errstate(over="ignore", invalid="ignore"):
        return np.sqrt(np.einsum("nd,nd->n", rows, rows))


def candidates(ids: Sequence[str], similarities: Sequence[float]) -> Hits:
    """Pairs as candidates, made without a Python call for each: this runs for every query."""
    return list(map(_candidate, zip(ids, similarities, strict=True)))


def best(scores: Scores, ids: list[str], k: int) -> list[Hits]:
    """Per row the ``k`` best columns, best first; equal scores keep column order. -inf marks a column that does not count."""
    q, n = scores.shape
    mask = scores > -np.inf
    if n > 4 * k:  # sort only what is at least the k-th best: few
        mask &= scores >= np.partition(scores, n - k, axis=1)[:, n - k, None]
    flat = np.flatnonzero(mask.ravel())
    row: Int[np.ndarray, " hits"] = flat // max(n, 1)
    column: Int[np.ndarray, " hits"] = flat % max(n, 1)
    value = scores.ravel()[flat]
    order = np.lexsort((column, -value, row))
    counts: Int[np.ndarray, " q"] = np.bincount(row, minlength=q)
    bounds: list[int] = [0, *np.cumsum(counts).tolist()]
    columns: list[int] = column[order].tolist()
    hits = candidates([ids[c] for c in columns], np.clip(value[order], -1.0, 1.0).tolist())
    return [hits[a : min(b, a + k)] for a, b in itertools.pairwise(bounds)]


class View(NamedTuple):
    """The first ``n`` rows of a block as they were at ``version``. The arrays may be longer; ``dead`` of the n rows do not count."""

    ids: list[str]
    vectors: Vectors
    gone_at: Int[np.ndarray, " n"]
    n: int
    version: int
    dead: int

    @property
    def live(self) -> int:
        """Rows that count."""
        return self.n - self.dead

    def is_live(self, rows: Int[np.ndarray, "..."]) -> Bool[np.ndarray, "..."]:
        """Whether each of these row numbers counts."""
        return self.gone_at[rows] > self.version

    def search(self, unit: Vectors, k: int) -> list[Hits]:
        """Exact: per unit query the ``k`` most similar live rows, best first, oldest first among equals.

        A matrix product rounds by where a row lies and what is asked beside it. It only picks the rows to look at; their scores are worked
        out one by one, so that equal rows are equals and the answer depends on the live rows alone, whatever was removed before.
        """
        if not self.live:
            return [[] for _ in range(len(unit))]
        vectors = self.vectors[: self.n]
        scores = unit @ vectors.T
        if self.dead:
            scores[:, self.gone_at[: self.n] <= self.version] = -np.inf
        least = np.partition(scores, self.n - k, axis=1)[:, self.n - k] if self.n > k else np.full(len(unit), -np.inf)
        near = (scores >= least[:, None] - _ROUNDING) & (scores > -np.inf)
        scores[~near] = -np.inf
        for query, row, columns in zip(unit, scores, near, strict=True):
            chosen = np.flatnonzero(columns)
            row[chosen] = np.einsum("nd,d->n", vectors[chosen], query)
        return best(scores, self.ids, k)


class Rows:
    """Mutable block with one writer. ``serials`` are numbers that grow from row to row and never change: a row's address for removal."""

    def __init__(self, dim: int) -> None:
        self.ids: list[str] = []
        self.dead = 0
        self._vectors = np.empty((0, dim), np.float32)
        self._serials = np.empty(0, np.int64)
        self._gone_at = np.empty(0, np.int64)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def vectors(self) -> Vectors:
        """All rows, removed ones too."""
        return self._vectors[: len(self)]

    def append(self, ids: Sequence[str], vectors: Vectors, serials: Int[np.ndarray, " n"]) -> None:
        """Add live rows at the end."""
        old, new = len(self), len(self) + len(ids)
        if new > len(self._vectors):
            self._grow(max(new, 2 * old, _SMALLEST))
        self._vectors[old:new], self._serials[old:new], self._gone_at[old:new] = vectors, serials, _NEVER
        self.ids.extend(ids)  # last: a view's length never exceeds what is written

    def remove(self, serials: Int[np.ndarray, " m"], version: int) -> None:
        """Mark rows as removed for the views of ``version`` and later."""
        self._gone_at[np.searchsorted(self._serials[: len(self)], serials)] = version
        self.dead += len(serials)

    def crowded(self) -> bool:
        """Whether most rows are removed ones, so that `kept` pays: its cost is at most that of the removals since the last time."""
        return self.dead > max(_SMALLEST, len(self) // 2)

    def first_serial(self) -> int:
        """The smallest serial here; larger than any if there are no rows."""
        return int(self._serials[0]) if len(self) else _NEVER

    def last_serial(self) -> int:
        """The largest serial here; -1 if there are no rows."""
        return int(self._serials[len(self) - 1]) if len(self) else -1

    def view(self, version: int) -> View:
        """What is here now, as of ``version``."""
        return View(self.ids, self._vectors, self._gone_at, len(self), version, self.dead)

    def kept(self, view: View | None = None, *, start: int = 0) -> Rows:
        """A new block of the rows from ``start`` on that are live in ``view`` (default: now). What was removed since is not marked."""
        n = len(self) if view is None else view.n
        keep = self._gone_at[start:n] > (_NEVER - 1 if view is None else view.version)
        rows = start + np.flatnonzero(keep)
        made = Rows(self._vectors.shape[1])
        made.ids = list(itertools.compress(itertools.islice(self.ids, start, n), keep.tolist()))
        made._vectors = np.take(self._vectors, rows, axis=0)  # lets other threads run, unlike a mask
        made._serials, made._gone_at = self._serials[rows], np.full(len(rows), _NEVER)
        return made

    def joined(self, other: Rows) -> Rows:
        """A new block: these rows, then those of ``other``, whose serials are greater."""
        made = Rows(self._vectors.shape[1])
        made.ids = [*self.ids, *other.ids]
        made._vectors = np.concatenate([self.vectors, other.vectors])
        made._serials = np.concatenate([self._serials[: len(self)], other._serials[: len(other)]])
        made._gone_at = np.concatenate([self._gone_at[: len(self)], other._gone_at[: len(other)]])
        made.dead = self.dead + other.dead
        return made

    def _grow(self, capacity: int) -> None:
        """Larger buffers; views go on with the old ones, in which later removals (of no concern to them) are not marked."""
        n = len(self)
        vectors, serials, gone_at = self._vectors, self._serials, self._gone_at
        self._vectors = np.empty((capacity, vectors.shape[1]), np.float32)
        self._serials, self._gone_at = np.empty(capacity, np.int64), np.empty(capacity, np.int64)
        self._vectors[:n], self._serials[:n], self._gone_at[:n] = vectors[:n], serials[:n], gone_at[:n]
