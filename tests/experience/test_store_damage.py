"""A file that is not what was written is noticed, and its last good state comes back."""

import contextlib
import pathlib
import shutil
import sqlite3

import numpy as np
import pytest
from bank_history import history, look, write

from crl_jax.experience.recover import open_or_recover, recover, snapshot, snapshot_folder
from crl_jax.experience.store import Store, StoreDamaged, StoreError
from crl_jax.experience.store_schema import create
from crl_jax.experience.verify import verify
from crl_jax.records import OpKind


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A closed file and the state at each of its revisions."""
    path = tmp_path_factory.mktemp("whole") / "bank.sqlite"
    store = Store.open(path)
    past = history(store)
    store.save_buffer('{"waiting": [["g00000001", 1.0, 1, 0]], "trained": [], "counts": {}}')
    store.close()
    return path, past


@pytest.fixture
def copy(whole, tmp_path):
    return shutil.copy(whole[0], tmp_path / "bank.sqlite"), whole[1]


def tamper(path, statement, *values):
    db = sqlite3.connect(path)
    db.execute(statement, values)
    db.commit()
    db.close()


def test_a_whole_file_verifies(whole):
    store = Store.open(whole[0], read_only=True)
    verdict = verify(store)
    assert verdict.faults == ()
    assert (verdict.revision, verdict.entries) == (max(whole[1]), len(whole[1][max(whole[1])]))
    assert verdict.digest == verify(store).digest
    store.close()


@pytest.mark.parametrize(
    ("statement", "fault"),
    [
        ("UPDATE ops SET text='other' WHERE seq=5", "log row 5: it was changed"),
        ("DELETE FROM ops WHERE seq=5", "log row 6: it was changed, or a row before it is gone"),
        ("DELETE FROM ops WHERE seq=(SELECT max(seq) FROM ops)", "the log's last rows are gone"),
        ("UPDATE entries SET text='other' WHERE id='x00000001-0'", "entry x00000001-0"),
        ("DELETE FROM entries WHERE retired_revision IS NULL", "replay: the tables differ"),
        ("UPDATE usage SET shown=shown+1", "replay: the tables differ"),
        ("UPDATE transfer SET episodes=0", "replay: the tables differ"),
        ("DELETE FROM guided WHERE rowid=3", "replay: the log counted"),
        ("UPDATE generations SET logps=prompt_ids WHERE id='g00000002'", "generation g00000002"),
        ("DELETE FROM generations", "its generation"),
        ("DELETE FROM generations WHERE id='g00000001'", "training buffer: generation g00000001 is missing"),
        ("UPDATE embeddings SET vector=zeroblob(32) WHERE id='x00000001-0'", "embedding of x00000001-0"),
        ("UPDATE meta SET value='3' WHERE key='revision'", "replay: the tables differ"),
    ],
)
def test_every_change_behind_the_stores_back_is_found(copy, statement, fault):
    tamper(copy[0], statement)
    store = Store.open(copy[0], read_only=True)
    assert any(fault in found for found in verify(store).faults), verify(store).faults
    store.close()


@pytest.mark.parametrize("seed", range(12))
def test_X14_whatever_bytes_are_lost_the_rest_is_a_state_of_the_past_or_an_error(copy, seed):
    path, past = copy
    rng = np.random.default_rng(seed)
    content = bytearray(path.read_bytes())
    start = int(rng.integers(100, len(content) - 600))
    content[start : start + 500] = rng.bytes(500)
    path.write_bytes(bytes(content))
    try:
        store, recovery = open_or_recover(path)
    except StoreDamaged:
        return  # the beginning is gone, so nothing is proven
    state = store.load()
    assert state == past[state.revision]
    faults = [f for f in verify(store).faults if "its generation" not in f]
    assert recovery is None or (faults == [] and recovery.revision == state.revision and recovery.damaged.exists())
    write(store, state, OpKind.ADD, "and it goes on", n=500)
    store.close()


def test_a_cut_file_gives_its_proven_beginning(copy):
    path, past = copy
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    try:
        store, recovery = open_or_recover(path)
    except StoreDamaged:
        return
    assert recovery is not None
    assert store.load() == past[store.revision]
    store.close()


def test_a_changed_log_row_ends_what_is_proven(copy):
    path, past = copy
    tamper(path, "UPDATE ops SET text='planted' WHERE seq=9")
    tamper(path, "UPDATE entries SET text='planted' WHERE id=(SELECT max(id) FROM entries)")
    with pytest.raises(StoreDamaged, match="crl bank repair"):
        Store.open(path).load()
    done = recover(path)
    store = Store.open(path)
    assert (done.revision, done.source, done.damaged.name) == (8, "log", "bank.sqlite.damaged-1")
    assert store.load() == past[8]
    assert verify(store).faults == ()
    assert store.generation("g00000009").id == "g00000009", "generations beyond the proven log are kept for their credit"
    assert store.load_buffer() is not None
    assert len(store.guided("")) == len([g for g in past[8].transfer if g[1] == ""]) * past[8].transfer["room", ""].episodes
    store.close()


@pytest.mark.parametrize("moves", range(4))
def test_a_recovery_that_was_killed_between_its_moves_is_ended_by_the_next(copy, monkeypatch, moves):
    path, past = copy
    tamper(path, "UPDATE ops SET text='planted' WHERE seq=9")
    tamper(path, "UPDATE entries SET text='planted' WHERE id=(SELECT max(id) FROM entries)")
    replace, left = pathlib.Path.replace, [moves]

    def killed(self, target):
        left[0] -= 1  # the file, and what SQLite had left beside it, go; then the new one comes
        if left[0] < 0:
            raise KeyboardInterrupt
        return replace(self, target)

    monkeypatch.setattr(pathlib.Path, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        recover(path)
    monkeypatch.undo()
    store, recovery = open_or_recover(path)
    assert (store.load(), recovery.revision, recovery.damaged.name) == (past[8], 8, "bank.sqlite.damaged-1")
    assert recovery.damaged.is_file()
    assert not path.with_name(path.name + ".salvaged").exists()
    store.close()


def test_a_snapshot_that_reaches_further_is_taken(tmp_path):
    path = tmp_path / "bank.sqlite"
    store = Store.open(path)
    past = history(store, 6)
    assert snapshot(store, keep=2) == snapshot_folder(path) / f"r{store.revision:010d}.sqlite"
    at = store.revision
    state = look(store, past[at], [""], step=99)
    assert snapshot(store, keep=2).exists()
    snapshot(store, keep=1)
    assert [p.name for p in snapshot_folder(path).iterdir()] == [f"r{state.revision:010d}.sqlite"]
    assert snapshot(store, keep=0) is None
    store.close()
    path.write_bytes(b"not a database at all" * 400)
    store, recovery = open_or_recover(path)
    assert (store.load(), recovery.source) == (state, f"r{state.revision:010d}.sqlite")
    store.close()


def test_without_any_good_state_there_is_an_error_and_the_file_stays(tmp_path):
    path = tmp_path / "bank.sqlite"
    path.write_bytes(b"not a database at all" * 400)
    with pytest.raises(StoreDamaged, match="neither its log nor a snapshot"):
        open_or_recover(path)
    assert path.read_bytes() == b"not a database at all" * 400
    assert [p.name for p in tmp_path.iterdir()] == ["bank.sqlite"]


def test_a_foreign_database_is_not_touched(tmp_path):
    path = tmp_path / "bank.sqlite"
    tamper(path, "CREATE TABLE mine (a)")
    with pytest.raises(StoreError, match="something else") as caught:
        open_or_recover(path)
    assert not isinstance(caught.value, StoreDamaged)


def test_reading_only_changes_no_byte_beside_a_writer_and_without_one(copy):
    path, past = copy
    before = path.read_bytes()
    store = Store.open(path, read_only=True)
    assert store.load() == past[max(past)]
    with pytest.raises(StoreError, match="readonly"):
        store.save_buffer("{}")
    store.close()
    assert path.read_bytes() == before
    path.chmod(0o444)
    path.parent.chmod(0o555)
    try:
        store = Store.open(path, read_only=True)
        assert store.load() == past[max(past)]
        store.close()
    finally:
        path.parent.chmod(0o755)


def columns():
    made = sqlite3.connect(":memory:")
    create(made)
    tables = ("meta", "ops", "entries", "usage", "transfer", "guided", "embeddings", "generations", "buffer")
    return [(table, row[1]) for table in tables for row in made.execute(f"PRAGMA table_info({table})")]


@pytest.mark.parametrize("value", ["'garbage'", "X'fffe'", "'[[1]]'"])
def test_X14_a_value_of_another_kind_is_damage_and_nothing_else(copy, tmp_path, value):
    """In every column: a verdict, and a store that opens or a StoreError; never another exception."""
    path, _ = copy
    for n, (table, column) in enumerate(columns()):
        broken = tmp_path / f"{n}.sqlite"
        shutil.copy(path, broken)
        try:
            tamper(broken, f"UPDATE {table} SET {column}={value} WHERE rowid=(SELECT max(rowid) FROM {table})")
        except sqlite3.Error:  # refused by the column
            continue
        with contextlib.suppress(StoreError, sqlite3.DatabaseError):
            store = Store.open(broken, read_only=True)
            verify(store)
            store.close()
        with contextlib.suppress(StoreError):
            open_or_recover(broken)[0].close()
        with contextlib.suppress(StoreError):
            recover(broken)
        if table not in ("meta", "generations"):  # what nothing else holds is lost
            store = Store.open(broken, read_only=True)
            assert not verify(store).faults, (table, column)
            store.close()


def test_a_log_that_cannot_be_read_in_its_folder_is_not_passed_over(copy, monkeypatch):
    path, _ = copy
    pathlib.Path(f"{path}-wal").write_bytes(b"changes")
    real = sqlite3.connect

    def refused(*args, **kwargs):
        if "mode=ro" in args[0]:
            raise sqlite3.OperationalError("unable to open database file")
        return real(*args, **kwargs)

    monkeypatch.setattr(sqlite3, "connect", refused)
    with pytest.raises(StoreError, match="holds changes of its own: copy both"):
        Store.open(path, read_only=True)


def test_a_log_of_another_bank_costs_nothing_that_is_in_the_file(copy, tmp_path):
    path, past = copy
    other = Store.open(tmp_path / "other.sqlite")
    history(other, rounds=3)
    other.read(lambda db: db.execute("PRAGMA wal_checkpoint(TRUNCATE)"))
    other.put_vectors({f"x{n}": np.ones(400) for n in range(30)}, fingerprint="f")
    shutil.copy(tmp_path / "other.sqlite-wal", f"{path}-wal")
    other.close()
    store, done = open_or_recover(pathlib.Path(path))
    assert done is not None
    assert (store.revision, verify(store).faults) == (max(past), ())
    store.close()
