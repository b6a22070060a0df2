"""The durable truth of the experience bank: one SQLite file with an append-only log and the state it adds up to.

Owns: the log of operations and observations, the materialised entries and usage, embeddings, and every extractor generation. Promises: a
batch of changes is one transaction, and when `Store.commit` returns it survives a killed process (WAL, ``synchronous=NORMAL``; with
``"full"`` also a power loss); replaying the log gives the materialised state; nothing in the file can run code when it is read (JSON and
raw little-endian arrays, never pickle); a damaged file is refused and a damaged vector is left out and counted, never matched with
another text. Does not: decide anything about entries (``bank``), search (``index``), or run in the event loop (the manager calls it from
its writer thread).
"""

from __future__ import annotations

import json
import pathlib
import sqlite3
import threading
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Float

from crl_jax.errors import UserError
from crl_jax.experience import bank
from crl_jax.experience.bank import Author, BankState
from crl_jax.records import BankOp, Experience, Generation, GenerationKind, OpKind, Usage

FORMAT = 1
_OBSERVED = "observed"  # the log kind of usage, beside the values of OpKind

_SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE ops (
  seq INTEGER PRIMARY KEY AUTOINCREMENT, base_revision INTEGER NOT NULL, revision INTEGER NOT NULL, kind TEXT NOT NULL,
  namespace TEXT NOT NULL, text TEXT NOT NULL, targets TEXT NOT NULL, op_index INTEGER NOT NULL, inherit_usage INTEGER NOT NULL,
  reason TEXT NOT NULL, generation_id TEXT NOT NULL, author_version INTEGER NOT NULL, step INTEGER NOT NULL,
  episode_ids TEXT NOT NULL, shown TEXT NOT NULL, problems TEXT NOT NULL, abandoned INTEGER NOT NULL DEFAULT 0);
CREATE TABLE entries (
  id TEXT PRIMARY KEY, namespace TEXT NOT NULL, text TEXT NOT NULL, generation_id TEXT NOT NULL, op_index INTEGER NOT NULL,
  author_version INTEGER NOT NULL, step INTEGER NOT NULL, episode_ids TEXT NOT NULL, parents TEXT NOT NULL,
  created_revision INTEGER NOT NULL, retired_revision INTEGER);
CREATE TABLE usage (id TEXT PRIMARY KEY, shown INTEGER NOT NULL, succeeded INTEGER NOT NULL, last_shown_step INTEGER NOT NULL);
CREATE TABLE embeddings (id TEXT PRIMARY KEY, fingerprint TEXT NOT NULL, dim INTEGER NOT NULL, vector BLOB NOT NULL, crc INTEGER NOT NULL);
CREATE TABLE generations (
  id TEXT PRIMARY KEY, kind TEXT NOT NULL, step INTEGER NOT NULL, parse_error TEXT NOT NULL,
  prompt_ids BLOB NOT NULL, response_ids BLOB NOT NULL, logps BLOB NOT NULL, versions BLOB NOT NULL,
  crc INTEGER NOT NULL);
CREATE TABLE buffer (id INTEGER PRIMARY KEY CHECK (id = 0), data TEXT NOT NULL);
"""


class StoreError(UserError, RuntimeError):
    """The file cannot be used as an experience store; the message says what to do."""


class Change(NamedTuple):
    """One operation to log, with what the pure core made of it. ``reason`` is empty, ``dedup`` or ``evict``."""

    base_revision: int
    op: BankOp
    namespace: str
    author: Author
    op_index: int
    applied: bank.Applied
    inherit_usage: bool = False
    reason: str = ""


class Observation(NamedTuple):
    """Usage to log: pairs (experience id, success) of finished episodes, and the state after counting them."""

    base_revision: int
    shown: tuple[tuple[str, bool], ...]
    step: int
    state: BankState


class Store:
    """Mutable handle on one store file. Thread-safe by a lock; one process writes a file at a time. Create with `open`."""

    def __init__(self, connection: sqlite3.Connection, path: str) -> None:
        self._db = connection
        self._path = path
        self._lock = threading.Lock()

    @staticmethod
    def open(path: str | pathlib.Path, *, synchronous: Literal["normal", "full"] = "normal", timeout_s: float = 10.0) -> Store:
        """Open or create the store at ``path`` (``":memory:"`` for one that vanishes). Raises StoreError for a damaged or foreign file."""
        try:
            db = sqlite3.connect(str(path), timeout=timeout_s, isolation_level=None, check_same_thread=False)
        except sqlite3.OperationalError as error:
            raise StoreError(f"{path} cannot be opened ({error}): does its folder exist, and may it be written?") from error
        try:
            db.execute("PRAGMA journal_mode=WAL")
            db.execute(f"PRAGMA synchronous={'FULL' if synchronous == 'full' else 'NORMAL'}")
            verdict = db.execute("PRAGMA quick_check(1)").fetchone()[0]
            if verdict != "ok":
                raise sqlite3.DatabaseError(verdict)
            tables = {row[0] for row in db.execute("SELECT name FROM sqlite_master WHERE type='table'")}
            if not tables:
                db.executescript(f"BEGIN;{_SCHEMA}INSERT INTO meta VALUES ('format','{FORMAT}'),('revision','0');COMMIT;")
            elif "meta" not in tables or "ops" not in tables:
                raise sqlite3.DatabaseError("it is a database of something else")
            found = db.execute("SELECT value FROM meta WHERE key='format'").fetchone()[0]
            if found != str(FORMAT):
                raise sqlite3.DatabaseError(f"it has format {found}, this version reads format {FORMAT}")
        except sqlite3.DatabaseError as error:
            db.close()
            raise StoreError(
                f"{path} is not a usable experience store ({error}): restore a backup, or move it away to start empty"
            ) from error
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
    ) -> int:
        """Write one batch in one transaction; returns the stored revision. When it returns, the batch is acknowledged.

        ``vectors`` holds the embeddings of the entries written by the batch, ``fingerprint`` the embedder that made them. Raises
        StoreError, and writes nothing, if the batch does not start at the stored revision or the disk refuses.
        """
        with self._lock, self._transaction() as db:
            revision = self._revision(db)
            for generation in generations:
                _insert_generation(db, generation)
            for change in changes:
                if change.base_revision != revision:
                    raise StoreError(
                        f"{self._path} is at revision {revision}, the change starts at {change.base_revision}: reload the state"
                    )
                if isinstance(change, Observation):
                    revision = change.state.revision
                    _log_observation(db, change)
                else:
                    revision = change.applied.state.revision
                    _log_change(db, change)
            for experience_id, vector in (vectors or {}).items():
                _insert_vector(db, experience_id, vector, fingerprint)
            db.execute("UPDATE meta SET value=? WHERE key='revision'", (str(revision),))
            return revision

    def put_vectors(self, vectors: Mapping[str, Float[np.ndarray, " d"]], *, fingerprint: str) -> None:
        """Replace embeddings of existing entries (another embedder, or damaged vectors)."""
        with self._lock, self._transaction() as db:
            for experience_id, vector in vectors.items():
                _insert_vector(db, experience_id, vector, fingerprint)

    def save_buffer(self, data: str) -> None:
        """Keep one JSON text beside the bank: the extractor's training buffer."""
        with self._lock, self._transaction() as db:
            db.execute("INSERT OR REPLACE INTO buffer VALUES (0, ?)", (data,))

    def rewind(self, revision: int) -> BankState:
        """Make ``revision`` the current state again and return it. Later log rows stay, marked abandoned; generations stay.

        Used on resume: a checkpoint names the revision it belongs to. Raises ValueError if the store never was at ``revision``.
        """
        with self._lock, self._transaction() as db:
            state = self._replay(db, revision)
            db.execute("UPDATE ops SET abandoned=1 WHERE base_revision>=? AND abandoned=0", (revision,))
            db.execute("DELETE FROM embeddings WHERE id IN (SELECT id FROM entries WHERE created_revision>?)", (revision,))
            db.execute("DELETE FROM entries WHERE created_revision>?", (revision,))
            db.execute("UPDATE entries SET retired_revision=NULL WHERE retired_revision>?", (revision,))
            db.execute("DELETE FROM usage")
            for experience_id, usage in state.usage.items():
                _upsert_usage(db, experience_id, usage)
            db.execute("UPDATE meta SET value=? WHERE key='revision'", (str(revision),))
            return state

    # ---------------------------------------------------------------------------------------------------------------- reading

    @property
    def revision(self) -> int:
        """The stored revision; 0 if nothing was ever written."""
        with self._lock:
            return self._revision(self._db)

    def load(self) -> BankState:
        """The materialised state."""
        with self._lock:
            spaces: dict[str, dict[str, Experience]] = {}
            query = f"SELECT {_ENTRY} FROM entries WHERE retired_revision IS NULL ORDER BY created_revision, op_index"
            for row in self._db.execute(query):
                entry = _experience(row)
                spaces.setdefault(entry.namespace, {})[entry.id] = entry
            usage = {row[0]: Usage(*row[1:]) for row in self._db.execute("SELECT id, shown, succeeded, last_shown_step FROM usage")}
            return BankState(spaces, usage, self._revision(self._db))

    def at_revision(self, revision: int) -> BankState:
        """The state after ``revision`` changes, replayed from the log. Raises ValueError if the store never was there."""
        with self._lock:
            return self._replay(self._db, revision)

    def experience(self, experience_id: str) -> Experience | None:
        """An entry, live or retired: credit finds the generation of an entry that was replaced while an episode still read it."""
        with self._lock:
            row = self._db.execute(f"SELECT {_ENTRY} FROM entries WHERE id=?", (experience_id,)).fetchone()
        return _experience(row) if row else None

    def generation(self, generation_id: str) -> Generation:
        """One extractor generation, whole. Raises KeyError for an unknown id, StoreError if its bytes are damaged."""
        query = "SELECT id, kind, step, parse_error, prompt_ids, response_ids, logps, versions, crc FROM generations WHERE id=?"
        with self._lock:
            row = self._db.execute(query, (generation_id,)).fetchone()
        if row is None:
            raise KeyError(f"no generation {generation_id!r} in {self._path}")
        if zlib.crc32(b"".join(row[4:8])) != row[8]:
            raise StoreError(f"generation {generation_id} in {self._path} is damaged: restore a backup; it must not be trained on")
        prompt, response, versions = (tuple(np.frombuffer(blob, "<i4").tolist()) for blob in (row[4], row[5], row[7]))
        logps = tuple(np.frombuffer(row[6], "<f4").tolist())
        return Generation(row[0], GenerationKind(row[1]), prompt, response, logps, versions, row[2], row[3])

    def newest_generation(self) -> int:
        """The largest number in the ids of stored generations (12 for ``g00000012``), 0 if there is none; smaller ones may be missing."""
        with self._lock:
            return int(self._db.execute("SELECT coalesce(max(CAST(substr(id, 2) AS INTEGER)), 0) FROM generations").fetchone()[0])

    def generation_count(self) -> int:
        """Generations ever stored, those of an abandoned future included."""
        with self._lock:
            return int(self._db.execute("SELECT count(*) FROM generations").fetchone()[0])

    def vectors(self, *, fingerprint: str, dim: int) -> tuple[dict[str, Float[np.ndarray, " d"]], int]:
        """Embeddings of the live entries made by this embedder, and how many were left out because their bytes are damaged."""
        found: dict[str, np.ndarray] = {}
        damaged = 0
        query = """SELECT e.id, e.vector, e.crc, e.dim FROM embeddings e JOIN entries n ON n.id=e.id
                   WHERE n.retired_revision IS NULL AND e.fingerprint=?"""
        with self._lock:
            for experience_id, blob, crc, stored_dim in self._db.execute(query, (fingerprint,)):
                whole = stored_dim == dim and len(blob) == 4 * dim and zlib.crc32(experience_id.encode() + blob) == crc
                if whole:
                    found[experience_id] = np.frombuffer(blob, "<f4").astype(np.float32)
                damaged += int(not whole)
        return found, damaged

    def load_buffer(self) -> str | None:
        """What `save_buffer` stored last; None if nothing was."""
        with self._lock:
            row = self._db.execute("SELECT data FROM buffer WHERE id=0").fetchone()
        return row[0] if row else None

    def log(self, *, abandoned: bool = False) -> list[dict[str, Any]]:
        """The log rows in order, as dictionaries of columns; those of abandoned futures only when asked."""
        with self._lock:
            cursor = self._db.execute("SELECT * FROM ops WHERE abandoned=0 OR ? ORDER BY seq", (abandoned,))
            names = [column[0] for column in cursor.description]
            return [dict(zip(names, row, strict=True)) for row in cursor]

    # ---------------------------------------------------------------------------------------------------------------- inside

    def _transaction(self) -> _Transaction:
        return _Transaction(self._db, self._path)

    def _revision(self, db: sqlite3.Connection) -> int:
        return int(db.execute("SELECT value FROM meta WHERE key='revision'").fetchone()[0])

    def _replay(self, db: sqlite3.Connection, revision: int) -> BankState:
        state = BankState()
        for row in _log_rows(db, revision):
            state = _replay_row(state, row)
        if state.revision != revision:
            raise ValueError(f"{self._path} never was at revision {revision}; its log reaches {self._revision(db)}")
        return state


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


# -------------------------------------------------------------------------------------------------------------------- rows

_ENTRY = "id, namespace, text, generation_id, op_index, author_version, step, episode_ids, parents"


def _experience(row: Sequence[Any]) -> Experience:
    return Experience(*row[:7], episode_ids=tuple(json.loads(row[7])), parents=tuple(json.loads(row[8])))


def _insert_generation(db: sqlite3.Connection, g: Generation) -> None:
    prompt, response, versions = (np.asarray(column, "<i4").tobytes() for column in (g.prompt_ids, g.response_ids, g.versions))
    blobs = (prompt, response, np.asarray(g.logps, "<f4").tobytes(), versions)
    row = (g.id, g.kind.value, g.step, g.parse_error, *blobs, zlib.crc32(b"".join(blobs)))
    db.execute("INSERT INTO generations VALUES (?,?,?,?,?,?,?,?,?)", row)


def _insert_vector(db: sqlite3.Connection, experience_id: str, vector: Float[np.ndarray, " d"], fingerprint: str) -> None:
    blob = np.asarray(vector, "<f4").tobytes()
    crc = zlib.crc32(experience_id.encode() + blob)  # over the id too: a vector that got under another id is damaged
    db.execute("INSERT OR REPLACE INTO embeddings VALUES (?,?,?,?,?)", (experience_id, fingerprint, len(vector), blob, crc))


def _upsert_usage(db: sqlite3.Connection, experience_id: str, usage: Usage) -> None:
    db.execute("INSERT OR REPLACE INTO usage VALUES (?,?,?,?)", (experience_id, usage.shown, usage.succeeded, usage.last_shown_step))


def _log_change(db: sqlite3.Connection, c: Change) -> None:
    state, written, retired, problems = c.applied
    row = (
        c.base_revision,
        state.revision,
        c.op.kind.value,
        c.namespace,
        c.op.text,
        json.dumps(c.op.targets),
        c.op_index,
        int(c.inherit_usage),
        c.reason,
    )
    author = (c.author.generation_id, c.author.version, c.author.step, json.dumps(c.author.episode_ids))
    _append(db, (*row, *author, "[]", json.dumps(problems)))
    for gone in retired:
        db.execute("UPDATE entries SET retired_revision=? WHERE id=?", (state.revision, gone))
        db.execute("DELETE FROM usage WHERE id=?", (gone,))
    if written is None:
        return
    w = written
    values = (w.id, w.namespace, w.text, w.generation_id, w.op_index, w.author_version, w.step)
    db.execute(
        "INSERT INTO entries VALUES (?,?,?,?,?,?,?,?,?,?,NULL)", (*values, json.dumps(w.episode_ids), json.dumps(w.parents), state.revision)
    )
    if w.id in state.usage:
        _upsert_usage(db, w.id, state.usage[w.id])


def _log_observation(db: sqlite3.Connection, o: Observation) -> None:
    _append(db, (o.base_revision, o.state.revision, _OBSERVED, "", "", "[]", 0, 0, "", "", 0, o.step, "[]", json.dumps(o.shown), "[]"))
    for experience_id in dict(o.shown):
        if experience_id in o.state.usage:
            _upsert_usage(db, experience_id, o.state.usage[experience_id])


_LOG = (
    "base_revision, revision, kind, namespace, text, targets, op_index, inherit_usage, reason, generation_id, author_version, step,"
    " episode_ids, shown, problems"
)


def _append(db: sqlite3.Connection, row: tuple[Any, ...]) -> None:
    db.execute(f"INSERT INTO ops ({_LOG}) VALUES ({','.join('?' * len(row))})", row)


def _log_rows(db: sqlite3.Connection, revision: int) -> Iterator[sqlite3.Row]:
    cursor = db.cursor()
    cursor.row_factory = sqlite3.Row
    yield from cursor.execute(f"SELECT {_LOG} FROM ops WHERE abandoned=0 AND revision<=? ORDER BY seq", (revision,))


def _replay_row(state: BankState, row: sqlite3.Row) -> BankState:
    if row["kind"] == _OBSERVED:
        return bank.observe(state, [(i, bool(success)) for i, success in json.loads(row["shown"])], step=row["step"])
    op = BankOp(OpKind(row["kind"]), row["text"], tuple(json.loads(row["targets"])))
    author = Author(row["generation_id"], row["author_version"], row["step"], tuple(json.loads(row["episode_ids"])))
    return bank.apply(
        state, op, namespace=row["namespace"], author=author, op_index=row["op_index"], inherit_usage=bool(row["inherit_usage"])
    ).state
