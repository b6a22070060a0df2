"""verify, repair, compact, snapshot, consolidate."""

import asyncio
import contextlib
import json
import sqlite3

import numpy as np
import pytest
from experience_toys import episode
from manager_toys import NOTHING, build, echo, merging

from crl_jax import cli
from crl_jax.bank_tools import offline
from crl_jax.checkpoint import store as checkpoints
from crl_jax.config.schema import Config
from crl_jax.experience.merging import MergePolicy
from crl_jax.experience.store import Store
from crl_jax.experience.verify import verify
from crl_jax.rollout.shell import Shell
from crl_jax.run_files import CONFIG


def bank(*words):
    return cli.main(["bank", *map(str, words)])


def state(folder):
    store = Store.open(folder / "bank.sqlite", read_only=True)
    try:
        assert not verify(store).faults
        return store.load()
    finally:
        store.close()


def texts(folder):
    return sorted(entry.text for space in state(folder).spaces.values() for entry in space.values())


def damage(path):
    data = bytearray(path.read_bytes())
    at = data.index(b"the stairs lie east of the well")
    data[at : at + 3] = b"THE"
    path.write_bytes(data)


def test_verify_says_whole_or_names_the_fault(made, capsys):
    folder, _ = made
    assert bank("verify", folder) == 0
    assert "is whole: revision 14" in capsys.readouterr().out
    damage(folder / "bank.sqlite")
    assert bank("verify", folder) == 1
    assert "crl bank repair" in capsys.readouterr().out
    assert bank("verify", folder, "--json") == 1
    assert not json.loads(capsys.readouterr().out)["whole"]


def test_repair_brings_the_last_snapshot_back_and_leaves_a_whole_bank_alone(made, capsys):
    folder, _ = made
    assert bank("snapshot", folder) == bank("repair", folder) == 0
    assert "nothing to repair" in capsys.readouterr().out
    before = texts(folder)
    damage(folder / "bank.sqlite")
    assert bank("repair", folder) == 0
    assert "the damaged file is kept as bank.sqlite.damaged-1" in capsys.readouterr().out
    assert texts(folder) == before


def test_compact_keeps_the_present_and_names_what_is_gone(made, capsys):
    folder, ids = made
    before = texts(folder)
    assert bank("compact", folder, "--keep-revision", 99) == 2
    assert bank("compact", folder, "--keep-revision", 8) == 0
    assert bank("compact", folder) == 0
    assert texts(folder) == before
    capsys.readouterr()
    assert bank("ls", folder, "--revision", 5) == 1
    assert "the oldest that is left is 14" in capsys.readouterr().err
    assert bank("why", folder, ids["both"]) == bank("stats", folder) == 0
    assert "its operation was compacted away" in capsys.readouterr().out


def test_compact_keeps_what_the_buffers_of_checkpoints_wait_with(tmp_path, small):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / CONFIG).write_text("run: {name: run}\n")

    async def played():
        store = Store.open(folder / "bank.sqlite")
        async with build(lambda prompt: "not JSON" if "unclear" in prompt else echo(prompt), store=store) as manager:
            await manager.submit(episode("e", observation="a lesson"))
            for n in range(3):
                await manager.submit(episode(f"e{n}", observation="unclear"))
            await manager.drain(10)
            saved = await manager.checkpoint()
            checkpoints.save(folder / "checkpoints", 1, {"actor": np.zeros(1, np.float32)}, {"bank": saved})
            await manager.pop_batch()
        store.close()
        return saved

    saved = asyncio.run(played())
    assert bank("compact", folder) == 0

    async def resumed():
        async with build(store=Store.open(folder / "bank.sqlite")) as manager:
            await manager.restore(saved)
            return [sample.generation.id for sample in await manager.pop_batch()]

    assert asyncio.run(resumed()) == ["g00000002", "g00000003"]


def test_a_dry_run_shows_groups_and_changes_nothing(made, capsys):
    folder, _ = made
    before = (folder / "bank.sqlite").read_bytes()
    assert bank("consolidate", folder, "--dry-run") == 0
    out = capsys.readouterr().out
    assert "duplicates (cosine 0.95 or more): 1 groups of 2 entries" in out
    assert out.count("the stairs lie north") == 4
    assert (folder / "bank.sqlite").read_bytes() == before
    assert bank("consolidate", folder, "--near", "1.5") == 2


def test_dedup_only_joins_duplicates_with_their_usage_and_needs_no_model(made, capsys):
    folder, _ = made
    assert bank("consolidate", folder) == 2
    assert "--config FILE" in capsys.readouterr().err
    assert len(texts(folder)) == 5
    assert bank("consolidate", folder, "--dedup-only") == 0
    out = capsys.readouterr().out
    assert "before: 5 entries" in out
    assert "after:  4 entries" in out
    assert texts(folder).count("the stairs lie north") == 1


@pytest.mark.parametrize("reply", [merging, lambda prompt: "broken", lambda prompt: NOTHING], ids=["merges", "unreadable", "silent"])
def test_merging_by_a_model_that_fails_loses_nothing(reply, made, capsys, monkeypatch):
    folder, _ = made
    monkeypatch.setattr(offline, "recipe", lambda place, config: Config())

    @contextlib.contextmanager
    def opened(place, config, *, purpose):
        store = Store.open(place.path)
        with Shell() as shell:
            manager = build(reply, store=store, merge=MergePolicy(0, cosine=0.3), purpose=purpose)
            shell.call(manager.start(), 20, "start")
            yield offline.Offline(manager, shell, 20.0, "scripted")
            shell.call(manager.aclose(), 20, "end")
        store.close()

    monkeypatch.setattr(offline, "opened", opened)
    code = bank("consolidate", folder, "--near", 0.3)
    out = capsys.readouterr().out
    left = " ".join(texts(folder))
    for word in ("north", "red", "alert(1)"):
        assert word in left
    if reply is merging:
        assert code == 0
        assert len(texts(folder)) < 4
        store = Store.open(folder / "bank.sqlite", read_only=True)
        assert {row["reason"] for row in store.log() if row["kind"] == "merge"} == {"", "consolidate"}
        store.close()
    else:
        assert code == 1
        assert "after:  4 entries" in out  # one pair of duplicates became one


@pytest.mark.parametrize("change", ["UPDATE meta SET value='3' WHERE key='format'", "DROP TABLE ops"])
def test_repair_leaves_a_foreign_file_and_one_of_another_version_alone(change, made, capsys):
    folder, _ = made
    db = sqlite3.connect(folder / "bank.sqlite")
    db.execute(change)
    db.commit()
    db.close()
    before = (folder / "bank.sqlite").read_bytes()
    assert bank("repair", folder) == 1
    assert "crl: " in capsys.readouterr().err
    assert (folder / "bank.sqlite").read_bytes() == before
    assert not list(folder.glob("*.damaged-*"))


def test_a_bank_that_was_emptied_comes_back_from_its_snapshot(made, capsys):
    folder, _ = made
    assert bank("snapshot", folder) == 0
    for part in folder.glob("bank.sqlite*"):
        part.unlink()
    (folder / "bank.sqlite").touch()
    assert bank("repair", folder) == 0
    assert "revision 14" in capsys.readouterr().out
    assert bank("verify", folder) == 0


def test_repair_ends_one_that_was_killed_between_its_last_moves(made, capsys):
    folder, _ = made
    path = folder / "bank.sqlite"
    whole = path.read_bytes()
    path.rename(folder / "bank.sqlite.damaged-1")
    (folder / "bank.sqlite.salvaged").write_bytes(whole)
    assert bank("ls", folder) == 1
    assert "does not exist" in capsys.readouterr().err
    assert bank("repair", folder) == 0
    assert "kept as bank.sqlite.damaged-1" in capsys.readouterr().out
    assert path.read_bytes() == whole
    assert bank("verify", folder) == 0
