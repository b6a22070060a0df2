"""Export, import, seed: whole or not at all, and every bad line by its number."""

import fcntl
import json
import os

import pytest
from made_bank import make

from crl_jax import cli
from crl_jax.experience.store import Store, StoreError
from crl_jax.experience.verify import verify


def bank(*words):
    return cli.main(["bank", *map(str, words)])


def entries(path):
    store = Store.open(path, read_only=True)
    try:
        assert not verify(store).faults
        state = store.load()
        return {(e.namespace, e.text, e.outcome): state.usage.get(e.id) for space in state.spaces.values() for e in space.values()}
    finally:
        store.close()


def test_a_bank_goes_through_a_file_and_back(made, tmp_path, capsys):
    folder, _ = made
    file, other = tmp_path / "lessons.jsonl", tmp_path / "other" / "run"
    assert bank("export", folder, file) == 0
    assert bank("import", other, file, "--usage", "--dedup", 0) == 0
    assert "a new bank" in capsys.readouterr().out
    old, new = entries(folder / "bank.sqlite"), entries(other / "bank.sqlite")
    assert set(old) == set(new)
    for key, usage in old.items():
        counted = (usage.shown, usage.succeeded, usage.last_shown_step) if usage else (0, 0, -1)
        now = new[key]
        assert ((now.shown, now.succeeded, now.last_shown_step) if now else (0, 0, -1)) == counted
    store = Store.open(other / "bank.sqlite", read_only=True)
    assert {row["reason"] for row in store.log() if row["kind"] == "add"} == {"import"}
    store.close()


def test_without_usage_only_text_family_and_outcome_come_in(made, tmp_path):
    folder, _ = made
    assert bank("export", folder, tmp_path / "all.jsonl", "--all") == 0
    assert bank("import", tmp_path / "b.sqlite", tmp_path / "all.jsonl", "--dedup", 0) == 0
    found = entries(tmp_path / "b.sqlite")
    assert set(found) == set(entries(folder / "bank.sqlite"))  # those that had left do not come back
    assert set(found.values()) == {None}


def test_duplicates_become_one_entry_within_a_file_and_with_the_bank(made, tmp_path, capsys):
    folder, _ = made
    file = tmp_path / "l.jsonl"
    file.write_text(
        '{"text": "open the red door", "namespace": "kitchen"}\n{"text": "lamp", "namespace": "kitchen"}\n'
        + '{"text": "lamp", "namespace": "kitchen"}\n'
    )
    before = len(entries(folder / "bank.sqlite"))
    assert bank("import", folder, file) == 0
    assert "2 were duplicates" in capsys.readouterr().out
    assert len(entries(folder / "bank.sqlite")) == before + 1


def test_bad_lines_are_named_and_nothing_is_written(made, tmp_path, capsys):
    folder, _ = made
    lines = [
        '{"text": "fine", "namespace": "cellar"}',
        "",
        '{"text": "", "namespace": "a"}',
        '{"text": "x", "namespace": "a", "colour": 1}',
        "[1]",
        '{"text": "x"',
        '{"text": "x", "namespace": "a", "outcome": 1}',
        '{"text": "\\ud800", "namespace": "a"}',
        json.dumps({"text": "x" * 20_001, "namespace": "a"}),
    ]
    file = tmp_path / "bad.jsonl"
    file.write_text("\n".join(lines))
    before = (folder / "bank.sqlite").read_bytes()
    assert bank("import", folder, file) == 2
    (line,) = capsys.readouterr().err.splitlines()
    for number in (3, 4, 5, 6, 7):
        assert f"bad.jsonl:{number}: " in line
    assert "and 2 more lines" in line
    assert (folder / "bank.sqlite").read_bytes() == before
    assert bank("import", tmp_path / "new", file) == 2
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("usage", ['{"shown": 1, "succeeded": 2}', '{"shown": -1}', '{"shown": true}', '{"seen": 1}', "3"])
def test_usage_that_cannot_be_is_refused_when_it_is_wanted(usage, tmp_path, small, capsys):
    file = tmp_path / "l.jsonl"
    file.write_text(f'{{"text": "a", "namespace": "n", "usage": {usage}}}')
    assert bank("import", tmp_path / "b.sqlite", file) == 0
    assert bank("import", tmp_path / "c.sqlite", file, "--usage") == 2
    assert "usage holds whole numbers" in capsys.readouterr().err


def test_an_import_that_fails_in_the_middle_leaves_the_bank_as_it_was(made, tmp_path, monkeypatch, capsys):
    from crl_jax.experience import store_rows

    folder, _ = made
    file = tmp_path / "l.txt"
    file.write_text("".join(f"lesson number {n}\n" for n in range(20)))
    before, real, calls = entries(folder / "bank.sqlite"), store_rows.log_change, []

    def breaks(db, change):
        calls.append(change)
        if len(calls) == 12:
            raise StoreError("the disk is full: make room")
        real(db, change)

    monkeypatch.setattr(store_rows, "log_change", breaks)
    assert bank("import", folder, file, "--namespace", "cellar") == 1
    assert "make room" in capsys.readouterr().err
    assert entries(folder / "bank.sqlite") == before


def test_seed_reads_plain_lines_and_asks_for_a_family(made, tmp_path, capsys):
    folder, _ = made
    file = tmp_path / "lessons.txt"
    file.write_text("look behind the curtain\n\n  never eat the cheese \n")
    assert bank("seed", folder, file) == 2
    assert "--namespace" in capsys.readouterr().err
    assert bank("seed", folder, file, "--namespace", "attic") == 0
    assert ("attic", "never eat the cheese", None) in entries(folder / "bank.sqlite")
    store = Store.open(folder / "bank.sqlite", read_only=True)
    assert [row["reason"] for row in store.log()][-2:] == ["seed", "seed"]
    store.close()


def test_a_bank_that_another_process_writes_is_read_but_not_written(made, tmp_path, capsys):
    folder, _ = made
    file = tmp_path / "l.txt"
    file.write_text("one")
    with (folder / "bank.sqlite.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for words in (
            ["import", folder, file, "--namespace", "a"],
            ["compact", folder],
            ["repair", folder],
            ["consolidate", folder, "--dedup-only"],
        ):
            assert bank(*words) == 2
            assert "another process writes" in capsys.readouterr().err
        assert bank("ls", folder) == bank("snapshot", folder) == bank("consolidate", folder, "--dry-run") == 0


def test_export_does_not_write_over_a_file_unasked(made, tmp_path, capsys):
    folder, _ = made
    file = tmp_path / "out.jsonl"
    file.write_text("mine")
    assert bank("export", folder, file) == 2
    assert file.read_text() == "mine"
    assert bank("export", folder, file, "--overwrite", "--namespace", "kitchen") == 0
    assert {json.loads(line)["namespace"] for line in file.read_text().splitlines()} == {"kitchen"}
    capsys.readouterr()
    assert bank("export", folder, "-") == 0
    assert len(capsys.readouterr().out.splitlines()) == 5
    assert bank("export", folder, tmp_path / "no" / "such" / "folder.jsonl") == 2


@pytest.mark.parametrize("name", ["bank.sqlite", "bank.sqlite-wal", "bank.sqlite.lock", "linked", "../other.sqlite"])
def test_an_export_never_replaces_a_bank(name, made, tmp_path, capsys):
    folder, _ = made
    make(tmp_path / "other.sqlite")
    (folder / "linked").symlink_to(folder / "bank.sqlite")
    before = (folder / "bank.sqlite").read_bytes()
    assert bank("export", folder, folder / name, "--overwrite") == 2
    assert "give another name" in capsys.readouterr().err
    assert (folder / "bank.sqlite").read_bytes() == before


def test_an_export_replaces_no_folder_and_no_device(made, tmp_path, capsys):
    folder, _ = made
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for target in (pipe, tmp_path):
        assert bank("export", folder, target, "--overwrite") == 2
        assert "is no file" in capsys.readouterr().err
    assert pipe.is_fifo()


def test_a_field_that_is_there_twice_is_not_guessed(tmp_path, small, capsys):
    file = tmp_path / "l.jsonl"
    file.write_text('{"text": "one", "text": "two", "namespace": "n"}\n')
    assert bank("import", tmp_path / "b.sqlite", file) == 2
    assert "l.jsonl:1: not JSON: a field is there twice" in capsys.readouterr().err
