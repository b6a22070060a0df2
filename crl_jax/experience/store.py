"""The durable truth of the experience bank: one SQLite file with an append-only log and the state it adds up to.

Owns: the log of operations and observations, the materialised entries, usage and transfer counts, embeddings, every extractor generation,
answered requests, and episodes that wait for distillation. Promises: a batch of changes is one transaction, and when `Store.commit`
returns it survives a killed process (WAL, ``synchronous=NORMAL``; with ``"full"`` also a power loss); replaying the log gives the
materialised state; nothing in the file can run code when it is read (JSON and raw little-endian arrays, never pickle); a damaged file is
refused and a damaged vector is left out and counted, never matched with another text. Does not: decide anything about entries (``bank``),
search (``index``), mend a damaged file (``recover``), or run in the event loop (the manager calls it from its writer thread).
"""

from __future__ import annotations

import pathlib
import sqlite3
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Float

from crl_jax.errors import UserError
from crl_jax.experience import store_rows as rows
from crl_jax.experience.bank import BankState, Guided
from crl_jax.experience.store_connect import connect, copy_whole
from crl_jax.experience.store_rows import Change, Observation
from crl_jax.experience.store_schema import ENTRY, FORMAT, create, upgrade_1
from crl_jax.records import Experience, Generation

__all__ = ["Change", "GuidedEpisode", "Observation", "Store", "StoreDamaged", "StoreError"]


_REPAIR = "`crl bank repair` on its folder brings back the last good state; or restore a backup, or move it away to start empty"


class StoreError(UserError, RuntimeError):
    """The file cannot be used as an experience store; the message says what to do."""


class StoreDamaged(StoreError):
    """The file holds what nobody wrote: its disk lied, or it was cut or changed. ``recover`` brings back the last good state."""


def no_copy(path: str | pathlib.Path, target: pathlib.Path, why: Exception) -> StoreError:
    """The error for a copy that the disk refused."""
    return StoreError(f"no copy of {path} could be made at {target} ({why}): free its disk, or switch snapshots off")


class GuidedEpisode(NamedTuple):
    """A finished episode as the bank remembers it, with the training step and the revision at which it was counted."""

    guided: Guided
    step: int
    revision: int


class Store:
    """Mutable handle on one store file. Thread-safe by a lock; one process writes a file at a time. Create with `open`."""

    def __init__(self, connection: sqlite3.Connection, path: str) -> None:
        self._db = connection
        self._path = path
        self._lock = threading.Lock()

    @staticmethod
    def open(
        path: str | pathlib.Path,
        *,
        synchronous: Literal["normal", "full"] = "normal",
        timeout_s: float = 10.0,
        read_only: bool = False,
    ) -> Store:
        """Open or create the store at ``path`` (``":memory:"`` for one that vanishes). A file of an older format is brought up to this one.

        With ``read_only`` nothing is written, not even beside the file. Raises StoreDamaged for a damaged file, StoreError for a foreign or
        unusable one.
        """
        try:
            db = connect(path, timeout_s=timeout_s, read_only=read_only)
        except sqlite3.OperationalError as error:
            raise StoreError(f"{path} cannot be opened ({error}): does its folder exist, and may it be written?") from error
        except sqlite3.DatabaseError as error:
            raise StoreDamaged(f"{path} is not a usable experience store ({error}): {_REPAIR}") from error
        try:
            if not read_only:
                db.execute("PRAGMA journal_mode=WAL")
                db.execute(f"PRAGMA synchronous={'FULL' if synchronous == 'full' else 'NORMAL'}")
            verdict = db.execute("PRAGMA quick_check(1)").fetchone()[0]
            if verdict != "ok":
                raise sqlite3.DatabaseError(" ".join(verdict.split()))
            _prepare(db, str(path), read_only)
        except sqlite3.DatabaseError as error:
            db.close()
            operational = isinstance(error, sqlite3.OperationalError)
            fix = "may it be written, and is its disk full?" if operational else _REPAIR
            kind = StoreError if operational else StoreDamaged
            raise kind(f"{path} is not a usable experience store ({error}): {fix}") from error
        except StoreError:
            db.close()
            raise
        return Store(db, str(path))

    def close(self) -> None:
        """Close the file; no other method may be called afterwards."""
        with self._lock:
            self._db.close()

    # ---------------------------------------------------------------------------------------------------------------- writing

    def commit(
        self,
        changes: Sequence[Change | Observation],
        *,
        vectors: Mapping[str, Float[np.ndarray, " d"]] | None = None,
        fingerprint: str = "",
        generations: Sequence[Generation] = (),
        request: tuple[str, str] | None = None,
        distilled: Sequence[str] = (),
        also: Callable[[sqlite3.Connection], None] | None = None,
    ) -> int:
        """Write one batch in one transaction; returns the stored revision. When it returns, the batch is acknowledged.

        ``vectors`` holds the embeddings of the entries written by the batch, ``fingerprint`` the embedder that made them. ``request`` is an
        id and the answer to give when it is asked again, ``distilled`` are episodes of the inbox that are done with it, ``also`` writes
        further rows of the transaction. Raises StoreError, and writes nothing, if the batch does not start at the stored revision or the
        disk refuses.
        """
        with self._lock, self._transaction() as db:
            revision = _revision(db)
            for generation in generations:
                rows.insert_generation(db, generation)
            for change in changes:
                if change.base_revision != revision:
                    raise StoreError(
                        f"{self._path} is at revision {revision}, the change starts at {change.base_revision}: reload the state"
                    )
                if isinstance(change, Observation):
                    revision = change.state.revision
                    rows.log_observation(db, change)
                else:
                    revision = change.applied.state.revision
                    rows.log_change(db, change)
            for experience_id, vector in (vectors or {}).items():
                rows.insert_vector(db, experience_id, vector, fingerprint)
            if request is not None:
                db.execute("INSERT INTO requests (id, answer) VALUES (?,?)", request)
            db.executemany("DELETE FROM inbox WHERE id=?", [(episode_id,) for episode_id in distilled])
            if also is not None:
                also(db)
            db.execute("UPDATE meta SET value=? WHERE key='revision'", (str(revision),))
            return revision

    def put_vectors(self, vectors: Mapping[str, Float[np.ndarray, " d"]], *, fingerprint: str) -> None:
        """Replace embeddings of existing entries (another embedder, or damaged vectors)."""
        with self._lock, self._transaction() as db:
            for experience_id, vector in vectors.items():
                rows.insert_vector(db, experience_id, vector, fingerprint)

    def save_buffer(self, data: str) -> None:
        """Keep one JSON text beside the bank: the extractor's training buffer."""
        with self._lock, self._transaction() as db:
            db.execute("INSERT OR REPLACE INTO buffer VALUES (0, ?)", (data,))

    def put_inbox(self, items: Mapping[str, str]) -> None:
        """Keep episodes (id -> text) until a commit names them ``distilled``; an id that is there already is not put twice."""
        with self._lock, self._transaction() as db:
            db.executemany("INSERT OR IGNORE INTO inbox (id, data) VALUES (?,?)", items.items())

    def drop_inbox(self, episode_ids: Sequence[str]) -> None:
        """Forget episodes that will not be distilled."""
        with self._lock, self._transaction() as db:
            db.executemany("DELETE FROM inbox WHERE id=?", [(i,) for i in episode_ids])

    def forget_requests(self, keep: int) -> None:
        """Forget all but the newest ``keep`` answered requests."""
        with self._lock, self._transaction() as db:
            db.execute("DELETE FROM requests WHERE number <= (SELECT coalesce(max(number), 0) FROM requests) - ?", (keep,))

    def rewind(self, revision: int, *, log_row: int = 0, also: Callable[[sqlite3.Connection], None] | None = None) -> BankState:
        """Make ``revision`` the current state again and return it. Later log rows stay, marked abandoned; generations stay (``also`` may
        mark them). ``log_row`` was the newest row then: of the rows that changed nothing since, it tells which came before.

        Used on resume: a checkpoint names the revision it belongs to. Raises ValueError if the store never was at ``revision``, or was
        compacted beyond it.
        """
        with self._lock, self._transaction() as db:
            state = rows.replay(db, revision)
            later = "base_revision>:at OR (base_revision=:at AND (revision>:at OR seq>:row))"
            db.execute(f"UPDATE ops SET abandoned=1 WHERE abandoned=0 AND ({later})", {"at": revision, "row": log_row})
            db.execute("DELETE FROM embeddings WHERE id IN (SELECT id FROM entries WHERE created_revision>?)", (revision,))
            db.execute("DELETE FROM entries WHERE created_revision>?", (revision,))
            db.execute("UPDATE entries SET retired_revision=NULL WHERE retired_revision>?", (revision,))
            db.execute("DELETE FROM guided WHERE revision>?", (revision,))
            db.execute("DELETE FROM requests")  # their effects may be among what is undone
            rows.set_sums(db, state)
            db.execute("UPDATE meta SET value=? WHERE key='revision'", (str(revision),))
            if also is not None:
                also(db)
            return state

    def begin_run(self) -> None:
        """A run begins, or goes on, on this store: what is there the first time (lessons it was seeded with) is not of its making."""
        with self._lock, self._transaction() as db:
            began = {"run_began": _revision(db), "run_began_generation": rows.newest_generation(db), "run_began_row": rows.newest_row(db)}
            db.executemany("INSERT OR IGNORE INTO meta VALUES (?,?)", [(name, str(n)) for name, n in began.items()])

    def run_began(self) -> tuple[int, int, int]:
        """The revision at which the run of this store began, and the numbers of its newest generation and log row then; 0 if none said
        so."""
        found = dict(self.read(lambda db: db.execute("SELECT key, value FROM meta WHERE key LIKE 'run_began%'").fetchall()))
        revision, generation, row = (int(found.get(f"run_began{what}", 0)) for what in ("", "_generation", "_row"))
        return revision, generation, row

    def backup(self, target: pathlib.Path) -> None:
        """A whole copy at ``target``, which appears only when it is complete. Raises StoreError if the disk refuses."""
        try:
            with self._lock:
                copy_whole(self._db, target)
        except (OSError, sqlite3.Error) as error:
            raise no_copy(self._path, target, error) from error

    # ---------------------------------------------------------------------------------------------------------------- reading

    @property
    def path(self) -> str:
        """The file, or ``:memory:``."""
        return self._path

    @property
    def revision(self) -> int:
        """The stored revision; 0 if nothing was ever written."""
        return self.read(_revision)

    def read(self, query: Callable[[sqlite3.Connection], Any]) -> Any:
        """The result of a function that only reads; nothing is written meanwhile."""
        with self._lock:
            return query(self._db)

    def load(self) -> BankState:
        """The materialised state. Raises StoreDamaged if a live entry is not as it was written."""
        with self._lock:
            state, damaged = rows.load_state(self._db, _revision(self._db))
        if damaged:
            raise StoreDamaged(f"entries {damaged[:3]} of {self._path} are damaged: `crl bank repair` brings back the last good state")
        return state

    def at_revision(self, revision: int) -> BankState:
        """The state after ``revision`` changes, replayed from the log. Raises ValueError if the store never was there."""
        with self._lock:
            return rows.replay(self._db, revision)

    def experience(self, experience_id: str) -> Experience | None:
        """An entry, live or retired: credit finds the generation of an entry that was replaced while an episode still read it."""
        with self._lock:
            row = self._db.execute(f"SELECT {ENTRY} FROM entries WHERE id=?", (experience_id,)).fetchone()
        return rows.experience(row) if row else None

    def written_by(self, generation_id: str) -> list[str]:
        """Ids of all entries one generation wrote, live or retired, in order."""
        with self._lock:
            return [i for (i,) in self._db.execute("SELECT id FROM entries WHERE generation_id=? ORDER BY id", (generation_id,))]

    def guided(self, experience_id: str) -> list[GuidedEpisode]:
        """The finished episodes that read an entry, in order; those that read none for an empty id."""
        query = "SELECT experience_id, success, episode_id, reader, reward, step, revision FROM guided WHERE experience_id=? ORDER BY rowid"
        with self._lock:
            found = self._db.execute(query, (experience_id,)).fetchall()
        return [GuidedEpisode(Guided(i, bool(s), e, reader, r), step, rev) for i, s, e, reader, r, step, rev in found]

    def generation(self, generation_id: str) -> Generation:
        """One extractor generation, whole. Raises KeyError for an unknown id, StoreError if its bytes are damaged."""
        query = "SELECT id, kind, step, parse_error, prompt_ids, response_ids, logps, versions, crc FROM generations WHERE id=?"
        with self._lock:
            row = self._db.execute(query, (generation_id,)).fetchone()
        if row is None:
            raise KeyError(f"no generation {generation_id!r} in {self._path}")
        found = rows.generation(row)
        if found is None:
            raise StoreDamaged(f"generation {generation_id} in {self._path} is damaged: restore a backup; it must not be trained on")
        return found

    def newest_generation(self) -> int:
        """The largest number in the ids of stored generations (12 for ``g00000012``), 0 if there is none; smaller ones may be missing."""
        return self.read(rows.newest_generation)

    def generation_count(self) -> int:
        """Generations stored, those of an abandoned future included."""
        return self.read(lambda db: int(db.execute("SELECT count(*) FROM generations").fetchone()[0]))

    def vectors(self, *, fingerprint: str, dim: int, ids: Sequence[str] | None = None) -> tuple[dict[str, Float[np.ndarray, " d"]], int]:
        """Embeddings made by this embedder, of the live entries or of ``ids``, and how many were left out because their bytes are
        damaged."""
        query = "SELECT e.id, e.vector, e.crc, e.dim FROM embeddings e"
        live = f"{query} JOIN entries n ON n.id=e.id WHERE n.retired_revision IS NULL AND e.fingerprint=?"
        found: dict[str, Float[np.ndarray, " d"] | None] = {}
        with self._lock:
            for part in [None] if ids is None else [ids[n : n + 500] for n in range(0, len(ids), 500)]:
                named = live if part is None else f"{query} WHERE e.fingerprint=? AND e.id IN ({','.join('?' * len(part))})"
                for i, blob, crc, stored_dim in self._db.execute(named, (fingerprint, *(part or ()))):
                    found[i] = rows.vector(i, blob, crc, stored_dim, dim)
        whole = {i: vector for i, vector in found.items() if vector is not None}
        return whole, len(found) - len(whole)

    def answered(self, request_id: str) -> str | None:
        """What a request with this id was answered; None if it was not."""
        row = self.read(lambda db: db.execute("SELECT answer FROM requests WHERE id=?", (request_id,)).fetchone())
        return row[0] if row else None

    def inbox(self) -> dict[str, str]:
        """Episodes that wait for distillation, in the order they came."""
        return self.read(lambda db: dict(db.execute("SELECT id, data FROM inbox ORDER BY number")))

    def load_buffer(self) -> str | None:
        """What `save_buffer` stored last; None if nothing was."""
        row = self.read(lambda db: db.execute("SELECT data FROM buffer WHERE id=0").fetchone())
        return row[0] if row else None

    def log(self, *, abandoned: bool = False) -> list[dict[str, Any]]:
        """The log rows in order, as dictionaries of columns; those of abandoned futures only when asked."""
        with self._lock:
            cursor = self._db.execute("SELECT * FROM ops WHERE abandoned=0 OR ? ORDER BY seq", (abandoned,))
            names = [column[0] for column in cursor.description]
            return [dict(zip(names, row, strict=True)) for row in cursor]

    def transaction(self, work: Callable[[sqlite3.Connection], Any]) -> Any:
        """The result of a function that writes, in one transaction of its own (compaction)."""
        with self._lock, self._transaction() as db:
            return work(db)

    def _transaction(self) -> _Transaction:
        return _Transaction(self._db, self._path)


@rows.decoding("its revision")
def _revision(db: sqlite3.Connection) -> int:
    return int(db.execute("SELECT value FROM meta WHERE key='revision'").fetchone()[0])


def _prepare(db: sqlite3.Connection, path: str, read_only: bool) -> None:
    """Make the tables of an empty file, bring an older format up to this one. Raises StoreError for a file of something else."""
    tables = {row[0] for row in db.execute("SELECT name FROM sqlite_master WHERE type='table'")}
    if tables and not {"meta", "ops"} <= tables:
        raise StoreError(f"{path} is a database of something else, not an experience store: give another path")
    with rows.decoding("its format"):
        found = str(db.execute("SELECT value FROM meta WHERE key='format'").fetchone()[0]) if tables else ""
    if found == str(FORMAT):
        return
    if found not in ("", "1"):
        raise StoreError(f"{path} has format {found}, this version reads format {FORMAT}: use the version of crl_jax that wrote it")
    if read_only:
        raise StoreError(f"{path} {f'has format {found}' if found else 'is empty'}: open it once for writing first, or give another path")
    with _Transaction(db, path):
        if not tables:
            create(db)
        else:
            upgrade_1(db)
            rows.rechain(db)
            rows.set_sums(db, rows.replay(db, _revision(db)))


class _Transaction:
    """BEGIN IMMEDIATE ... COMMIT, rolled back when the block or the commit raises. StoreError when the disk refuses or another process has
    written the same rows."""

    def __init__(self, db: sqlite3.Connection, path: str) -> None:
        self._db = db
        self._path = path

    def __enter__(self) -> sqlite3.Connection:
        try:
            self._db.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError as error:
            raise self._refused(error) from error
        return self._db

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if error is None:
                self._db.execute("COMMIT")
        except sqlite3.OperationalError as late:
            error = late
        if error is not None and self._db.in_transaction:  # SQLite ends the transaction itself when the disk is full
            self._db.execute("ROLLBACK")
        if isinstance(error, sqlite3.OperationalError | sqlite3.IntegrityError):
            raise self._refused(error) from error

    def _refused(self, error: sqlite3.Error) -> StoreError:
        return StoreError(f"{self._path} was not written ({error}): free its disk or end the other process that writes it, then resume")
