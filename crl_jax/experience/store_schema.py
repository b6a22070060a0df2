"""The tables of a store file, and how files of earlier formats become this one.

Owns: the schema, its number, and which tables are the truth (``ops``, ``generations``, ``base``, ``requests``, ``inbox``, ``buffer``) and
which only add it up (``entries``, ``usage``, ``transfer``, ``guided``; ``embeddings`` can be computed again). Promises: a change of format
is one transaction. Does not: read or write rows.
"""

from __future__ import annotations

import sqlite3

FORMAT = 2

SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE ops (
  seq INTEGER PRIMARY KEY AUTOINCREMENT, base_revision INTEGER NOT NULL, revision INTEGER NOT NULL, kind TEXT NOT NULL,
  namespace TEXT NOT NULL, text TEXT NOT NULL, targets TEXT NOT NULL, op_index INTEGER NOT NULL, inherit_usage INTEGER NOT NULL,
  reason TEXT NOT NULL, generation_id TEXT NOT NULL, author_version INTEGER NOT NULL, step INTEGER NOT NULL,
  episode_ids TEXT NOT NULL, shown TEXT NOT NULL, problems TEXT NOT NULL, outcome INTEGER, decay REAL NOT NULL, crc INTEGER NOT NULL,
  abandoned INTEGER NOT NULL DEFAULT 0);
CREATE TABLE base (id INTEGER PRIMARY KEY CHECK (id = 0), revision INTEGER NOT NULL, state TEXT NOT NULL, crc INTEGER NOT NULL);
CREATE TABLE entries (
  id TEXT PRIMARY KEY, namespace TEXT NOT NULL, text TEXT NOT NULL, generation_id TEXT NOT NULL, op_index INTEGER NOT NULL,
  author_version INTEGER NOT NULL, step INTEGER NOT NULL, episode_ids TEXT NOT NULL, parents TEXT NOT NULL, outcome INTEGER,
  created_revision INTEGER NOT NULL, retired_revision INTEGER, crc INTEGER NOT NULL);
CREATE TABLE usage (
  id TEXT PRIMARY KEY, shown INTEGER NOT NULL, succeeded INTEGER NOT NULL, last_shown_step INTEGER NOT NULL,
  recent_shown REAL NOT NULL, recent_succeeded REAL NOT NULL, votes INTEGER NOT NULL);
CREATE TABLE transfer (
  reader TEXT NOT NULL, source TEXT NOT NULL, episodes INTEGER NOT NULL, succeeded INTEGER NOT NULL, PRIMARY KEY (reader, source));
CREATE TABLE guided (
  experience_id TEXT NOT NULL, success INTEGER NOT NULL, episode_id TEXT NOT NULL, reader TEXT NOT NULL, reward REAL NOT NULL,
  step INTEGER NOT NULL, revision INTEGER NOT NULL);
CREATE INDEX guided_by_entry ON guided (experience_id);
CREATE TABLE embeddings (id TEXT PRIMARY KEY, fingerprint TEXT NOT NULL, dim INTEGER NOT NULL, vector BLOB NOT NULL, crc INTEGER NOT NULL);
CREATE TABLE generations (
  id TEXT PRIMARY KEY, kind TEXT NOT NULL, step INTEGER NOT NULL, parse_error TEXT NOT NULL,
  prompt_ids BLOB NOT NULL, response_ids BLOB NOT NULL, logps BLOB NOT NULL, versions BLOB NOT NULL,
  crc INTEGER NOT NULL);
CREATE TABLE buffer (id INTEGER PRIMARY KEY CHECK (id = 0), data TEXT NOT NULL);
CREATE TABLE requests (number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, answer TEXT NOT NULL);
CREATE TABLE inbox (number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, data TEXT NOT NULL);
"""

ENTRY = "id, namespace, text, generation_id, op_index, author_version, step, episode_ids, parents, outcome"
LOG = (
    "base_revision, revision, kind, namespace, text, targets, op_index, inherit_usage, reason, generation_id, author_version, step,"
    " episode_ids, shown, problems, outcome, decay"
)

_ONE = """
ALTER TABLE ops RENAME TO ops_1;
ALTER TABLE entries RENAME TO entries_1;
DROP TABLE usage;
ALTER TABLE meta RENAME TO meta_1;
ALTER TABLE embeddings RENAME TO embeddings_1;
ALTER TABLE generations RENAME TO generations_1;
ALTER TABLE buffer RENAME TO buffer_1;
"""
_TWO = """
INSERT INTO meta SELECT * FROM meta_1;
INSERT INTO embeddings SELECT * FROM embeddings_1;
INSERT INTO generations SELECT * FROM generations_1;
INSERT INTO buffer SELECT * FROM buffer_1;
INSERT INTO ops SELECT seq, base_revision, revision, kind, namespace, text, targets, op_index, inherit_usage, reason, generation_id,
  author_version, step, episode_ids, shown, problems, NULL, 1.0, 0, abandoned FROM ops_1;
INSERT INTO entries SELECT id, namespace, text, generation_id, op_index, author_version, step, episode_ids, parents, NULL,
  created_revision, retired_revision, 0 FROM entries_1;
DROP TABLE ops_1; DROP TABLE entries_1; DROP TABLE meta_1; DROP TABLE embeddings_1; DROP TABLE generations_1; DROP TABLE buffer_1;
"""


def statements(script: str) -> list[str]:
    """The statements of a script, to run them inside a transaction (``executescript`` would end it)."""
    return [part for part in (piece.strip() for piece in script.split(";")) if part]


def create(db: sqlite3.Connection) -> None:
    """The tables of an empty file, inside the caller's transaction."""
    for statement in statements(SCHEMA):
        db.execute(statement)
    db.execute("INSERT INTO meta VALUES ('format',?),('revision','0'),('chain','0')", (str(FORMAT),))


def upgrade_1(db: sqlite3.Connection) -> None:
    """Format 1 to 2, inside the caller's transaction: columns get their neutral values. Checksums and sums are the caller's to make."""
    for statement in (*statements(_ONE), *statements(SCHEMA), *statements(_TWO)):
        db.execute(statement)
    db.execute("UPDATE meta SET value=? WHERE key='format'", (str(FORMAT),))
    db.execute("INSERT INTO meta VALUES ('chain','0')")
