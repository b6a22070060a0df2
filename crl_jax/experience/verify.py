"""Is a store file what was written into it?

Owns: the checks behind ``crl bank verify``. Promises: reads only; every fault is named with what it touches; a file without faults replays
to exactly the state its tables hold, byte for byte. Does not: mend anything (``recover``).
"""

from __future__ import annotations

import functools
import json
import sqlite3
import zlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

from crl_jax.experience import bank_json
from crl_jax.experience import store_rows as rows
from crl_jax.experience.buffer import check_saved
from crl_jax.experience.store import Store
from crl_jax.experience.store_schema import ENTRY, LOG


class Verdict(NamedTuple):
    """What was looked at, and what is wrong; without a fault the file is whole. ``digest`` is a CRC-32 of the state's canonical text."""

    revision: int
    operations: int
    entries: int
    generations: int
    digest: int
    faults: tuple[str, ...]


def verify(store: Store) -> Verdict:
    """Check the file: pages, the chain of the log, replay against the tables, and the checksums of entries, generations and vectors."""
    return store.read(_verdict)


def _verdict(db: sqlite3.Connection) -> Verdict:
    with rows.decoding("its state"):
        revision = int(db.execute("SELECT value FROM meta WHERE key='revision'").fetchone()[0])
        state, _ = rows.load_state(db, revision)
        text = bank_json.to_json(state)
    faults: list[str] = []
    for check in (_pages, _chain, _entries, _blobs, _references, functools.partial(_replayed, revision=revision, text=text)):
        faults.extend(_guard(check, db))
    count = {table: int(db.execute(f"SELECT count(*) FROM {table}").fetchone()[0]) for table in ("ops", "generations")}
    return Verdict(revision, count["ops"], len(state), count["generations"], zlib.crc32(text.encode()), tuple(faults))


def _guard(check: Callable[[sqlite3.Connection], Iterator[str]], db: sqlite3.Connection) -> Iterator[str]:
    try:
        yield from check(db)
    except (sqlite3.DatabaseError, *rows.MALFORMED) as error:
        yield f"unreadable: {error}"


def _pages(db: sqlite3.Connection) -> Iterator[str]:
    for (line,) in db.execute("PRAGMA integrity_check(10)"):
        if line != "ok":
            yield f"page: {line}"


@rows.decoding("the first checksum of the log")
def chain_start(db: sqlite3.Connection) -> int:
    """The checksum that the first row of the log goes on from."""
    row = db.execute("SELECT value FROM meta WHERE key='chain_base'").fetchone()
    return int(row[0]) if row else 0


def _chain(db: sqlite3.Connection) -> Iterator[str]:
    chain, expected = chain_start(db), rows.base_state(db).revision
    for seq, abandoned, crc, *row in db.execute(f"SELECT seq, abandoned, crc, {LOG} FROM ops ORDER BY seq"):
        chain = rows.checksum(row, chain)
        if chain != crc:
            yield f"log row {seq}: it was changed, or a row before it is gone"
            chain = crc
        if not abandoned:
            if row[0] != expected:
                yield f"log row {seq}: starts at revision {row[0]}, the row before it ends at {expected}"
            expected = row[1]
    if chain != int(db.execute("SELECT value FROM meta WHERE key='chain'").fetchone()[0]):
        yield "the log's last rows are gone"


def _entries(db: sqlite3.Connection) -> Iterator[str]:
    for *row, created, crc in db.execute(f"SELECT {ENTRY}, created_revision, crc FROM entries"):
        if rows.checksum([*row, created]) != crc:
            yield f"entry {row[0]}: its columns were changed"


def _blobs(db: sqlite3.Connection) -> Iterator[str]:
    for row in db.execute("SELECT id, kind, step, parse_error, prompt_ids, response_ids, logps, versions, crc FROM generations"):
        if zlib.crc32(b"".join(row[4:8])) != row[8]:
            yield f"generation {row[0]}: its bytes were changed"
    for i, blob, crc, dim in db.execute("SELECT id, vector, crc, dim FROM embeddings"):
        if rows.vector(i, blob, crc, dim, dim) is None:
            yield f"embedding of {i}: its bytes were changed"


def _references(db: sqlite3.Connection) -> Iterator[str]:
    query = """SELECT id, generation_id FROM entries WHERE retired_revision IS NULL AND generation_id<>''
               AND generation_id NOT IN (SELECT id FROM generations)"""
    for entry, generation in db.execute(query):
        yield f"entry {entry}: its generation {generation} is missing"
    saved = db.execute("SELECT data FROM buffer WHERE id=0").fetchone()
    if saved:
        check_saved(saved[0])
    for generation, *_ in json.loads(saved[0])["waiting"] if saved else ():
        if db.execute("SELECT 1 FROM generations WHERE id=?", (generation,)).fetchone() is None:
            yield f"training buffer: generation {generation} is missing"


def _replayed(db: sqlite3.Connection, revision: int, text: str) -> Iterator[str]:
    try:
        state = rows.replay(db, revision)
    except ValueError as error:
        yield f"replay: {error}"
        return
    replayed = bank_json.to_json(state)
    if replayed != text:
        at = next((i for i, (a, b) in enumerate(zip(replayed, text, strict=False)) if a != b), min(len(replayed), len(text)))
        yield f"replay: the tables differ from the log, first near {text[max(0, at - 40) : at + 40]!r}"
    base = rows.base_state(db).revision
    logged = db.execute("SELECT shown FROM ops WHERE kind=? AND abandoned=0", (rows.OBSERVED,))
    episodes = sum(len(json.loads(shown)) for (shown,) in logged)
    stored = int(db.execute("SELECT count(*) FROM guided WHERE revision>?", (base,)).fetchone()[0])
    if episodes != stored:
        yield f"replay: the log counted {episodes} episodes, the table of guided episodes has {stored}"
