"""Nearest experiences by cosine similarity: the `Index` protocol and an exact one.

Owns: ids and unit vectors per namespace. Promises: scores are cosine similarities in [-1, 1], higher is more similar, in descending
order; ``k`` larger than the namespace returns all of it; an empty namespace returns nothing for any number of queries; a search takes no
lock and sees one consistent snapshot while writers go on; input is checked before anything changes; a write costs what it adds or removes,
not what is there. Does not: persist (the store does; an index can be rebuilt).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from crl_jax.experience.index_rows import Rows, Vectors, View, has_direction, unit_rows, usable
from crl_jax.experience.retrieve import Candidate

__all__ = ["ExactIndex", "Index", "Ledger", "Vectors", "has_direction", "unit_rows", "usable"]


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
        """Per query the ``k`` most similar entries. A query without a direction matches nothing. Raises ValueError for a wrong shape or k
        < 1."""
        ...

    def size(self, namespace: str) -> int: ...

    def stats(self) -> dict[str, float]:
        """Gauges for metrics: ``recall`` (of 8, against exact search; the lowest of any namespace), ``builds`` (finished),
        ``rebuilds_for_recall``, and over all namespaces ``entries``, ``tail`` (entries searched exactly) and ``dead`` (removed, not yet
        dropped)."""
        ...

    def close(self) -> None:
        """Wait for background work, within a deadline."""
        ...


class Ledger:
    """Mutable: which ids there are, where, and which there ever were."""

    def __init__(self) -> None:
        self._home: dict[str, str] = {}  # id -> namespace
        self._serial: dict[str, int] = {}
        self._gone: set[str] = set()  # they never come back: a searcher, or a build under way, may still hold their old vectors
        self._next = 0

    def enter(self, ids: Sequence[str], n_rows: int, namespace: str) -> list[int]:
        """Serials for new ids. Raises ValueError, and enters none, unless there is one distinct id per row that never was here."""
        if len(ids) != n_rows or len(set(ids)) != len(ids):
            raise ValueError(f"{len(ids)} ids ({len(set(ids))} distinct) for {n_rows} vectors: one distinct id per vector")
        again = [i for i in ids if i in self._home or i in self._gone]
        if again:
            raise ValueError(f"ids {again[:3]} are or were in the index: entries are replaced by new ids, never overwritten or revived")
        serials = list(range(self._next, self._next + n_rows))
        self._next += n_rows
        self._home.update(dict.fromkeys(ids, namespace))
        self._serial.update(zip(ids, serials, strict=True))
        return serials

    def leave(self, ids: Sequence[str]) -> dict[str, list[int]]:
        """The serials of these ids by namespace, each in rising order. Raises KeyError, and removes none, if one is not here."""
        gone = dict.fromkeys(ids)
        missing = sorted(i for i in gone if i not in self._home)
        if missing:
            raise KeyError(f"ids {missing[:3]} are not in the index")
        found: dict[str, list[int]] = {}
        for i in gone:
            found.setdefault(self._home.pop(i), []).append(self._serial.pop(i))
        self._gone.update(gone)
        return {namespace: sorted(serials) for namespace, serials in found.items()}


class ExactIndex:
    """Brute force in NumPy: the reference, and enough for a few thousand entries."""

    def __init__(self, dim: int) -> None:
        self._dim = dim
        self._rows: dict[str, Rows] = {}
        self._views: dict[str, View] = {}
        self._ledger = Ledger()
        self._version = 0
        self._write = threading.Lock()

    def add(self, ids: Sequence[str], vectors: Vectors, *, namespace: str) -> None:
        new = unit_rows(vectors, dim=self._dim)
        with self._write:
            serials = self._ledger.enter(ids, len(new), namespace)
            rows = self._rows.setdefault(namespace, Rows(self._dim))
            rows.append(ids, new, np.asarray(serials, np.int64))
            self._views[namespace] = rows.view(self._version)

    def remove(self, ids: Sequence[str]) -> None:
        with self._write:
            gone = self._ledger.leave(ids)
            self._version += 1
            for namespace, serials in gone.items():
                rows = self._rows[namespace]
                rows.remove(np.asarray(serials, np.int64), self._version)
                if rows.crowded():
                    rows = self._rows[namespace] = rows.kept()
                self._views[namespace] = rows.view(self._version)

    def search(self, queries: Vectors, k: int, *, namespace: str) -> list[list[Candidate]]:
        unit, kept = usable(queries, dim=self._dim, k=k)
        found: list[list[Candidate]] = [[] for _ in range(len(queries))]
        view = self._views.get(namespace)
        if view is not None and kept:
            for i, hits in zip(kept, view.search(unit, k), strict=True):
                found[i] = hits
        return found

    def size(self, namespace: str) -> int:
        view = self._views.get(namespace)
        return view.live if view else 0

    def stats(self) -> dict[str, float]:
        """As `Index.stats`; everything is searched exactly."""
        views = list(self._views.values())
        live, dead = sum(view.live for view in views), sum(view.dead for view in views)
        return {"recall": 1.0, "builds": 0, "rebuilds_for_recall": 0, "tail": live, "dead": dead, "entries": live}

    def close(self) -> None:
        """Nothing runs in the background."""
