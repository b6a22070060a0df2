"""ls, show, stats, time travel: what is printed, and that nothing is changed by looking."""

import hashlib
import json
import shutil
import sqlite3

import pytest

from crl_jax import cli
from crl_jax.bank_tools.listing import printable
from crl_jax.experience.store import Store


def bank(*words):
    return cli.main(["bank", *map(str, words)])


def said(capsys, *words, code=0):
    assert bank(*words) == code
    return capsys.readouterr().out.splitlines()


def as_json(capsys, *words):
    return [json.loads(line) for line in said(capsys, *words, "--json")]


def test_ls_filters_and_sorts(made, capsys):
    folder, ids = made
    assert len(said(capsys, "ls", folder)) == 5
    newest = as_json(capsys, "ls", folder)
    assert [row["id"] for row in newest] == sorted((row["id"] for row in newest), reverse=True)
    assert as_json(capsys, "ls", folder, "--sort", "used", "--limit", 1)[0]["id"] == ids["both"]
    assert as_json(capsys, "ls", folder, "--sort", "useful")[0]["id"] == ids["both"]  # 2 of 3: utility 0.6, the unread have 0.5
    assert {row["namespace"] for row in as_json(capsys, "ls", folder, "--namespace", "kitchen")} == {"kitchen"}
    assert [row["text"] for row in as_json(capsys, "ls", folder, "--text", "RED DOOR")] == ["open the red door"]
    assert len(as_json(capsys, "ls", folder, "--text", ids["red"])) == 1
    gone = [row for row in as_json(capsys, "ls", folder, "--retired") if not row["live"]]
    assert {row["id"] for row in gone} == {ids[name] for name in ("north", "south", "east", "wrong")}
    assert "... and 4 more (--limit 0 shows all)" in said(capsys, "ls", folder, "--limit", 1)


def test_a_retired_entry_keeps_the_counts_of_its_episodes(made, capsys):
    folder, ids = made
    rows = {row["id"]: row for row in as_json(capsys, "ls", folder, "--retired")}
    assert (rows[ids["east"]]["usage"]["shown"], rows[ids["east"]]["usage"]["succeeded"]) == (2, 1)


def test_text_of_a_model_cannot_move_the_cursor(made, capsys):
    folder, ids = made
    for words in (("ls", folder), ("show", folder, ids["nasty"]), ("why", folder, ids["nasty"])):
        assert "\x1b" not in "".join(said(capsys, *words))
    assert printable("a\x1b[0m\r\u202eb\nc\td") == "a�[0m��b\nc\td"


def test_looking_changes_no_byte_and_works_while_a_run_writes(made, capsys, tmp_path):
    folder, ids = made
    writer = Store.open(folder / "bank.sqlite")  # as a run has it
    writer.put_inbox({"e": "waiting"})  # something that is in the write-ahead log only
    before = hashlib.sha256((folder / "bank.sqlite").read_bytes()).digest()
    looks = [["ls"], ["stats"], ["show", ids["both"]], ["why", ids["both"]], ["search", "stairs", "--namespace", "cellar"], ["export", "-"]]
    for name, *words in looks:
        assert bank(name, folder, *words) == bank(name, folder, *words, "--revision", 12) == 0, name
    assert bank("verify", folder) == 0
    writer.put_inbox({"f": "not blocked by what was read"})
    assert hashlib.sha256((folder / "bank.sqlite").read_bytes()).digest() == before
    writer.close()
    assert not capsys.readouterr().err


def test_a_killed_run_leaves_a_log_that_looking_does_not_fold_in(made, capsys):
    folder, _ = made
    copy = folder.parent / "killed"
    copy.mkdir()
    writer = Store.open(folder / "bank.sqlite")
    writer.put_inbox({"e": "waiting"})
    for name in ("bank.sqlite", "bank.sqlite-wal"):
        shutil.copy(folder / name, copy / name)
    writer.close()
    before = (copy / "bank.sqlite").read_bytes()
    assert bank("ls", copy) == bank("stats", copy) == bank("ls", copy, "--revision", "2") == 0
    assert (copy / "bank.sqlite").read_bytes() == before


def test_stats_add_up(made, capsys):
    folder, _ = made
    (found,) = as_json(capsys, "stats", folder)
    assert (found["entries"], found["entries_ever"]) == (5, 9)
    assert found["written"] == {"add": 7, "update": 1, "merge": 1}
    assert found["left"] == {"update": 1, "merge": 2, "downvote": 1}
    assert found["success"] == {"with": {"episodes": 7, "succeeded": 4}, "without": {"episodes": 3, "succeeded": 1}}
    assert found["lift"]["cellar"]["own"] == pytest.approx((4 + 1) / (7 + 2) - 1 / 3)
    assert found["lift"]["cellar"]["foreign"] is None
    assert found["redundancy"]["cellar"] == pytest.approx(2 / 3)  # two of three say the same
    assert sum(row["with"][0] for row in found["growth"]) == 7
    assert sum(found["growth"][-1]["entries"].values()) == 5
    assert found["file_bytes"] > 1000
    text = "\n".join(said(capsys, "stats", folder))
    assert "success      0.571 with experience (7 episodes)" in text
    assert "lift         cellar: own +0.222" in text


def test_time_travel_shows_the_bank_as_it_was(made, capsys):
    folder, ids = made
    store = Store.open(folder / "bank.sqlite", read_only=True)
    newest = store.revision
    for revision in range(newest + 1):
        expected = {i for space in store.at_revision(revision).spaces.values() for i in space}
        assert {row["id"] for row in as_json(capsys, "ls", folder, "--revision", revision)} == expected
    usage = store.at_revision(5).usage
    rows = {row["id"]: row for row in as_json(capsys, "ls", folder, "--revision", 5)}
    assert {i: row["usage"]["shown"] for i, row in rows.items()} == {i: usage[i].shown if i in usage else 0 for i in rows}
    store.close()
    assert as_json(capsys, "stats", folder, "--revision", 5)[0]["success"]["with"]["episodes"] == 2
    assert [as_json(capsys, "stats", folder, "--revision", revision)[0]["generations"] for revision in (0, 2, 4, 14)] == [0, 2, 4, 9]
    assert as_json(capsys, "why", folder, ids["south"], "--revision", 5)[0]["left"] is None


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["ls", "nowhere"], 1, "does not exist: give the folder of a run"),
        (["ls", "RUN", "--limit", "-1"], 2, "--limit -1"),
        (["ls", "RUN", "--namespace", "attic"], 1, "no namespace 'attic': there are cellar, kitchen"),
        (["ls", "RUN", "--revision", "99"], 1, "give --revision a number up to 14"),
        (["ls", "RUN", "--revision", "-2"], 2, "revisions count from 0"),
        (["ls", "RUN", "--revision", "9" * 30], 1, "give --revision a number up to 14"),
        (["ls", "x" * 5000], 2, "cannot be looked at (File name too long)"),
        (["import", "x" * 300, "l.jsonl"], 2, "cannot be looked at (File name too long)"),
        (["show", "RUN", "x00000001"], 1, "did you mean x00000001-0?"),
        (["why", "RUN", "nope"], 1, "no entry 'nope'"),
        (["search", "RUN", " ", "--namespace", "cellar"], 2, "give 1 to 4000"),
        (["search", "RUN", "stairs"], 2, "--namespace: there are cellar, kitchen"),
        (["search", "RUN", "stairs", "--namespace", "attic"], 1, "no namespace 'attic'"),
        (["search", "RUN", "stairs", "--k", "0"], 2, "--k 0: give 1 or more"),
        (["stats", "JUNK"], 1, "not a usable experience store"),
    ],
)
def test_a_mistake_is_one_line_with_its_fix(words, code, text, made, capsys):
    folder, _ = made
    junk = folder.parent / "junk.sqlite"
    junk.write_bytes(b"no database at all" * 100)
    assert bank(*[{"RUN": folder, "JUNK": junk}.get(word, word) for word in words]) == code
    out = capsys.readouterr()
    assert text in out.err
    assert len(out.err.splitlines()) == 1
    assert "Traceback" not in out.err


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE entries SET parents='[[1]]'",
        "UPDATE entries SET created_revision='soon'",
        "UPDATE entries SET episode_ids=X'fffe'",
        "UPDATE ops SET step='late' WHERE seq=9",
        "UPDATE ops SET problems='none' WHERE seq=9",
        "UPDATE usage SET shown=X'fffe'",
        "DELETE FROM meta",
    ],
)
def test_a_damaged_value_is_one_line_for_every_command(change, made, tmp_path, capsys):
    folder, ids = made
    db = sqlite3.connect(folder / "bank.sqlite")
    db.execute(change)
    db.commit()
    db.close()
    (tmp_path / "l.jsonl").write_text('{"text": "new", "namespace": "cellar"}')
    told = 0
    for words in (
        ["ls"], ["show", ids["both"]], ["why", ids["both"]], ["stats"], ["search", "x", "--namespace", "cellar"], ["export", "-"],
        ["ls", "--revision", "3"], ["consolidate", "--dedup-only"], ["import", str(tmp_path / "l.jsonl")], ["compact"],
    ):  # fmt: skip
        if bank(words[0], folder, *words[1:]):
            err = capsys.readouterr().err
            assert len(err.splitlines()) == 1, err
            assert "crl bank repair" in err
            told += 1
    assert told
    assert bank("verify", folder) == 1
