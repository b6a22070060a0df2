"""What may enter the bank and what leaves it: duplicates, capacity, merges."""

import asyncio

import pytest
from experience_toys import HashEmbedder, decode, episode
from manager_toys import add, build, echo, merging, run, teach, texts, update

from crl_jax.experience.eviction import Eviction
from crl_jax.experience.merging import MergePolicy
from crl_jax.experience.writer import WritePolicy
from crl_jax.records import GenerationKind, Usage


def test_duplicates_replace_the_older_entry_and_keep_its_usage():
    async def story():
        async with build(write=WritePolicy(dedup_cosine=0.95)) as manager:
            await teach(manager, "the door is red")
            (old,) = manager.state.space("room")
            await manager.observe([episode(shown=[old])])
            await teach(manager, "red is the door")
            assert texts(manager) == ["red is the door"]
            (new,) = manager.state.space("room").values()
            assert new.parents == (old,)
            assert dict(manager.state.usage) == {new.id: Usage(1, 1, 0, 1.0, 1.0)}
            assert manager.stats()["dedups"] == 1
            assert [s.id for s in await manager.retrieve("room", "door")] == [new.id]

    run(story())


def test_duplicates_of_a_proven_entry_are_not_added_with_keep_better():
    async def story():
        async with build(write=WritePolicy(dedup_cosine=0.95, keep_better=True)) as manager:
            await teach(manager, "the door is red")
            (old,) = manager.state.space("room")
            await manager.observe([episode(shown=[old])])
            await teach(manager, "red is the door")
            assert texts(manager) == ["the door is red"]

    run(story())


def test_duplicates_inside_one_response():
    async def story():
        async with build(lambda p: add("a b c", "c b a", "other words"), write=WritePolicy(dedup_cosine=0.95)) as manager:
            await teach(manager, "x")
            assert texts(manager) == ["c b a", "other words"]
            assert len(await manager.retrieve("room", "a b c")) == 1

    run(story())


@pytest.mark.parametrize("in_turn", [False, True])
def test_what_was_said_before_is_not_embedded_again(in_turn):
    async def story():
        embedder = HashEmbedder()
        async with build(in_turn=in_turn, embedder=embedder) as manager:
            for at in range(3):
                await teach(manager, "go north", "go south", "go north", namespace=f"room{at}")
            assert texts(manager, "room2") == ["go north", "go south", "go north"]
            assert sorted(text for call in embedder.calls for text in call) == ["go north", "go south"]
            assert [shown.text for shown in await manager.retrieve("room2", "go south", peek=True)] == ["go south"]

    run(story())


def test_capacity_evicts():
    async def story():
        async with build(write=WritePolicy(capacity=2, eviction=Eviction.FIFO, dedup_cosine=2.0)) as manager:
            await teach(manager, "one", "two", "three")
            assert texts(manager) == ["two", "three"]
            assert manager.stats()["evictions"] == 1
            assert await manager.drain(1) == 0
            assert manager._writer.index.size("room") == 2

    run(story())


def test_merge_carries_results_on_and_credits_each_output_to_its_own_generation():
    async def story():
        async with build(merging, merge=MergePolicy(0, 3)) as manager:
            await teach(manager, "a1", "b2", "c3", "d4", "e5")
            assert await manager.merge("room") == 2
            assert texts(manager) == ["a1 b2 c3 d4 e5"]
            (entry,) = manager.state.space("room").values()
            made = manager._store.generation(entry.generation_id)
            assert made.kind is GenerationKind.MERGE
            assert decode(made.response_ids[:-1]) == update("a1 b2 c3 d4 e5", 1, 2, 3)
            first = manager._store.experience(entry.parents[0])
            assert (first.text, first.generation_id) == ("a1 b2 c3", "g00000006")
            await manager.observe([episode("f", shown=[entry.id]), episode("g", shown=[first.id], success=False)])
            batch = await manager.pop_batch()
            assert [(s.generation.id, s.reward) for s in batch] == [("g00000007", 1.0), ("g00000006", -1.0)]

    run(story())


def test_a_chunk_that_fails_keeps_its_entries_and_stops_the_carry():
    async def story():
        async with build(merging, merge=MergePolicy(0, 2)) as manager:
            await teach(manager, "a", "b", "fail", "d", "e", "f")
            assert await manager.merge("room") == 2
            assert texts(manager) == ["fail", "d", "a b", "e f"]
            assert manager.stats()["parse_failures"] == 1

    run(story())


def test_merge_whose_source_vanished_meanwhile_is_refused():
    async def story():
        def reply(prompt):
            if "1. first" in prompt and "2. " in prompt and "environment: " not in prompt:
                return update("merged", 1, 2)
            return update("newer", 1) if "1. first" in prompt else echo(prompt)

        def slow(prompt):
            return 0.15 if "environment: " not in prompt else 0.0

        async with build(reply, slow) as manager:
            await teach(manager, "first", "second")
            first = next(iter(manager.state.space("room")))
            merge = asyncio.ensure_future(manager.merge("room"))
            await asyncio.sleep(0.02)
            await teach(manager, "third", shown=[first])
            assert await merge == 0
            assert texts(manager) == ["second", "newer"]
            assert manager.stats()["problem_merge_refused"] == 1

    run(story())


def test_merges_run_every_few_steps_in_the_background():
    async def story():
        async with build(merging, merge=MergePolicy(5)) as manager:
            await teach(manager, "a", "b")
            await teach(manager, "c", "d", namespace="hall")
            manager.on_step(4)
            assert await manager.drain(5) == 0
            assert texts(manager) == ["a", "b"]
            manager.on_step(5)
            assert await manager.drain(5) == 0
            assert (texts(manager), texts(manager, "hall")) == (["a b"], ["c d"])

    run(story())


def test_a_failed_index_leaves_the_committed_state_and_ends_the_manager():
    async def story():
        async with build() as manager:
            await teach(manager, "red door")
            index = manager._writer.index

            def add(*args, **kwargs):
                raise RuntimeError("the build failed")

            index.add = add
            await manager.submit(episode("e2", observation="blue lava"))
            with pytest.raises(RuntimeError, match="the build failed"):
                await asyncio.wait_for(manager.failed, 10)
            assert texts(manager) == ["red door", "blue lava"], "what is committed is the state"
            with pytest.raises(RuntimeError, match="the build failed"):
                await manager.retrieve("room", "red")

    run(story())


def test_a_write_of_no_task_ends_the_manager_too():
    async def story():
        async with build() as manager:
            manager._writer.broken = RuntimeError("the build failed")
            with pytest.raises(RuntimeError, match="the build failed"):
                await manager.retrieve("room", "red")
            assert manager.failed.done()

    run(story())
