"""The service over a bank on disk: resuming, other embedders, closing, disks that refuse."""

import asyncio
import json
import re
import sqlite3
import threading

import numpy as np
import pytest
from experience_toys import HashEmbedder, episode
from manager_toys import build, echo, merging, run, teach, texts, update

from crl_jax.experience import writer
from crl_jax.experience.buffer import TrainingBuffer
from crl_jax.experience.calls import ExtractorPromptTooLong
from crl_jax.experience.merging import MergePolicy
from crl_jax.experience.store import Store, StoreError


def test_a_resumed_run_continues_at_its_checkpoint(tmp_path):
    path = tmp_path / "bank.sqlite"

    async def before():
        manager = build(store=Store.open(path))
        async with manager:
            await teach(manager, "kept lesson")
            manager.on_step(4)
            await manager.observe([episode(shown=list(manager.state.space("room")))])
            saved = json.loads(json.dumps(await manager.checkpoint()))
            kept = manager.state
            await teach(manager, "abandoned lesson")
            await manager.observe([episode(shown=list(manager.state.space("room")))])
        return saved, kept

    async def after(saved, kept):
        async with build(store=Store.open(path)) as manager:
            assert len(manager.state) == 2
            await manager.restore(saved, rewind=False)
            assert (len(manager.state), len(manager.buffer)) == (2, 1)
            await manager.restore(saved)
            assert manager.state == kept
            assert (manager.step, len(manager.buffer)) == (4, 1)
            assert [s.text for s in await manager.retrieve("room", "abandoned lesson")] == ["kept lesson"]
            await teach(manager, "another lesson")
            assert texts(manager) == ["kept lesson", "another lesson"]
            assert manager._store.generation_count() == 3, "generations of the abandoned future stay in the log"

    run(after(*run(before())))


def test_a_start_that_is_too_slow_for_another_embedder_leaves_less_to_the_next(tmp_path, monkeypatch):
    path = tmp_path / "bank.sqlite"
    monkeypatch.setattr(writer, "_EMBED_AT_ONCE", 2)

    class Other(HashEmbedder):
        fingerprint = "hash-other"

        def embed(self, texts):
            if len(self.calls) == 1:
                raise TimeoutError("too slow")
            return super().embed(texts)

    async def story(embedder):
        async with build(store=Store.open(path), embedder=embedder) as manager:
            if not manager.state:
                await teach(manager, "one", "two", "three", "four")
            return manager._writer.vectors_repaired

    run(story(HashEmbedder()))
    with pytest.raises(TimeoutError, match="too slow"):
        run(story(Other()))
    assert run(story(Other())) == 2


def test_entries_of_another_embedder_are_embedded_again(tmp_path):
    path = tmp_path / "bank.sqlite"

    class Other(HashEmbedder):
        dim, fingerprint = 48, "hash-48"

    async def story(embedder):
        async with build(store=Store.open(path), embedder=embedder) as manager:
            if not manager.state:
                await teach(manager, "a lesson")
            assert len(await manager.retrieve("room", "lesson")) == 1
            return manager.stats()["vectors_repaired"]

    assert [run(story(e)) for e in (HashEmbedder(), Other(), Other())] == [0, 1, 0]


def test_X14_vectors_that_got_under_other_ids_are_made_again(tmp_path):
    path = tmp_path / "bank.sqlite"
    lessons = ["red door", "blue lava", "green key"]

    async def before():
        async with build(store=Store.open(path)) as manager:
            await teach(manager, *lessons)
        manager._store.close()

    async def after():
        async with build(store=Store.open(path)) as manager:
            assert manager.stats()["vectors_repaired"] == 3
            await teach(manager, "white rat")
            for text in [*lessons, "white rat"]:
                (shown,) = await manager.retrieve("room", text)
                assert (shown.text, shown.similarity) == (text, pytest.approx(1.0, abs=1e-5))

    run(before())
    with sqlite3.connect(path) as db:
        rows = db.execute("SELECT id, vector FROM embeddings ORDER BY id").fetchall()
        for (name, _), (_, vector) in zip(rows, [*rows[1:], rows[0]], strict=True):
            db.execute("UPDATE embeddings SET vector=? WHERE id=?", (vector, name))
    run(after())


def test_texts_without_direction_are_a_problem_not_a_crash():
    class Silent(HashEmbedder):
        def embed(self, texts):
            return super().embed(texts) * np.asarray([["mute" not in t] for t in texts], np.float32)

    async def story():
        async with build(embedder=Silent()) as manager:
            await teach(manager, "mute lesson", "loud lesson")
            assert texts(manager) == ["loud lesson"]
            assert manager.stats()["problem_unembeddable_text"] == 1
            assert await manager.retrieve("room", "mute") == []

    run(story())


def test_long_episodes_are_shortened_to_the_prompt_limit():
    async def story():
        async with build(max_prompt_tokens=2000) as manager:
            long = episode("long", observation="corridor " * 30)
            object.__setattr__(long, "turns", long.turns * 50)
            await manager.submit(long)
            assert await manager.drain(10) == 0
            stats = manager.stats()
            assert (stats["transcripts_shortened"], stats["entries"]) == (1, 1)
            assert len(manager._calls.sampler.prompts[-1]) <= 2000
            assert "turns left out" in manager._calls.sampler.prompts[-1]

    run(story())


def test_a_step_whose_episodes_do_not_fit_is_an_error_that_names_the_length_and_a_single_one_is_counted():
    async def story():
        async with build(max_prompt_tokens=2000) as manager:
            manager.on_step(0)
            for name, goal in (("a", "find the exit"), ("b", "x" * 3000), ("c", "find the exit")):
                await manager.submit(episode(name, goal=goal))
            assert await manager.drain(10) == 0
            manager.on_step(1)
            for name in "de":
                await manager.submit(episode(name, goal="y" * 3000))
            with pytest.raises(
                ExtractorPromptTooLong, match=r"2 prompts in a row .* in extractor\.max_length 2064: set .* to \d{4} or more"
            ):
                await manager.drain(10)
            with pytest.raises(ExtractorPromptTooLong):  # an asynchronous run does not drain: the next step tells
                manager.on_step(2)
            assert (manager.stats()["prompts_too_long"], manager.stats()["entries"]) == (3, 2)

    run(story())


def test_the_length_an_error_names_is_enough():
    async def story(tokens):
        async with build(max_prompt_tokens=tokens) as manager:
            await manager.submit(episode("a", goal="y" * 3000))
            await manager.submit(episode("b", goal="y" * 3000))
            return await manager.drain(10)

    with pytest.raises(ExtractorPromptTooLong) as error:
        run(story(2000))
    needed = int(re.search(r"to (\d+) or more", str(error.value)).group(1))
    assert run(story(needed - 64)) == 0
    with pytest.raises(ExtractorPromptTooLong):
        run(story(needed - 64 - 1))


def test_entries_the_new_embedder_cannot_place_stay_in_the_bank(tmp_path):
    path = tmp_path / "bank.sqlite"

    class Silent(HashEmbedder):
        fingerprint = "silent"

        def embed(self, texts):
            return super().embed(texts) * np.asarray([["mute" not in t or np.nan] for t in texts], np.float32)

    class Mended(HashEmbedder):
        fingerprint = "silent"

    def reply(prompt):
        return update("loud again", 1) if "1. mute" in prompt else echo(prompt)

    async def story(embedder, *more, shown=()):
        async with build(reply, store=Store.open(path), embedder=embedder) as manager:
            await teach(manager, *more, shown=shown)
            found = {s.text for s in await manager.retrieve("room", "lesson")}
            return texts(manager), found, manager.stats()["unsearchable"], next(iter(manager.state.space("room")))

    *_, mute = run(story(HashEmbedder(), "mute lesson", "loud lesson"))
    kept, found, unsearchable, _ = run(story(Silent()))
    assert (kept, found, unsearchable) == (["mute lesson", "loud lesson"], {"loud lesson"}, 1)
    kept, _, unsearchable, _ = run(story(Mended()))
    assert (kept, unsearchable) == (["mute lesson", "loud lesson"], 0), "nothing unusable was stored, so it heals"
    kept, _, unsearchable, _ = run(story(Silent(), "whatever", shown=[mute]))
    assert (kept, unsearchable) == (["loud lesson", "loud again"], 0), "an entry outside the index can be replaced"


def test_a_generation_that_was_never_stored_leaves_no_name_to_be_used_twice(tmp_path):
    path = tmp_path / "bank.sqlite"

    async def question(manager, name):
        return await manager.ask("room", "how lesson", episode_id=name)

    async def before():
        async with build(store=Store.open(path)) as manager:
            await teach(manager, "a lesson")
            gate = threading.Event()
            busy = asyncio.ensure_future(manager._thread.run(gate.wait, 20))
            asks = [asyncio.ensure_future(question(manager, f"e{n}")) for n in range(2)]
            while manager.stats().get("generations_ask", 0) < 2:
                await asyncio.sleep(0.001)
            asks[0].cancel()  # its generation has a name, but waits behind the gate
            await asyncio.sleep(0.01)
            gate.set()
            await busy
            await asyncio.gather(*asks, return_exceptions=True)
            return manager._store.newest_generation()

    async def after():
        async with build(store=Store.open(path)) as manager:
            return (await question(manager, "f")).generation_id

    newest = run(before())
    assert run(after()) == f"g{newest + 1:08d}"


def test_a_question_is_answered_while_its_nearest_entry_is_being_replaced():
    async def story():
        async with build() as manager:
            await teach(manager, "a lesson")
            # what a reader sees between two lines of Writer.write: in the index, not in the state
            manager._writer.index.add(["coming"], HashEmbedder().embed(["how lesson"]), namespace="room")
            answer = await manager.ask("room", "how lesson", episode_id="e")
            assert answer.experience_id in manager.state.space("room")
            assert "asks_without_entry" not in manager.stats()

    run(story())


def test_a_merge_under_way_is_finished_by_closing():
    async def story():
        manager = build(merging, lambda prompt: 0.05, merge=MergePolicy(5))
        await manager.start()
        await teach(manager, "a", "b")
        manager.on_step(5)
        assert await manager.aclose(20) == 0
        assert texts(manager) == ["a b"]

    run(story())


def test_a_second_process_on_the_bank_is_told_so(tmp_path):
    async def story():
        first, second = (build(store=Store.open(tmp_path / "bank.sqlite")) for _ in range(2))
        async with first:
            await second.start()
            await teach(first, "a lesson")
            await second.submit(episode(observation="another"))
            with pytest.raises(StoreError, match="other process"):
                await second.drain(20)
            assert await second.aclose() == 1
            await teach(first, "b lesson")
        assert len(first._store.load()) == 2

    run(story())


def test_closing_twice_is_closing_once():
    async def story():
        manager = build()
        await manager.start()
        await teach(manager, "a lesson")
        assert [await manager.aclose(), await manager.aclose()] == [0, 0]
        for late in (manager.submit(episode()), manager.retrieve("room", "q"), manager.observe([]), manager.merge("room")):
            with pytest.raises(RuntimeError, match="closed"):
                await late
        assert manager.stats()["pending"] == 0

    run(story())


def test_closing_with_a_disk_that_refuses_says_so_and_ends_the_threads():
    async def story():
        manager = build()
        await manager.start()

        def refuse(data):
            raise OSError("disk full")

        manager._store.save_buffer = refuse
        with pytest.raises(OSError, match="disk full"):
            await manager.aclose()
        with pytest.raises(RuntimeError, match="shutdown"):
            await manager._thread.run(len, "")

    run(story())


def test_a_bank_that_is_not_the_one_of_the_checkpoint_is_refused():
    async def story():
        async with build() as manager:
            await teach(manager, "a lesson", "b lesson")
            saved = await manager.checkpoint()
        async with build() as fresh:
            for rewind in (False, True):
                with pytest.raises(ValueError, match="revision 2"):
                    await fresh.restore(saved, rewind=rewind)
            assert (fresh.step, len(fresh.buffer)) == (0, 0)

    run(story())


def test_waits_that_end_say_what_was_late():
    release = threading.Event()

    class Stuck(HashEmbedder):
        def embed(self, texts):
            if any("stuck" in text for text in texts):
                release.wait(20)
            return super().embed(texts)

    async def story():
        async with build(embedder=Stuck()) as manager:
            manager._search._timeout_s = manager._thread._timeout_s = 0.02
            with pytest.raises(TimeoutError, match=r"query of the bank within 0\.02 s"):
                await manager.retrieve("room", "stuck")
            gate = threading.Event()
            with pytest.raises(TimeoutError, match=r"wait on the bank's thread took longer than 0\.02 s"):
                await manager._thread.run(gate.wait, 20)
            release.set()
            gate.set()
            manager._search._timeout_s = manager._thread._timeout_s = 60.0


@pytest.mark.parametrize("rewind", [True, False])
def test_a_run_killed_before_its_first_checkpoint_starts_over(rewind):
    async def story():
        buffer = TrainingBuffer(batch_size=2, capacity=64)
        async with build(buffer=buffer) as manager:
            await teach(manager, "lesson of the first try")
            buffer.fail("g", step=3)
            await manager.restart(rewind=rewind)
            assert (len(manager.state), manager.step, len(manager.buffer)) == (0 if rewind else 1, 0, 0)

    run(story())
