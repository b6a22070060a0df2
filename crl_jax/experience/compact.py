"""A store file without what nobody needs any more.

Owns: what a compaction keeps: everything after a revision, the state at it, the ancestors of live entries, and every generation that one
of these, the log, the training buffer or the caller names. Promises: one transaction; the state, every later revision and all credit stay
as they are; the file still verifies. Does not: choose the revision (that of the oldest checkpoint that may be resumed).
"""

from __future__ import annotations

import json
import sqlite3
import zlib
from collections.abc import Collection
from typing import NamedTuple

from crl_jax.experience import bank_json
from crl_jax.experience import store_rows as rows
from crl_jax.experience.store import Store, StoreError


class Compacted(NamedTuple):
    """How many rows left."""

    operations: int
    entries: int
    generations: int


def compact(store: Store, *, keep_revision: int, generations: Collection[str] = ()) -> Compacted:
    """Fold the log up to ``keep_revision`` into one state and drop what only that log needed. Revisions before it can no longer be opened.

    ``generations`` stay too: a checkpoint's training buffer may wait with some that neither log nor entries name (answers, responses that
    could not be read) or whose entry is gone. Raises ValueError for a revision the store never was at. Free space goes back to the disk at
    the end.
    """
    done: Compacted = store.transaction(lambda db: _compact(db, keep_revision, generations))
    try:
        store.read(lambda db: db.execute("VACUUM"))
    except sqlite3.OperationalError as error:
        raise StoreError(
            f"{store.path} was compacted, but its free space stays in the file ({error}): free its disk and try again"
        ) from error
    return done


def _compact(db: sqlite3.Connection, revision: int, generations: Collection[str]) -> Compacted:
    state = rows.replay(db, revision)
    with rows.decoding("its state"):
        text = bank_json.to_json(state)
    last = db.execute("SELECT max(seq) FROM ops WHERE abandoned=0 AND revision<=?", (revision,)).fetchone()[0]
    if last is None:  # nothing to fold
        return Compacted(0, 0, 0)
    chain = db.execute("SELECT crc FROM ops WHERE seq=?", (last,)).fetchone()[0]
    operations = db.execute("DELETE FROM ops WHERE seq<=?", (last,)).rowcount
    db.execute("INSERT OR REPLACE INTO base VALUES (0,?,?,?)", (revision, text, zlib.crc32(text.encode())))
    db.execute("INSERT OR REPLACE INTO meta VALUES ('chain_base',?)", (str(chain),))
    kept = _kept_entries(db, revision)
    gone = [(i,) for (i,) in db.execute("SELECT id FROM entries").fetchall() if i not in kept]
    for table, column in (("entries", "id"), ("embeddings", "id"), ("guided", "experience_id")):
        db.executemany(f"DELETE FROM {table} WHERE {column}=?", gone)
    named = _named_generations(db) | set(generations)
    unnamed = [(i,) for (i,) in db.execute("SELECT id FROM generations").fetchall() if i not in named]
    db.executemany("DELETE FROM generations WHERE id=?", unnamed)
    return Compacted(operations, len(gone), len(unnamed))


@rows.decoding("an entry's parents")
def _kept_entries(db: sqlite3.Connection, revision: int) -> set[str]:
    """Entries that were live at ``revision`` or later, and everything these were made of."""
    parents = {i: json.loads(text) for i, text in db.execute("SELECT id, parents FROM entries")}
    query = "SELECT id FROM entries WHERE retired_revision IS NULL OR retired_revision>?"
    waiting = [i for (i,) in db.execute(query, (revision,))]
    kept: set[str] = set()
    while waiting:
        entry = waiting.pop()
        if entry not in kept:
            kept.add(entry)
            waiting.extend(parents.get(entry, ()))
    return kept


def _named_generations(db: sqlite3.Connection) -> set[str]:
    named = {i for (i,) in db.execute("SELECT generation_id FROM entries UNION SELECT generation_id FROM ops")}
    saved = db.execute("SELECT data FROM buffer WHERE id=0").fetchone()
    if saved is not None:
        with rows.decoding("the training buffer"):
            named.update(row[0] for row in json.loads(saved[0])["waiting"])
    newest = db.execute("SELECT id FROM generations ORDER BY CAST(substr(id, 2) AS INTEGER) DESC LIMIT 1").fetchone()
    return named | ({newest[0]} if newest else set())  # the newest stays, so that no number is given twice
