"""After going back to a checkpoint nothing of the future that was given up comes back."""

import json
import sqlite3

from manager_toys import build, echo, run, teach, texts

from crl_jax.experience.recover import open_or_recover, snapshot_folder
from crl_jax.experience.retrieve import Diversity
from crl_jax.experience.store import Store


def test_a_snapshot_of_an_abandoned_future_is_never_brought_back(tmp_path):
    path = tmp_path / "bank.sqlite"

    async def story():
        async with build(store=Store.open(path), snapshots=3) as manager:
            await teach(manager, "kept")
            saved = json.loads(json.dumps(await manager.checkpoint()))
            await teach(manager, "abandoned one", "abandoned two")
            await manager.checkpoint()
            await manager.restore(saved)
            await teach(manager, "new one")
            before = texts(manager)
            await manager.checkpoint()
            assert [p.name for p in sorted(snapshot_folder(path).iterdir())] == ["r0000000001.sqlite", "r0000000002.sqlite"]
            await teach(manager, "new two")
            await manager.checkpoint()
        return before

    before = run(story())
    db = sqlite3.connect(path)
    db.execute("UPDATE entries SET text='planted'")
    db.execute("UPDATE ops SET text='planted' WHERE revision=3")
    db.commit()
    db.close()
    store, recovery = open_or_recover(path)
    assert recovery is not None
    found = [entry.text for entry in store.load().space("room").values()]
    assert found == [*before, "new two"], "from the snapshot of this future"
    store.close()


def test_draws_after_going_back_are_those_after_the_checkpoint():
    async def story(asked_before: int):
        diversity = Diversity(recent_steps=0, lambda_count=0.0, explore_p=0.5, oversample=8)
        async with build(diversity=diversity) as manager:
            await teach(manager, *(f"word {n}" for n in range(6)))
            manager.on_step(1)
            saved = await manager.checkpoint()
            for _ in range(asked_before):
                await manager.retrieve("room", "word 3")
            await manager.restore(saved)
            return [[shown.id for shown in await manager.retrieve("room", "word 3")] for _ in range(12)]

    assert run(story(0)) == run(story(5))


def test_beginning_again_keeps_what_was_in_the_bank_before_the_run(tmp_path):
    path = tmp_path / "bank.sqlite"

    async def fill(*observations):
        async with build(store=Store.open(path)) as manager:
            await teach(manager, *observations)

    async def again():
        async with build(echo, store=Store.open(path)) as manager:
            await manager.restart()
            return texts(manager)

    run(fill("seeded"))
    store = Store.open(path)
    store.begin_run()
    store.close()
    run(fill("of the run"))
    store = Store.open(path)
    store.begin_run()  # resumed
    store.close()
    assert run(again()) == ["seeded"]
