"""The last good state of a damaged store file.

Owns: what can still be read of it (``salvage``), snapshots beside it, and which of the two reaches further. Promises: the damaged file is
kept under another name; what is brought back is a prefix of what was acknowledged, proved by the log's chain of checksums, and nothing
that fails its checksum; without any good state there is an error, never a silent start with nothing. Does not: run unasked on a file that
is only locked, full or foreign.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
import shutil
import sqlite3
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from crl_jax.experience import bank
from crl_jax.experience import store_rows as rows
from crl_jax.experience.bank import Author, BankState, Guided
from crl_jax.experience.buffer import check_saved
from crl_jax.experience.store import Change, Observation, Store, StoreDamaged, StoreError
from crl_jax.experience.store_schema import ENTRY, LOG
from crl_jax.experience.verify import chain_start, verify
from crl_jax.records import BankOp, OpKind


class Recovery(NamedTuple):
    """The revision that was brought back, from the log or from a snapshot, and where the damaged file is now."""

    revision: int
    source: str
    damaged: pathlib.Path


def open_or_recover(path: pathlib.Path) -> tuple[Store, Recovery | None]:
    """The store at ``path``; if it is damaged, its last good state in a file of the same name. Raises StoreDamaged if there is none."""
    if begun(path) or emptied(path) or _spoilt_by_log(path):
        done = recover(path)
        return Store.open(path), done
    try:
        store = Store.open(path)
    except StoreDamaged:
        done = recover(path)
        return Store.open(path), done
    try:
        store.load()
    except (StoreDamaged, sqlite3.DatabaseError):
        store.close()
        done = recover(path)
        return Store.open(path), done
    return store, None


def begun(path: pathlib.Path) -> bool:
    """Whether a recovery was killed between its last two moves: the damaged file is aside, what was made of it is not in its place."""
    return not path.exists() and _salvaged(path).is_file()


def snapshot_folder(path: pathlib.Path) -> pathlib.Path:
    """Where the snapshots of a store file are: ``bank.sqlite`` has them in ``bank.snapshots``."""
    return path.with_suffix(".snapshots")


def snapshot_file(path: pathlib.Path, revision: int) -> pathlib.Path:
    """The snapshot of a store file at a revision."""
    return snapshot_folder(path) / f"r{revision:010d}.sqlite"


def _snapshots(path: pathlib.Path) -> list[pathlib.Path]:
    return sorted(copy for copy in snapshot_folder(path).glob("r*.sqlite") if copy.stem[1:].isdecimal())


def emptied(path: pathlib.Path) -> bool:
    """Whether a file has no byte although it once was a bank: there are snapshots of it."""
    return path.is_file() and path.stat().st_size == 0 and bool(_snapshots(path))


def snapshot(store: Store, *, keep: int) -> pathlib.Path | None:
    """A copy of a store file among its snapshots, of which the newest ``keep`` stay; None for ``keep`` 0 or a store in memory."""
    path = pathlib.Path(store.path)
    if keep < 1 or not path.is_file():
        return None
    made = snapshot_file(path, store.revision)
    if not made.exists():
        store.backup(made)
    keep_newest(path, keep)
    return made


def keep_newest(path: pathlib.Path, keep: int) -> None:
    """Delete all snapshots of a store file but the newest ``keep`` (1 or more)."""
    for old in _snapshots(path)[:-keep]:
        old.unlink(missing_ok=True)


def forget_snapshots(store: Store, *, after: int) -> None:
    """Snapshots beyond a revision that the store goes back to are of a future that is given up: its revisions will mean something else."""
    for copy in _snapshots(pathlib.Path(store.path)):
        if int(copy.stem[1:]) > after:
            copy.unlink(missing_ok=True)


def recover(path: pathlib.Path) -> Recovery:
    """Put the last good state in place of a damaged file, which is kept as ``NAME.damaged-1`` (2, ...). What a killed process had begun of
    that is ended: without it the next one would find no file, and start empty."""
    made, number = _salvaged(path), next(n for n in range(1, 10**6) if not path.with_name(f"{path.name}.damaged-{n}").exists())
    if begun(path):
        return _take_place(path, made, "log", number - 1)
    if not path.is_file():
        raise StoreError(f"{path} does not exist: give the folder of a run with a bank")
    for old in (made, *_beside(made)):
        old.unlink(missing_ok=True)
    revision, source = _salvage(path, made), "log"
    alone = path.with_name(path.name + ".alone")
    if _beside(path)[0].exists():
        shutil.copyfile(path, alone)  # the fault may be in its write-ahead log only: a torn one, or that of another bank
    for copy in (alone, *reversed(_snapshots(path))):
        if further := _take_copy(copy, made, revision):
            revision, source = further, copy.name
    for part in (alone, *_beside(alone)):
        part.unlink(missing_ok=True)
    if revision == 0:
        made.unlink(missing_ok=True)
        raise StoreDamaged(
            f"{path} is damaged and neither its log nor a snapshot can be read: restore a backup, or move it away to start empty"
        )
    path.replace(path.with_name(f"{path.name}.damaged-{number}"))  # first: from here on the file that was made is the bank
    return _take_place(path, made, source, number)


def _salvaged(path: pathlib.Path) -> pathlib.Path:
    return path.with_name(path.name + ".salvaged")


def _take_place(path: pathlib.Path, made: pathlib.Path, source: str, number: int) -> Recovery:
    """The last steps, once the damaged file is aside as number ``number``: what SQLite had beside it follows, ``made`` takes its place."""
    aside = path.with_name(f"{path.name}.damaged-{number}")
    for part, old in zip(_beside(path), _beside(aside), strict=True):
        if part.exists():
            part.replace(old)
    made.replace(path)
    with contextlib.closing(Store.open(path, read_only=True)) as store:
        return Recovery(store.revision, source, aside)


def _spoilt_by_log(path: pathlib.Path) -> bool:
    """Whether the file cannot be read with its write-ahead log. Looked at without writing: a writer would fold the log in for good."""
    log = _beside(path)[0]
    if not log.is_file() or log.stat().st_size == 0:
        return False
    try:
        with contextlib.closing(Store.open(path, read_only=True)) as store:
            store.load()
    except (StoreDamaged, sqlite3.DatabaseError):
        return True
    except StoreError:  # of an older format, foreign: not for this function to say
        return False
    return False


def _take_copy(copy: pathlib.Path, made: pathlib.Path, revision: int) -> int:
    """Put a copy of the bank at ``made`` if it is whole and beyond ``revision``; returns its revision, else 0."""
    with contextlib.suppress(StoreError, sqlite3.DatabaseError):
        if not copy.is_file():
            return 0
        good = Store.open(copy, read_only=True)
        try:
            reached = good.revision
            if reached > revision and not verify(good).faults:
                made.unlink(missing_ok=True)
                good.backup(made)
                return reached
        finally:
            good.close()
    return 0


def _beside(path: pathlib.Path) -> tuple[pathlib.Path, pathlib.Path]:
    """SQLite's own files beside a database."""
    return path.with_name(path.name + "-wal"), path.with_name(path.name + "-shm")


def _salvage(path: pathlib.Path, made: pathlib.Path) -> int:
    """Write what the damaged file's log still proves into a new file; returns its revision (0: nothing)."""
    new = Store.open(made)
    try:
        with contextlib.closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True, timeout=10.0)) as old:
            old.text_factory = _text
            with contextlib.suppress(sqlite3.DatabaseError, *rows.MALFORMED):
                _copy_log(old, new)
            for table, columns in _COPIED.items():
                new.transaction(lambda db, t=table, c=columns: _copy_rows(old, db, t, c))
        revision = new.revision
        new.read(lambda db: db.execute("PRAGMA wal_checkpoint(TRUNCATE)"))
        return revision
    except sqlite3.DatabaseError:
        return 0
    finally:
        new.close()
        for part in _beside(made):
            part.unlink(missing_ok=True)


def _text(raw: bytes) -> str:
    return raw.decode(errors="replace")  # a flipped bit must not stop the reading; the checksum finds it


def _copy_log(old: sqlite3.Connection, new: Store) -> None:
    state, chain = rows.base_state(old), chain_start(old)
    if state.revision:
        new.transaction(lambda db: _begin_at(old, db, state))
    for row in _proven(old, chain):
        state = _again(new, state, row)


def _begin_at(old: sqlite3.Connection, db: sqlite3.Connection, state: BankState) -> None:
    db.execute("INSERT INTO base VALUES (0,?,?,?)", old.execute("SELECT revision, state, crc FROM base").fetchone())
    for space in state.spaces.values():
        for entry in space.values():
            rows.insert_entry(db, entry, int(entry.id[1:].split("-")[0]))
    rows.set_sums(db, state)
    db.execute("UPDATE meta SET value=? WHERE key='revision'", (str(state.revision),))


def _proven(old: sqlite3.Connection, chain: int) -> Iterator[dict[str, Any]]:
    """Rows of the log from the start, as long as each continues the chain; those of abandoned futures are only checked."""
    names = [name.strip() for name in LOG.split(",")]
    for abandoned, crc, *row in old.execute(f"SELECT abandoned, crc, {LOG} FROM ops ORDER BY seq"):
        chain = rows.checksum(row, chain)
        if chain != crc:
            return
        if not abandoned:
            yield dict(zip(names, row, strict=True))


def _again(new: Store, state: BankState, row: dict[str, Any]) -> BankState:
    """Log one proven row anew. Raises ValueError when it does not go on from ``state``."""
    if row["base_revision"] != state.revision:
        raise ValueError(f"a row starts at revision {row['base_revision']}, the state is at {state.revision}")
    if row["kind"] == rows.OBSERVED:
        shown = tuple(Guided(i, bool(success), *more) for i, success, *more in json.loads(row["shown"]))
        after = bank.observe(state, shown, step=row["step"], decay=row["decay"])
        new.commit([Observation(state.revision, shown, row["step"], after, row["decay"])])
        return after
    op = BankOp(OpKind(row["kind"]), row["text"], tuple(json.loads(row["targets"])))
    outcome = None if row["outcome"] is None else bool(row["outcome"])
    author = Author(row["generation_id"], row["author_version"], row["step"], tuple(json.loads(row["episode_ids"])), outcome)
    inherit = bool(row["inherit_usage"])
    at, decay = row["op_index"], row["decay"]
    done = bank.apply(state, op, namespace=row["namespace"], author=author, op_index=at, inherit_usage=inherit, decay=decay)
    new.commit([Change(state.revision, op, row["namespace"], author, at, done, inherit, row["reason"], decay)])
    return done.state


_COPIED = {
    "entries": f"{ENTRY}, created_revision, retired_revision, crc",
    "generations": "id, kind, step, parse_error, prompt_ids, response_ids, logps, versions, crc",
    "embeddings": "id, fingerprint, dim, vector, crc",
    "inbox": "number, id, data",
    "buffer": "id, data",
}


def _copy_rows(old: sqlite3.Connection, new: sqlite3.Connection, table: str, columns: str) -> None:
    """Every row that can be read and passes its checksum: from the front up to the damage, and from the back up to it."""
    marks = ",".join("?" * len(columns.split(",")))
    for order in ("ASC", "DESC"):
        for row in _readable(old, f"SELECT {columns} FROM {table} ORDER BY rowid {order}"):
            good = False
            with contextlib.suppress(*rows.MALFORMED):  # a value of another kind than was written
                good = _whole(table, row, new)
            if good:
                new.execute(f"INSERT OR IGNORE INTO {table} ({columns}) VALUES ({marks})", row)


def _readable(old: sqlite3.Connection, query: str) -> Iterator[tuple[Any, ...]]:
    try:
        yield from old.execute(query)
    except sqlite3.DatabaseError:  # the damage; what was read before it is good
        return


def _whole(table: str, row: tuple[Any, ...], new: sqlite3.Connection) -> bool:
    if table == "entries":  # live ones come from the log; retired ones are kept for lineage and credit, the future's ids are given anew
        proven = int(new.execute("SELECT value FROM meta WHERE key='revision'").fetchone()[0])
        return row[11] is not None and row[10] <= proven and rows.checksum(row[:11]) == row[12]
    if table == "generations":
        return zlib.crc32(b"".join(row[4:8])) == row[8]
    if table == "embeddings":
        return rows.vector(row[0], row[3], row[4], row[2], row[2]) is not None
    if table == "buffer":
        check_saved(row[1])
        return all(new.execute("SELECT 1 FROM generations WHERE id=?", (i,)).fetchone() for i, *_ in json.loads(row[1])["waiting"])
    return True
