"""Snapshots beside the work: what they hold, who waits for them, and what becomes of an error."""

import asyncio
import sqlite3
import threading

import pytest
from manager_toys import build, run, teach, texts

from crl_jax.experience import snapshot_thread
from crl_jax.experience.recover import snapshot_folder
from crl_jax.experience.store import Store, StoreError
from crl_jax.experience.store_connect import copy_whole
from crl_jax.experience.verify import verify


def test_a_snapshot_is_of_the_checkpoint_although_the_bank_is_written_while_it_is_made(tmp_path, monkeypatch):
    path, gate = tmp_path / "bank.sqlite", threading.Event()

    def held_up(source, target):
        assert gate.wait(20)
        copy_whole(source, target)

    monkeypatch.setattr(snapshot_thread, "copy_whole", held_up)

    async def story():
        async with build(store=Store.open(path), snapshots=1) as manager:
            await teach(manager, "one", "two")
            saved = await asyncio.wait_for(manager.checkpoint(), 10)
            await teach(manager, "three")  # neither the checkpoint nor a write waits
            made = snapshot_folder(path) / f"r{saved['revision']:010d}.sqlite"
            assert not made.exists()
            waiting = asyncio.ensure_future(manager.snapshot_made())
            await asyncio.sleep(0.05)
            assert not waiting.done()
            gate.set()
            await asyncio.wait_for(waiting, 10)
            assert len(texts(manager)) == 3
            copy = Store.open(made, read_only=True)
            assert (copy.revision, [e.text for e in copy.load().space("room").values()]) == (saved["revision"], ["one", "two"])
            assert (copy.load_buffer(), verify(copy).faults) == (saved["buffer"], ())
            copy.close()
            again = await manager.checkpoint()
        assert [p.name for p in snapshot_folder(path).glob("*.sqlite")] == [f"r{again['revision']:010d}.sqlite"], "closing waits for it"

    run(story())


def test_K04_a_disk_that_refuses_a_snapshot_is_told_once_and_leaves_nothing(tmp_path, monkeypatch):
    path = tmp_path / "bank.sqlite"

    def full(source, target):
        raise sqlite3.OperationalError("database or disk is full")

    async def story():
        async with build(store=Store.open(path), snapshots=1) as manager:
            await teach(manager, "one")
            monkeypatch.setattr(snapshot_thread, "copy_whole", full)
            await manager.checkpoint()
            with pytest.raises(StoreError, match=r"disk is full.*free its disk, or switch snapshots off"):
                await manager.snapshot_made()
            monkeypatch.undo()
            await manager.checkpoint()
            await manager.snapshot_made()
        assert len(list(snapshot_folder(path).iterdir())) == 1

    run(story())
