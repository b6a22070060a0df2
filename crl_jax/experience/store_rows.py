"""Rows of a store file: what a change looks like in the log and in the tables that add it up, and how rows become records again.

Owns: columns, their encodings, their checksums. Promises: every row of the log has a checksum that goes on from the row before it, so a
row that was changed, lost or put in is noticed; floats and ids come back to the last bit. Does not: open transactions.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
import zlib
from collections.abc import Generator, Iterator, Sequence
from typing import Any, NamedTuple

import immutables
import numpy as np
from jaxtyping import Float

from crl_jax.experience import bank, bank_json
from crl_jax.experience.bank import Author, BankState, Guided, Tally
from crl_jax.experience.space import Space
from crl_jax.experience.store_schema import ENTRY, LOG
from crl_jax.records import BankOp, Experience, Generation, GenerationKind, OpKind, Usage

OBSERVED = "observed"  # the log kind of usage, beside the values of OpKind
MALFORMED = (TypeError, ValueError, LookupError, AttributeError, OverflowError, RecursionError)
"""What a value raises that nobody wrote, when it is read as what should be there."""


class Change(NamedTuple):
    """One operation to log, with what the pure core made of it. ``reason`` is empty, ``dedup``, ``evict`` or ``import``."""

    base_revision: int
    op: BankOp
    namespace: str
    author: Author
    op_index: int
    applied: bank.Applied
    inherit_usage: bool = False
    reason: str = ""
    decay: float = 1.0


class Observation(NamedTuple):
    """Usage to log: finished episodes with what they had read, and the state after counting them."""

    base_revision: int
    shown: tuple[Guided, ...]
    step: int
    state: BankState
    decay: float = 1.0


def checksum(values: Sequence[Any], before: int = 0) -> int:
    """CRC-32 of a row of texts and numbers, going on from that of another."""
    return zlib.crc32(json.dumps(values).encode(), before)


@contextlib.contextmanager
def decoding(what: str) -> Generator[None, None, None]:
    """Around the reading of ``what`` (also a decorator). Raises sqlite3.DatabaseError, as for a damaged page, where a value is no such
    thing: whoever reads a file has one kind of damage to expect."""
    try:
        yield
    except MALFORMED as error:
        raise sqlite3.DatabaseError(f"{what} cannot be read as it was written: {type(error).__name__}: {error}") from error


# -------------------------------------------------------------------------------------------------------------------- writing


def log_change(db: sqlite3.Connection, c: Change) -> None:
    """The log row of an operation, and its effect on the entries."""
    state, written, retired, problems = c.applied
    a = c.author
    what = (c.op.kind.value, c.namespace, c.op.text, json.dumps(c.op.targets), c.op_index, int(c.inherit_usage), c.reason)
    who = (a.generation_id, a.version, a.step, json.dumps(a.episode_ids))
    outcome = None if a.outcome is None else int(a.outcome)
    append(db, (c.base_revision, state.revision, *what, *who, "[]", json.dumps(problems), outcome, float(c.decay)))
    for gone in retired:
        db.execute("UPDATE entries SET retired_revision=? WHERE id=?", (state.revision, gone))
        db.execute("DELETE FROM usage WHERE id=?", (gone,))
    if written is not None:
        insert_entry(db, written, state.revision)
    voted = c.op.targets if c.op.kind in (OpKind.UPVOTE, OpKind.DOWNVOTE) else ()
    for i in (*voted, *((written.id,) if written is not None else ())):
        if i in state.usage:
            _upsert_usage(db, i, state.usage[i])


def log_observation(db: sqlite3.Connection, o: Observation) -> None:
    """The log row of finished episodes, and its effect on usage and transfer."""
    row = (o.base_revision, o.state.revision, OBSERVED, "", "", "[]", 0, 0, "", "", 0, o.step, "[]", json.dumps(o.shown), "[]", None)
    append(db, (*row, float(o.decay)))
    for i in {item.experience_id for item in o.shown}:
        if i in o.state.usage:
            _upsert_usage(db, i, o.state.usage[i])
    for reader in {item.reader for item in o.shown}:
        _upsert_transfer(db, {pair: tally for pair, tally in o.state.transfer.items() if pair[0] == reader})
    _insert_guided(db, o.shown, o.step, o.state.revision)


def append(db: sqlite3.Connection, row: tuple[Any, ...]) -> None:
    """One row of the log, with its checksum."""
    with decoding("the log's last checksum"):
        before = int(db.execute("SELECT value FROM meta WHERE key='chain'").fetchone()[0])
    chain = checksum(row, before)
    db.execute(f"INSERT INTO ops ({LOG}, crc) VALUES ({','.join('?' * (len(row) + 1))})", (*row, chain))
    db.execute("UPDATE meta SET value=? WHERE key='chain'", (str(chain),))


def insert_entry(db: sqlite3.Connection, entry: Experience, created: int, retired: int | None = None) -> None:
    """One entry, live unless it was ``retired`` at a revision."""
    lists = (json.dumps(entry.episode_ids), json.dumps(entry.parents))
    outcome = None if entry.outcome is None else int(entry.outcome)
    head = (entry.id, entry.namespace, entry.text, entry.generation_id, entry.op_index, entry.author_version, entry.step, *lists, outcome)
    db.execute(f"INSERT INTO entries VALUES ({','.join('?' * 13)})", (*head, created, retired, checksum([*head, created])))


def insert_generation(db: sqlite3.Connection, g: Generation) -> None:
    """One generation, whole. Raises sqlite3.IntegrityError if its id is there."""
    prompt, response, versions = (np.asarray(column, "<i4").tobytes() for column in (g.prompt_ids, g.response_ids, g.versions))
    blobs = (prompt, response, np.asarray(g.logps, "<f4").tobytes(), versions)
    row = (g.id, g.kind.value, g.step, g.parse_error, *blobs, zlib.crc32(b"".join(blobs)))
    db.execute("INSERT INTO generations VALUES (?,?,?,?,?,?,?,?,?)", row)


def insert_vector(db: sqlite3.Connection, experience_id: str, vector: Float[np.ndarray, " d"], fingerprint: str) -> None:
    """The embedding of one entry, in place of an older one."""
    blob = np.asarray(vector, "<f4").tobytes()
    crc = zlib.crc32(experience_id.encode() + blob)  # over the id too: a vector that got under another id is damaged
    db.execute("INSERT OR REPLACE INTO embeddings VALUES (?,?,?,?,?)", (experience_id, fingerprint, len(vector), blob, crc))


def _upsert_usage(db: sqlite3.Connection, i: str, u: Usage) -> None:
    row = (i, u.shown, u.succeeded, u.last_shown_step, u.recent_shown, u.recent_succeeded, u.votes)
    db.execute("INSERT OR REPLACE INTO usage VALUES (?,?,?,?,?,?,?)", row)


def _upsert_transfer(db: sqlite3.Connection, transfer: dict[tuple[str, str], Tally]) -> None:
    db.executemany("INSERT OR REPLACE INTO transfer VALUES (?,?,?,?)", [(*pair, *tally) for pair, tally in transfer.items()])


def _insert_guided(db: sqlite3.Connection, shown: Sequence[Guided], step: int, revision: int) -> None:
    rows = [(g.experience_id, int(g.success), g.episode_id, g.reader, float(g.reward), step, revision) for g in shown]
    db.executemany("INSERT INTO guided VALUES (?,?,?,?,?,?,?)", rows)


def set_sums(db: sqlite3.Connection, state: BankState) -> None:
    """Usage and transfer as ``state`` has them, in place of what was there."""
    db.execute("DELETE FROM usage")
    db.execute("DELETE FROM transfer")
    for i, usage in state.usage.items():
        _upsert_usage(db, i, usage)
    _upsert_transfer(db, dict(state.transfer))


# -------------------------------------------------------------------------------------------------------------------- reading


@decoding("the table of entries")
def load_state(db: sqlite3.Connection, revision: int) -> tuple[BankState, list[str]]:
    """The state the tables hold, and the ids of live entries whose checksum is wrong (they are in the state as they stand)."""
    spaces: dict[str, dict[str, Experience]] = {}
    damaged: list[str] = []
    for *row, created, crc in db.execute(f"SELECT {ENTRY}, created_revision, crc FROM entries WHERE retired_revision IS NULL"):
        entry = experience(row)
        spaces.setdefault(entry.namespace, {})[entry.id] = entry
        if checksum([*row, created]) != crc:
            damaged.append(entry.id)
    usage = {i: Usage(*_numbers(counts)) for i, *counts in db.execute("SELECT * FROM usage")}
    transfer = {(reader, source): Tally(*_numbers(counts)) for reader, source, *counts in db.execute("SELECT * FROM transfer")}
    made = {name: Space(immutables.Map(entries)) for name, entries in spaces.items()}
    return BankState(made, immutables.Map(usage), transfer, revision), damaged


def _numbers(values: list[Any]) -> list[Any]:
    if not all(isinstance(value, int | float) for value in values):
        raise TypeError(f"{values} are no counts")
    return values


@decoding("an entry")
def experience(row: Sequence[Any]) -> Experience:
    """A record from the columns of ``ENTRY``."""
    outcome = None if row[9] is None else bool(row[9])
    return Experience(*row[:7], episode_ids=tuple(json.loads(row[7])), parents=tuple(json.loads(row[8])), outcome=outcome)


def generation(row: Sequence[Any]) -> Generation | None:
    """A record from all columns of the table, None if its bytes are damaged."""
    if not all(isinstance(blob, bytes) for blob in row[4:8]) or zlib.crc32(b"".join(row[4:8])) != row[8]:
        return None
    prompt, response, versions = (tuple(np.frombuffer(blob, "<i4").tolist()) for blob in (row[4], row[5], row[7]))
    logps = tuple(np.frombuffer(row[6], "<f4").tolist())
    with decoding(f"generation {row[0]}"):
        return Generation(row[0], GenerationKind(row[1]), prompt, response, logps, versions, row[2], row[3])


def generation_ids(db: sqlite3.Connection) -> set[str]:
    """Ids of all stored generations."""
    return {i for (i,) in db.execute("SELECT id FROM generations")}


def vector(experience_id: str, blob: Any, crc: int, stored_dim: int, dim: int) -> Float[np.ndarray, " d"] | None:
    """An embedding, None if its bytes are damaged or it has another length."""
    whole = isinstance(blob, bytes) and stored_dim == dim and len(blob) == 4 * dim and zlib.crc32(experience_id.encode() + blob) == crc
    return np.frombuffer(blob, "<f4").astype(np.float32) if whole else None


@decoding("the state that the log goes on from")
def base_state(db: sqlite3.Connection) -> BankState:
    """What the log goes on from: empty, or where it was compacted. Raises sqlite3.DatabaseError if that is damaged."""
    row = db.execute("SELECT state, crc FROM base").fetchone()
    if row is None:
        return BankState()
    if zlib.crc32(row[0].encode()) != row[1]:
        raise sqlite3.DatabaseError("the state that the log goes on from is damaged")
    return bank_json.from_json(row[0])


def newest_generation(db: sqlite3.Connection) -> int:
    """The largest number in the ids of generations (12 for ``g00000012``), also of those compacted away; 0 if there is none."""
    stored = "SELECT coalesce(max(CAST(substr(id, 2) AS INTEGER)), 0) FROM generations"
    used = "SELECT coalesce(max(CAST(substr(generation_id, 2) AS INTEGER)), 0) FROM ops"
    return max(int(db.execute(query).fetchone()[0]) for query in (stored, used))


def abandon_generations(db: sqlite3.Connection, after: int) -> None:
    """Generations with larger numbers make room for those that a run which went back to before them makes again, under the same ids: a mark
    (``g00000012~1``) is added to theirs."""
    mark = int(db.execute("SELECT count(*) FROM generations WHERE id LIKE '%~%'").fetchone()[0]) + 1
    where = "CAST(substr(id, 2) AS INTEGER) > ? AND id NOT LIKE '%~%'"
    db.execute(f"UPDATE generations SET id = id || '~' || ? WHERE {where}", (mark, after))


def newest_row(db: sqlite3.Connection) -> int:
    """The number of the log's last row; 0 without one."""
    return int(db.execute("SELECT coalesce(max(seq), 0) FROM ops").fetchone()[0])


@decoding("a row of the log")
def newest_step(db: sqlite3.Connection) -> int:
    """The latest training step in the log, 0 without one."""
    return int(db.execute("SELECT coalesce(max(step), 0) FROM ops WHERE abandoned=0").fetchone()[0])


def log_rows(db: sqlite3.Connection, revision: int) -> Iterator[sqlite3.Row]:
    """The rows of the log up to a revision, those of abandoned futures left out."""
    cursor = db.cursor()
    cursor.row_factory = sqlite3.Row
    yield from cursor.execute(f"SELECT {LOG} FROM ops WHERE abandoned=0 AND revision<=? ORDER BY seq", (min(revision, 2**63 - 1),))


@decoding("a row of the log")
def replay_row(state: BankState, row: sqlite3.Row) -> BankState:
    """The state after one row of the log."""
    if row["kind"] == OBSERVED:
        guided = [Guided(i, bool(success), *more) for i, success, *more in json.loads(row["shown"])]
        return bank.observe(state, guided, step=row["step"], decay=row["decay"])
    op = BankOp(OpKind(row["kind"]), row["text"], tuple(json.loads(row["targets"])))
    outcome = None if row["outcome"] is None else bool(row["outcome"])
    author = Author(row["generation_id"], row["author_version"], row["step"], tuple(json.loads(row["episode_ids"])), outcome)
    inherit, decay = bool(row["inherit_usage"]), row["decay"]
    done = bank.apply(state, op, namespace=row["namespace"], author=author, op_index=row["op_index"], inherit_usage=inherit, decay=decay)
    return done.state


def replay(db: sqlite3.Connection, revision: int) -> BankState:
    """The state after ``revision`` changes. Raises ValueError if the log never was there, or no longer reaches back to it."""
    state = base_state(db)
    if state.revision > revision:
        raise ValueError(f"revision {revision} was compacted away: the oldest that is left is {state.revision}")
    for row in log_rows(db, revision):
        state = replay_row(state, row)
    if state.revision != revision:
        raise ValueError(f"the bank never was at revision {revision}; its log reaches {state.revision}")
    return state


def rechain(db: sqlite3.Connection) -> None:
    """New checksums for all rows of the log and all entries (a file of an older format has none)."""
    chain = 0
    for seq, *row in db.execute(f"SELECT seq, {LOG} FROM ops ORDER BY seq").fetchall():
        chain = checksum(row, chain)
        db.execute("UPDATE ops SET crc=? WHERE seq=?", (chain, seq))
    db.execute("UPDATE meta SET value=? WHERE key='chain'", (str(chain),))
    for rowid, *row in db.execute(f"SELECT rowid, {ENTRY}, created_revision FROM entries").fetchall():
        db.execute("UPDATE entries SET crc=? WHERE rowid=?", (checksum(row), rowid))
    for shown, step, revision in db.execute("SELECT shown, step, revision FROM ops WHERE kind=? AND abandoned=0", (OBSERVED,)).fetchall():
        _insert_guided(db, [Guided(i, bool(success), *more) for i, success, *more in json.loads(shown)], step, revision)
