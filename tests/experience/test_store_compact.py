"""Compaction keeps the state, later revisions, lineage and credit; files of the first format become files of this one."""

import sqlite3

import pytest
from bank_history import history, look, write

from crl_jax.experience.compact import compact
from crl_jax.experience.recover import recover
from crl_jax.experience.snapshot import copy_of
from crl_jax.experience.store import Store, StoreError
from crl_jax.experience.verify import verify
from crl_jax.records import OpKind, Usage


def test_compaction_keeps_what_training_and_people_still_need(tmp_path):
    path = tmp_path / "bank.sqlite"
    store = Store.open(path)
    past = history(store)
    store.save_buffer('{"waiting": [["g00000002", 1.0, 1, 0]], "trained": [], "counts": {}}')
    last, middle = max(past), max(past) // 2
    before, newest, guided = path.stat().st_size, store.newest_generation(), store.guided("")
    done = compact(store, keep_revision=middle)
    assert done.operations == middle
    assert done.generations > 0
    assert verify(store).faults == ()
    assert store.load() == past[last]
    assert all(store.at_revision(revision) == past[revision] for revision in range(middle, last + 1))
    with pytest.raises(ValueError, match="compacted away: the oldest that is left is"):
        store.at_revision(middle - 1)
    for space in past[last].spaces.values():
        for entry in space.values():
            assert store.generation(entry.generation_id)
            assert all(store.experience(parent) is not None for parent in entry.parents)
    assert store.generation("g00000002").id == "g00000002", "the training buffer waits for it"
    assert (store.newest_generation(), store.guided("")) == (newest, guided)
    state = look(store, write(store, past[last], OpKind.ADD, "later", n=900), [""], step=40)
    assert compact(store, keep_revision=store.revision).operations == last - middle + 2
    assert verify(store).faults == ()
    assert store.load() == state == store.rewind(store.revision)
    assert path.stat().st_size <= before
    assert compact(store, keep_revision=store.revision) == (0, 0, 0)
    with pytest.raises(ValueError, match="never was at revision"):
        compact(store, keep_revision=10**6)
    store.close()


def test_a_damaged_file_is_recovered_from_its_compacted_state(tmp_path):
    path = tmp_path / "bank.sqlite"
    store = Store.open(path)
    past = history(store)
    compact(store, keep_revision=10)
    store.close()
    db = sqlite3.connect(path)
    db.execute("UPDATE ops SET text='planted' WHERE revision=15")
    db.commit()
    db.close()
    assert recover(path).revision == 14
    store = Store.open(path)
    assert store.load() == past[14] == store.at_revision(14)
    assert verify(store).faults == ()
    store.close()


def test_any_past_revision_opens_as_a_copy(tmp_path):
    path = tmp_path / "bank.sqlite"
    store = Store.open(path)
    past = history(store, 5)
    for revision in past:
        copy = copy_of(path, revision=revision)
        assert copy.load() == past[revision]
        copy.close()
    with pytest.raises(ValueError, match="never was at revision"):
        copy_of(path, revision=999)
    assert store.load() == past[max(past)]
    store.close()


FORMAT_1 = """
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
INSERT INTO meta VALUES ('format','1'),('revision','3');
INSERT INTO ops VALUES (1,0,1,'add','room','a','[]',0,0,'','',2,4,'["e1"]','[]','[]',0);
INSERT INTO ops VALUES (2,1,2,'observed','','','[]',0,0,'','',0,5,'[]','[["x00000001-0", true], ["x00000001-0", false]]','[]',0);
INSERT INTO ops VALUES (3,2,3,'add','room','lost','[]',0,0,'','',2,6,'["e2"]','[]','[]',1);
INSERT INTO ops VALUES (4,2,3,'add','room','b','[]',0,0,'','',2,6,'["e3"]','[]','[]',0);
INSERT INTO entries VALUES ('x00000001-0','room','a','',0,2,4,'["e1"]','[]',1,NULL);
INSERT INTO entries VALUES ('x00000003-0','room','b','',0,2,6,'["e3"]','[]',3,NULL);
INSERT INTO usage VALUES ('x00000001-0',2,1,5);
INSERT INTO buffer VALUES (0,'{"waiting": [], "trained": [], "counts": {}}');
"""


def test_a_file_of_the_first_format_is_brought_up_to_this_one(tmp_path):
    path = tmp_path / "bank.sqlite"
    db = sqlite3.connect(path)
    db.executescript(FORMAT_1)
    db.close()
    with pytest.raises(StoreError, match="has format 1: open it once for writing first"):
        Store.open(path, read_only=True)
    for _ in range(2):
        store = Store.open(path)
        assert verify(store).faults == ()
        assert [e.text for e in store.load().space("room").values()] == ["a", "b"]
        assert dict(store.load().usage) == {"x00000001-0": Usage(2, 1, 5, 2.0, 1.0)}
        assert [g.guided.success for g in store.guided("x00000001-0")] == [True, False]
        assert store.load_buffer() is not None
        store.close()
    db = sqlite3.connect(path)
    db.execute("UPDATE meta SET value='3' WHERE key='format'")
    db.commit()
    db.close()
    with pytest.raises(StoreError, match="format 3, this version reads format 2: use the version"):
        Store.open(path)
