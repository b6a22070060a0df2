"""Durability: replay equals the materialised state, nothing acknowledged is lost, nothing damaged is matched, nothing in a file runs."""

import dataclasses
import pathlib
import pickle
import signal
import sqlite3
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crl_jax.experience import bank, bank_json
from crl_jax.experience.bank import Author, BankState, Guided
from crl_jax.experience.snapshot import copy_of
from crl_jax.experience.store import Change, Observation, Store, StoreError
from crl_jax.experience.verify import verify
from crl_jax.records import BankOp, Generation, GenerationKind, OpKind

GENERATION = Generation("g1", GenerationKind.MERGE, (5, 6), (7, 8, 0), (-0.5, -1.25, -0.0), (3, 3, 4), 9, "broken")


def write(store, state, op, *, namespace="room", inherit_usage=False, generations=()):
    author = Author("g1", 2, 4, ("e1", "e2"))
    done = bank.apply(state, op, namespace=namespace, author=author, inherit_usage=inherit_usage)
    vectors = {done.written.id: np.full(3, done.state.revision, np.float32)} if done.written else {}
    change = Change(state.revision, op, namespace, author, 0, done, inherit_usage)
    store.commit([change], vectors=vectors, fingerprint="f", generations=generations)
    return done.state


def look(store, state, shown, step):
    known = [g for g in shown if not g.experience_id or state.find(g.experience_id)]
    after = bank.observe(state, shown, step=step, decay=0.97)
    if after is not state:
        store.commit([Observation(state.revision, tuple(known), step, after, 0.97)])
    return after


def ordered(state: BankState):
    """Everything, in order: plain equality of mappings would ignore the order of entries."""
    spaces = {name: list(space.items()) for name, space in state.spaces.items()}
    return spaces, dict(state.usage), dict(state.transfer), state.revision


STEPS = st.lists(
    st.tuples(st.sampled_from([*OpKind, "observe"]), st.sampled_from(["a", "b"]), st.lists(st.integers(0, 12), max_size=3), st.booleans()),
    max_size=25,
)


@settings(max_examples=40, deadline=None)
@given(STEPS, st.data())
def test_replay_and_rewind_equal_the_history(steps, data):
    store, state = Store.open(":memory:"), BankState()
    store.commit([], generations=[GENERATION])
    history, ids = {0: state}, []
    for kind, namespace, picks, flag in steps:
        targets = tuple(ids[p % len(ids)] for p in picks) if ids else ()
        if kind == "observe":
            seen = [Guided(target, flag, f"e{n}", "a", 0.5) for n, target in enumerate(targets)] + [Guided("", flag, "free", namespace)]
            state = look(store, state, seen, len(ids))
        else:
            state = write(store, state, BankOp(kind, f"text {state.revision}", targets), namespace=namespace, inherit_usage=flag)
        history[state.revision] = state
        ids += [i for space in state.spaces.values() for i in space if i not in ids]
        assert ordered(store.load()) == ordered(state)
        assert bank_json.to_json(store.load()) == bank_json.to_json(state)
        assert bank_json.from_json(bank_json.to_json(state)) == state
    assert verify(store).faults == ()
    for revision, past in history.items():
        assert ordered(store.at_revision(revision)) == ordered(past)
    back = data.draw(st.sampled_from(sorted(history)))
    assert ordered(store.rewind(back)) == ordered(history[back]) == ordered(store.load())
    after = write(store, store.load(), BankOp(OpKind.ADD, "another future"), namespace="a")
    assert ordered(store.load()) == ordered(store.at_revision(back + 1)) == ordered(after)
    assert set(store.vectors(fingerprint="f", dim=3)[0]) == {i for space in after.spaces.values() for i in space}
    assert len(store.log(abandoned=True)) >= len(store.log())
    assert verify(store).faults == ()
    store.close()


def test_a_copy_goes_its_own_way_and_leaves_the_file_alone(tmp_path):
    store = Store.open(tmp_path / "bank.sqlite")
    state = write(store, BankState(), BankOp(OpKind.ADD, "kept"), generations=[GENERATION])
    copy = copy_of(tmp_path / "bank.sqlite")  # while the file is open elsewhere
    assert ordered(copy.load()) == ordered(state)
    copy.rewind(0)
    assert len(copy.load()) == 0
    assert ordered(store.load()) == ordered(state)
    copy.close()
    store.close()
    with pytest.raises(StoreError, match="does not exist"):
        copy_of(tmp_path / "other.sqlite")
    assert not (tmp_path / "other.sqlite").exists()


def test_everything_survives_closing(tmp_path):
    store = Store.open(tmp_path / "bank.sqlite", synchronous="full")
    state = write(store, BankState(), BankOp(OpKind.ADD, "été ‹x› 😀"), generations=[GENERATION])
    store.save_buffer('{"a": 1}')
    store.close()
    again = Store.open(tmp_path / "bank.sqlite")
    assert ordered(again.load()) == ordered(state)
    assert again.generation("g1") == GENERATION
    assert (again.load_buffer(), again.generation_count(), again.revision) == ('{"a": 1}', 1, 1)
    np.testing.assert_array_equal(again.vectors(fingerprint="f", dim=3)[0]["x00000001-0"], [1, 1, 1])
    assert again.vectors(fingerprint="another embedder", dim=3) == ({}, 0)
    with pytest.raises(KeyError):
        again.generation("g2")
    again.close()


def test_retired_entries_still_name_their_generation():
    store = Store.open(":memory:")
    state = write(store, BankState(), BankOp(OpKind.ADD, "a"))
    write(store, state, BankOp(OpKind.UPDATE, "b", ("x00000001-0",)))
    assert store.experience("x00000001-0").generation_id == "g1"
    assert store.experience("never") is None


def test_a_change_from_a_stale_state_is_refused_whole():
    store = Store.open(":memory:")
    state = write(store, BankState(), BankOp(OpKind.ADD, "a"))
    with pytest.raises(StoreError, match="revision 1"):
        write(store, BankState(), BankOp(OpKind.ADD, "b"), generations=[GENERATION])
    assert ordered(store.load()) == ordered(state)
    assert store.generation_count() == 0
    with pytest.raises(ValueError, match="never was at revision 7"):
        store.at_revision(7)


def test_X14_damaged_files_are_refused_and_damaged_vectors_left_out(tmp_path):
    path = tmp_path / "bank.sqlite"
    store, state = Store.open(path), BankState()
    for text in ("a", "b", "c"):
        state = write(store, state, BankOp(OpKind.ADD, text))
    store.close()
    with sqlite3.connect(path) as db:
        db.execute("UPDATE embeddings SET vector=(SELECT vector FROM embeddings WHERE id='x00000002-0') WHERE id='x00000001-0'")
        db.execute("UPDATE embeddings SET vector=x'00' WHERE id='x00000003-0'")
    store = Store.open(path)
    vectors, damaged = store.vectors(fingerprint="f", dim=3)
    assert (list(vectors), damaged) == (["x00000002-0"], 2)
    store.close()
    data = bytearray(path.read_bytes())
    data[4096:] = b"\x5a" * (len(data) - 4096)
    path.write_bytes(data)
    with pytest.raises(StoreError, match="restore a backup"):
        Store.open(path)
    path.write_bytes(b"not a database at all" * 300)
    with pytest.raises(StoreError, match="restore a backup"):
        Store.open(path)
    other = tmp_path / "other.sqlite"
    with sqlite3.connect(other) as db:
        db.execute("CREATE TABLE things (x)")
    with pytest.raises(StoreError, match="something else"):
        Store.open(other)


def test_Z02_no_file_of_a_store_can_run_code(tmp_path):
    class Evil:
        def __reduce__(self):
            return pathlib.Path.touch, (tmp_path / "ran",)

    (tmp_path / "bank.sqlite").write_bytes(pickle.dumps(Evil()) * 50)
    with pytest.raises(StoreError):
        Store.open(tmp_path / "bank.sqlite")
    store, state = Store.open(tmp_path / "good.sqlite"), BankState()
    write(store, state, BankOp(OpKind.ADD, "a"), generations=[GENERATION])
    store.close()
    with sqlite3.connect(tmp_path / "good.sqlite") as db:
        for table, columns in [("embeddings", ["vector"]), ("generations", ["prompt_ids", "logps"])]:
            for column in columns:
                db.execute(f"UPDATE {table} SET {column}=?", (pickle.dumps(Evil()),))
    store = Store.open(tmp_path / "good.sqlite")
    assert store.vectors(fingerprint="f", dim=3) == ({}, 1)
    with pytest.raises(StoreError, match="damaged"):
        store.generation("g1")
    assert not (tmp_path / "ran").exists()
    sources = pathlib.Path(bank.__file__).parent.glob("*.py")
    assert not [p for p in sources if "import pickle" in p.read_text() or "allow_pickle" in p.read_text()]


WRITER = """
import sys
import numpy as np
from crl_jax.experience import bank
from crl_jax.experience.bank import Author, BankState
from crl_jax.experience.store import Change, Store
from crl_jax.records import BankOp, OpKind

store, state = Store.open(sys.argv[1]), BankState()
while True:
    author, changes, vectors = Author("", 0, 0), [], {}
    for k in range(3):
        op = BankOp(OpKind.ADD, f"text {state.revision}")
        done = bank.apply(state, op, namespace="room", author=author, op_index=k)
        changes.append(Change(state.revision, op, "room", author, k, done))
        vectors[done.written.id] = np.ones(4, np.float32)
        state = done.state
    store.commit(changes, vectors=vectors, fingerprint="f")
    print(state.revision, flush=True)
"""


def test_acknowledged_operations_survive_kill_9(tmp_path):
    path = tmp_path / "bank.sqlite"
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(WRITER), str(path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline(), "the first batch was acknowledged"
        time.sleep(np.random.default_rng().uniform(0.05, 0.3))  # any moment will do
        process.send_signal(signal.SIGKILL)
        lines = [line for line in process.stdout.read().split("\n") if line]
    acknowledged = int(lines[-1]) if lines else 3
    store = Store.open(path)
    state = store.load()
    assert state.revision >= acknowledged
    assert state.revision % 3 == 0, "a batch is there as a whole or not at all"
    assert [entry.text for entry in state.space("room").values()] == [f"text {n}" for n in range(state.revision)]
    assert ordered(store.at_revision(state.revision)) == ordered(state)
    assert len(store.vectors(fingerprint="f", dim=4)[0]) == state.revision
    store.close()


def test_a_full_disk_is_named_and_what_was_acknowledged_stays(tmp_path):
    path = tmp_path / "bank.sqlite"
    store, state = Store.open(path), BankState()
    pages = store._db.execute("PRAGMA page_count").fetchone()[0]
    store._db.execute(f"PRAGMA max_page_count={pages + 2}")  # SQLite's own way to be out of space
    long = BankOp(OpKind.ADD, "long " * 4000)
    with pytest.raises(StoreError, match=r"bank\.sqlite was not written .*disk is full.*free its disk"):
        write(store, state, long)
    assert ordered(store.load()) == ordered(state)
    store._db.execute(f"PRAGMA max_page_count={pages + 100}")
    state = write(store, state, BankOp(OpKind.ADD, "there is room again"))
    store.close()
    again = Store.open(path)
    assert ordered(again.load()) == ordered(state)
    again.close()


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(StoreError, match=r"nowhere/bank\.sqlite cannot be opened .*folder"):
        Store.open(tmp_path / "nowhere" / "bank.sqlite")


def test_the_newest_generation_is_known_although_numbers_are_missing():
    store = Store.open(":memory:")
    assert store.newest_generation() == 0
    made = [dataclasses.replace(GENERATION, id=f"g{n:08d}") for n in (2, 12, 7)]
    write(store, BankState(), BankOp(OpKind.ADD, "a"), generations=made)
    assert (store.newest_generation(), store.generation_count()) == (12, 3)
