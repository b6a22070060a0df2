"""After going back to a checkpoint nothing of the future that was given up comes back."""

import asyncio
import json
import sqlite3

import numpy as np
import pytest
from experience_toys import HashEmbedder
from manager_toys import NOTHING, build, echo, run, teach, texts

from crl_jax.experience.carry import Carry
from crl_jax.experience.index import ExactIndex
from crl_jax.experience.recover import open_or_recover, snapshot_folder
from crl_jax.experience.retrieve import Diversity
from crl_jax.experience.store import Store
from crl_jax.experience.verify import verify


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
            await manager.snapshot_made()
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


def nothing_new(prompt):
    return NOTHING if "dull" in prompt else echo(prompt)


def told(path, played, cut=None):
    """The bank after ``played``; with ``cut`` it was left after so many, in the middle of what came next, and taken up by another process
    at its checkpoint."""

    async def life(resumed, lessons, *lost):
        async with build(nothing_new, store=Store.open(path), in_turn=True) as manager:
            if resumed is not None:
                await manager.restore(json.loads(resumed))
            await teach(manager, *lessons)
            saved = json.dumps(await manager.checkpoint())
            await teach(manager, *lost)
        return saved

    if cut is None:
        return run(life(None, played))
    saved = run(life(None, played[:cut], "dull lost one", "lost two", "dull lost three"))
    return run(life(saved, played[cut:]))


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_K02_a_bank_that_went_back_is_the_same_as_one_that_never_left(cut, tmp_path):
    """Ids of generations and rows of the log that changed nothing at the very revision of the checkpoint are part of that."""
    played = ("one", "dull two", "three", "dull four", "five")
    (tmp_path / "whole").mkdir()
    (tmp_path / "mended").mkdir()
    whole = json.loads(told(tmp_path / "whole" / "b.sqlite", played))
    mended = json.loads(told(tmp_path / "mended" / "b.sqlite", played, cut))
    assert mended["carry"].pop("log_row") == whole["carry"].pop("log_row") + 3, "what was given up stays in the log"
    assert mended == whole
    queries = (
        "SELECT * FROM entries",
        "SELECT * FROM generations WHERE id NOT LIKE '%~%' ORDER BY id",
        "SELECT kind, revision, text, generation_id FROM ops WHERE abandoned=0 ORDER BY seq",
        "SELECT * FROM embeddings ORDER BY id",
        "SELECT * FROM buffer",
    )
    for query in queries:
        one, two = (sqlite3.connect(tmp_path / name / "b.sqlite").execute(query).fetchall() for name in ("whole", "mended"))
        assert one == two, query
    store = Store.open(tmp_path / "mended" / "b.sqlite")
    assert verify(store).faults == ()
    assert store.generation_count() == len(played) + 3
    store.close()


def test_K02_the_vector_of_a_query_depends_on_its_text_alone():
    """The cache of another process is empty, so it embeds other texts together."""

    async def calls(*asked):
        embedder = HashEmbedder()
        async with build(in_turn=True, embedder=embedder) as manager:
            await teach(manager, "north")
            before = len(embedder.calls)
            await asyncio.gather(*(manager.retrieve("room", text) for text in asked))
            return embedder.calls[before:]

    assert sorted(run(calls("a", "b", "c"))) == [["a"], ["b"], ["c"]]


@pytest.mark.parametrize("wrong", [[], {"generations": -1}, {"generations": 1, "too_long_in_row": 0, "longest": [0], "redundancy": {}}])
def test_a_carry_that_no_manager_saved_is_refused(wrong):
    with pytest.raises(ValueError, match="no saved state of a manager"):
        Carry.from_json(wrong)
    assert Carry.from_json(None) == Carry()
    full = Carry(3, 1, (5, 9), {"room": 0.5}, 7)
    assert Carry.from_json(json.loads(json.dumps(full.to_json()))) == full


@pytest.mark.parametrize("seed", range(4))
def test_K02_equal_entries_are_equals_wherever_they_lie_in_an_index(seed):
    """Copies of some vectors, removed and added for a while; then an index of what is left answers the same, to the last bit."""
    rng = np.random.default_rng(seed)
    kinds = rng.normal(size=(5, 37)).astype(np.float32)
    index, live = ExactIndex(37), dict[str, np.ndarray]()
    for n in range(120):
        live[f"e{n:03d}"] = kinds[rng.integers(5)]
        index.add([f"e{n:03d}"], live[f"e{n:03d}"][None], namespace="a")
        if len(live) > 30:
            gone = sorted(live)[rng.integers(len(live))]
            index.remove([gone])
            del live[gone]
    fresh = ExactIndex(37)
    fresh.add(sorted(live), np.stack([live[i] for i in sorted(live)]), namespace="a")
    queries = np.concatenate([kinds + 0.01, rng.normal(size=(3, 37)).astype(np.float32)])
    together = index.search(queries, 9, namespace="a")
    assert together == fresh.search(queries, 9, namespace="a")
    assert together == [fresh.search(query[None], 9, namespace="a")[0] for query in queries]
    exact = queries / np.linalg.norm(queries, axis=1, keepdims=True) @ np.stack([v / np.linalg.norm(v) for v in live.values()]).T
    assert [hits[0].similarity for hits in together] == pytest.approx(exact.max(axis=1).tolist(), abs=1e-5)
