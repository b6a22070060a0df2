"""Nearest experiences by cosine similarity: the `Index` protocol, an exact one, and the segment both rest on.

Owns: ids and unit vectors per namespace. Promises: scores are cosine similarities in [-1, 1], higher is more similar, in descending
order; ``k`` larger than the namespace returns all of it; an empty namespace returns nothing for any number of queries; a search takes no
lock and sees one consistent snapshot while writers go on; input is checked before anything changes. Does not: persist (the store does; an
index can be rebuilt).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from jaxtyping import Float

from crl_jax.experience.retrieve import Candidate

Vectors = Float[np.ndarray, "n d"]


class Index(Protocol):
    """What the manager needs of an index. One writer at a time; any number of concurrent searches."""

    def add(self, ids: Sequence[str], vectors: Vectors, *, namespace: str) -> None:
        """Add new ids. Raises ValueError for a wrong shape, a vector that is not finite or has no length, or an id that is or ever was
        there."""
        ...

    def remove(self, ids: Sequence[str]) -> None:
        """Remove ids, whatever their namespace. Raises KeyError, and removes none, if one is unknown."""
        ...

    def search(self, queries: Vectors, k: int, *, namespace: str) -> list[list[Candidate]]:
        """Per query the ``k`` most similar entries. A query without length matches nothing. Raises ValueError for non-finite queries or k
        < 1."""
        ...

    def size(self, namespace: str) -> int: ...

    def close(self) -> None:
        """Wait for background work, within a deadline."""
        ...


def unit_rows(vectors: Vectors, *, dim: int) -> Vectors:
    """Rows scaled to length 1, float32. Raises ValueError for a wrong shape, non-finite values or a zero row."""
    rows = np.asarray(vectors, np.float32)
    if rows.ndim != 2 or rows.shape[1] != dim:
        raise ValueError(f"vectors have shape {rows.shape}, the index holds [n, {dim}]: was another embedding model used?")
    if not np.isfinite(rows).all():
        raise ValueError("a vector is not finite: check the embedder's output")
    if not all(has_direction(row) for row in rows):
        raise ValueError("a vector has length 0 and no direction to compare (or its length overflows): is its text empty?")
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def has_direction(vector: Float[np.ndarray, " d"]) -> bool:
    """Whether a cosine with this vector is defined: it is finite and so is its length, which is not 0."""
    with np.errstate(over="ignore"):
        return 0 < float(np.linalg.norm(np.asarray(vector, np.float32))) < np.inf


def top_k(scores: Float[np.ndarray, "q n"], ids: Sequence[str], k: int) -> list[list[Candidate]]:
    """The k best columns per row, best first; equal scores keep column order (oldest entry first)."""
    order: list[list[int]] = np.argsort(-scores, axis=1, kind="stable")[:, :k].tolist()
    clipped: list[list[float]] = np.clip(scores, -1.0, 1.0).tolist()
    return [[Candidate(ids[j], row[j]) for j in picks] for row, picks in zip(clipped, order, strict=True)]


def usable(queries: Vectors, *, dim: int, k: int) -> tuple[Vectors, list[int]]:
    """Unit rows of the queries that have a direction, and their positions."""
    if k < 1:
        raise ValueError(f"k={k}: ask for at least one neighbour")
    rows = np.asarray(queries, np.float32)
    if rows.ndim != 2 or rows.shape[1] != dim or not np.isfinite(rows).all():
        raise ValueError(f"queries of shape {rows.shape} must be finite and [q, {dim}]")
    kept = [i for i in range(len(rows)) if has_direction(rows[i])]
    return (unit_rows(rows[kept], dim=dim) if kept else rows[:0]), kept


class _Rows(NamedTuple):
    """One namespace: replaced as a whole, never changed, so a search can hold on to it."""

    ids: tuple[str, ...]
    vectors: Vectors


class ExactIndex:
    """Brute force in NumPy: the reference, and enough for a few thousand entries."""

    def __init__(self, dim: int) -> None:
        self._dim = dim
        self._spaces: dict[str, _Rows] = {}
        self._home: dict[str, str] = {}  # id -> namespace
        self._gone: set[str] = set()
        self._write = threading.Lock()

    def add(self, ids: Sequence[str], vectors: Vectors, *, namespace: str) -> None:
        rows = unit_rows(vectors, dim=self._dim)
        with self._write:
            check_new(ids, len(rows), self._home, self._gone)
            old = self._spaces.get(namespace, _Rows((), np.zeros((0, self._dim), np.float32)))
            self._spaces[namespace] = _Rows((*old.ids, *ids), np.concatenate([old.vectors, rows]))
            self._home.update(dict.fromkeys(ids, namespace))

    def remove(self, ids: Sequence[str]) -> None:
        gone = set(ids)
        with self._write:
            check_known(gone, self._home)
            for namespace in {self._home[i] for i in gone}:
                old = self._spaces[namespace]
                keep = [n for n, i in enumerate(old.ids) if i not in gone]
                self._spaces[namespace] = _Rows(tuple(old.ids[n] for n in keep), old.vectors[keep])
            for i in gone:
                del self._home[i]
            self._gone |= gone

    def search(self, queries: Vectors, k: int, *, namespace: str) -> list[list[Candidate]]:
        unit, kept = usable(queries, dim=self._dim, k=k)
        found: list[list[Candidate]] = [[] for _ in range(len(queries))]
        rows = self._spaces.get(namespace)
        if rows is not None and rows.ids and kept:
            for i, hits in zip(kept, top_k(unit @ rows.vectors.T, rows.ids, k), strict=True):
                found[i] = hits
        return found

    def size(self, namespace: str) -> int:
        rows = self._spaces.get(namespace)
        return len(rows.ids) if rows else 0

    def close(self) -> None:
        """Nothing runs in the background."""


def check_new(ids: Sequence[str], n_rows: int, known: dict[str, str], gone: set[str]) -> None:
    """Raises ValueError unless there is one distinct id per row that is neither in the index nor was removed from it."""
    if len(ids) != n_rows or len(set(ids)) != len(ids):
        raise ValueError(f"{len(ids)} ids ({len(set(ids))} distinct) for {n_rows} vectors: one distinct id per vector")
    again = [i for i in ids if i in known or i in gone]
    if again:
        raise ValueError(f"ids {again[:3]} are or were in the index: entries are replaced by new ids, never overwritten or revived")


def check_known(ids: set[str], known: dict[str, str]) -> None:
    """Raises KeyError if one id is not in the index."""
    missing = sorted(i for i in ids if i not in known)
    if missing:
        raise KeyError(f"ids {missing[:3]} are not in the index")
