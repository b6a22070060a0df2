"""A store file at one revision, to be read.

Owns: the view of tables and log as they were after so many changes. Promises: reads only; entries, their usage, episodes and operations all
belong to the same revision; what a compaction dropped is absent, not invented. Does not: change, search or judge anything.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from crl_jax.bank_tools.place import NotFound
from crl_jax.experience import store_rows as rows
from crl_jax.experience.bank import BankState
from crl_jax.experience.store import GuidedEpisode, Store, StoreDamaged
from crl_jax.experience.store_schema import ENTRY
from crl_jax.records import Experience, Generation, Usage

UNREAD = Usage()


class Kept(NamedTuple):
    """An entry, the revision that wrote it, and the one that removed it (None: it is live)."""

    entry: Experience
    created: int
    retired: int | None


class Operation(NamedTuple):
    """A row of the log: ``reason`` is empty, or what made the bank itself do it (``dedup``, ``evict``, ``import``, ...)."""

    revision: int
    kind: str
    reason: str
    namespace: str
    targets: tuple[str, ...]
    generation_id: str
    step: int
    problems: tuple[tuple[str, str], ...]


class Book:
    """The bank of ``store`` at ``revision`` (None: now). ``state`` and ``entries`` (of the newest revision): what the caller has read
    already. Raises NotFound for a revision the bank never was at, or no longer reaches."""

    def __init__(
        self,
        store: Store,
        *,
        revision: int | None = None,
        state: BankState | None = None,
        entries: Mapping[str, Kept] | None = None,
    ) -> None:
        self.store = store
        self.newest = store.revision
        self.revision = self.newest if revision is None else revision
        self.state = state if state is not None else _state(store, self.revision, self.newest)
        self.entries: Mapping[str, Kept] = _until(self.revision, read_entries(store) if entries is None else entries)

    @functools.cached_property
    def live(self) -> dict[str, Experience]:
        """The entries that are in the bank, in the order they were written."""
        return {i: kept.entry for i, kept in self.entries.items() if kept.retired is None}

    def find(self, entry_id: str) -> Kept:
        """An entry, live or retired. Raises NotFound, with ids that look like it."""
        if entry_id in self.entries:
            return self.entries[entry_id]
        import difflib

        begins = [i for i in self.entries if entry_id and i.startswith(entry_id)]
        near = begins[:2] or difflib.get_close_matches(entry_id, self.entries, n=1, cutoff=0.9)
        hint = f"did you mean {' or '.join(near)}?" if near else "`crl bank ls --retired` lists the ids"
        raise NotFound(f"no entry {entry_id!r} in {self.store.path} at revision {self.revision}: {hint}")

    def usage(self, entry_id: str) -> Usage:
        """Counters of a live entry; those of a retired one are counted again from its episodes."""
        if self.entries[entry_id].retired is None:
            return self.state.usage.get(entry_id, UNREAD)
        seen = self.tallies.get(entry_id)
        return Usage(*seen, seen[0], seen[1]) if seen else UNREAD

    @functools.cached_property
    def tallies(self) -> dict[str, tuple[int, int, int]]:
        """Of every entry that was read: episodes, successes, last step, counted from the episodes kept."""
        query = "SELECT experience_id, count(*), sum(success), max(step) FROM guided WHERE revision<=? GROUP BY experience_id"
        return {i: (n, won, step) for i, n, won, step in self._rows(query, self.revision) if i}

    @functools.cached_property
    def children(self) -> dict[str, list[str]]:
        """Ids of the entries that replaced each entry."""
        found: dict[str, list[str]] = {}
        for i, kept in self.entries.items():
            for parent in kept.entry.parents:
                found.setdefault(parent, []).append(i)
        return found

    @functools.cached_property
    @rows.decoding("a row of the log")
    def step(self) -> int:
        """The newest training step in the log."""
        return int(self._rows("SELECT coalesce(max(step), 0) FROM ops WHERE abandoned=0 AND revision<=?", self.revision)[0][0])

    @functools.cached_property
    def log(self) -> dict[int, Operation]:
        """The operation that led to each revision; those compacted away, and the counting of episodes, are not in it."""
        query = f"SELECT {_OPERATION} FROM ops WHERE abandoned=0 AND base_revision<revision AND revision<=? AND kind<>?"
        return {row[0]: _operation(row) for row in self._rows(query, self.revision, rows.OBSERVED)}

    @functools.cached_property
    @rows.decoding("a row of the log")
    def applied(self) -> dict[int, int]:
        """The training step in which each revision came about: of a merge that took long that in which it was written, not begun."""
        query = "SELECT revision, step FROM ops WHERE abandoned=0 AND base_revision<revision AND revision<=? ORDER BY seq"
        found: dict[int, int] = {}
        newest = 0
        for revision, step in self._rows(query, self.revision):
            found[revision] = newest = max(newest, step)
        return found

    def operations_on(self, entry_id: str) -> list[Operation]:
        """The operations that named an entry as a target, in order."""
        query = f"SELECT {_OPERATION} FROM ops WHERE abandoned=0 AND revision<=? AND targets LIKE ? ORDER BY seq"
        return [o for o in map(_operation, self._rows(query, self.revision, f'%"{entry_id}"%')) if entry_id in o.targets]

    def guided(self, entry_id: str) -> list[GuidedEpisode]:
        """The finished episodes that read an entry, in order; for an empty id those that read none."""
        return [seen for seen in self.store.guided(entry_id) if seen.revision <= self.revision]

    def generation(self, generation_id: str) -> Generation | None:
        """A generation; None if it is not stored, or damaged."""
        try:
            return self.store.generation(generation_id)
        except (KeyError, StoreDamaged):
            return None

    @functools.cached_property
    def generations(self) -> int:
        """Generations made so far, those of an abandoned future included."""
        if self.revision == self.newest:
            return self.store.generation_count()
        number = "coalesce(max(CAST(substr(generation_id, 2) AS INTEGER)), 0)"  # ids are given in order; answers have no row of the log
        query = f"SELECT count(*) FROM generations WHERE CAST(substr(id, 2) AS INTEGER) <= (SELECT {number} FROM ops WHERE revision<=?)"
        return int(self._rows(query, self.revision)[0][0])

    def outcomes(self) -> list[tuple[int, bool, int, int]]:
        """(step, whether an experience was read, episodes, successes), each episode counted once, by step."""
        query = (
            "SELECT step, read, count(*), sum(success) FROM (SELECT step, experience_id<>'' AS read, max(success) AS success FROM guided"
            " WHERE revision<=? GROUP BY step, experience_id<>'', CASE episode_id WHEN '' THEN rowid ELSE episode_id END)"
            " GROUP BY step, read ORDER BY step"
        )
        return [(step, bool(read), n, won) for step, read, n, won in self._rows(query, self.revision)]

    def embedders(self) -> list[tuple[str, int, int]]:
        """(fingerprint, dimension, vectors) of each embedder that made stored vectors, the most used first."""
        return self._rows("SELECT fingerprint, dim, count(*) FROM embeddings GROUP BY fingerprint, dim ORDER BY count(*) DESC")

    def vectors(self, wanted: Sequence[str] | None = None) -> tuple[list[str], Float[np.ndarray, "n d"]]:
        """Live entries (or the ``wanted`` ones) with a stored vector of the embedder that made most of them, and these as unit rows."""
        made = self.embedders()
        if not made:
            return [], np.zeros((0, 1), np.float32)
        fingerprint, dim, _ = made[0]
        wanted = list(self.live) if wanted is None else wanted
        found, _ = self.store.vectors(fingerprint=fingerprint, dim=dim, ids=wanted)
        ids = [i for i in wanted if i in found and np.isfinite(found[i]).all() and np.any(found[i])]
        if not ids:
            return [], np.zeros((0, dim), np.float32)
        matrix = np.stack([found[i] for i in ids])
        return ids, matrix / np.linalg.norm(matrix, axis=1, keepdims=True)

    def _rows(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        return self.store.read(lambda db: db.execute(query, values).fetchall())


_OPERATION = "revision, kind, reason, namespace, targets, generation_id, step, problems"


def read_entries(store: Store) -> dict[str, Kept]:
    """All entries a store holds, in the order they were written."""
    query = f"SELECT {ENTRY}, created_revision, retired_revision FROM entries ORDER BY id"
    found = store.read(lambda db: db.execute(query).fetchall())
    return {row[0]: Kept(rows.experience(row[:-2]), *row[-2:]) for row in found}


@rows.decoding("an entry's revisions")
def _until(revision: int, entries: Mapping[str, Kept]) -> dict[str, Kept]:
    """The entries as they were at a revision: later ones are not there, and what left later is live."""
    return {
        i: kept if kept.retired is None or kept.retired <= revision else kept._replace(retired=None)
        for i, kept in entries.items()
        if kept.created <= revision
    }


@rows.decoding("a row of the log")
def _operation(row: tuple[Any, ...]) -> Operation:
    revision, kind, reason, namespace, targets, generation, step, problems = row
    faults = tuple((str(code), str(detail)) for code, detail in json.loads(problems))
    return Operation(revision, kind, reason, namespace, tuple(json.loads(targets)), generation, step, faults)


def _state(store: Store, revision: int, newest: int) -> BankState:
    if revision == newest:
        return store.load()
    try:
        return store.at_revision(revision)
    except ValueError as error:
        raise NotFound(f"{store.path}: {error}; give --revision a number up to {newest}") from error
