"""Experience across task families: where a query reads, what is measured, what is put back; redundancy and consolidation."""

import asyncio

from experience_toys import episode
from manager_toys import add, build, merging, observation, run, teach, texts

from crl_jax.experience.bank import Author, BankState, Guided, Tally, observe
from crl_jax.experience.eviction import Eviction
from crl_jax.experience.index import ExactIndex
from crl_jax.experience.merging import MergePolicy, redundancy
from crl_jax.experience.reader import SHARED, Routing
from crl_jax.experience.retrieve import Diversity
from crl_jax.experience.transfer import harmful, lifts
from crl_jax.experience.verify import verify
from crl_jax.experience.writer import WritePolicy
from crl_jax.records import BankOp, OpKind, Usage

PLAIN = Diversity(recent_steps=0, lambda_count=0.0)


async def two_families(manager):
    await teach(manager, "red door needs key", namespace="room")
    await teach(manager, "red door needs magic", namespace="maze")


def test_X10_a_task_reads_its_own_family_only():
    async def story():
        async with build(diversity=PLAIN) as manager:
            await two_families(manager)
            assert [s.text for s in await manager.retrieve("room", "red door needs magic")] == ["red door needs key"]

    run(story())


def test_one_namespace_for_all():
    async def story():
        async with build(diversity=PLAIN, routing=Routing.SHARED) as manager:
            await two_families(manager)
            assert set(manager.state.spaces) == {SHARED}
            (shown,) = await manager.retrieve("room", "red door needs magic")
            assert shown.text == "red door needs magic"
            await manager.observe([episode(shown=[shown.id], namespace="room")])
            assert dict(manager.state.transfer) == {("room", SHARED): Tally(1, 1)}

    run(story())


def test_mixed_reads_all_and_puts_back_what_hurts():
    async def story():
        diversity = Diversity(recent_steps=0, lambda_count=0.0, foreign_min_episodes=3)
        async with build(diversity=diversity, routing=Routing.MIXED) as manager:
            await two_families(manager)
            (own,), (foreign,) = manager.state.space("room").values(), manager.state.space("maze").values()
            (first,) = await manager.retrieve("room", "red door needs magic")
            assert first.id == foreign.id, "more similar, and nothing speaks against it"
            for n in range(3):
                await manager.observe([episode(f"f{n}", shown=[foreign.id], success=False), episode(f"o{n}", shown=[own.id])])
            await manager.observe([episode("free", success=False)])
            assert manager.stats()["lift_foreign/room"] == 1 / 5 - 4 / 5  # posterior means by hand
            assert manager.stats()["lift_own/room"] == 4 / 5 - 1 / 3
            (first,) = await manager.retrieve("room", "red door needs magic", peek=True)
            assert first.id == own.id
            assert manager.stats()["demoted"] == 0, "evaluation counts nothing"
            await manager.retrieve("room", "red door needs magic")
            assert manager.stats()["demoted"] == 1
            (first,) = await manager.retrieve("maze", "red door needs magic")
            assert first.id == foreign.id, "it did not hurt at home"

    run(story())


def test_an_update_of_another_familys_entry_leaves_it_and_adds():
    async def story():
        from manager_toys import update

        reply = lambda prompt: update("new", 1) if "teach me" in prompt else add(observation(prompt))  # noqa: E731
        async with build(reply, diversity=PLAIN, routing=Routing.MIXED) as manager:
            await teach(manager, "red door needs magic", namespace="maze")
            (foreign,) = manager.state.space("maze")
            await teach(manager, "teach me", namespace="room", shown=[foreign])
            assert (texts(manager, "maze"), texts(manager, "room")) == (["red door needs magic"], ["new"])
            assert manager.stats()["problem_unknown_target"] == 1

    run(story())


def test_transfer_needs_enough_episodes_and_compares_with_none_before_there_is_own():
    state = BankState()
    assert lifts(state) == {}
    state = observe(state, [Guided("", True, reader="room")] * 4, step=0)
    assert lifts(state) == {}
    hurt = BankState(transfer={("room", "maze"): Tally(4, 0), ("room", ""): Tally(4, 4)})
    assert harmful(hurt, "room", "maze", min_episodes=4)
    assert not harmful(hurt, "room", "maze", min_episodes=5)
    assert not harmful(hurt, "room", "room", min_episodes=1)
    assert lifts(hurt)["room"] == (None, None)


def test_what_a_lesson_comes_from_is_kept():
    async def story():
        async with build() as manager:
            await manager.submit(episode("won", observation="a"))
            await manager.submit(episode("lost", observation="b", success=False))
            await manager.drain(20)
            assert [e.outcome for e in manager.state.space("room").values()] == [True, False]
            store = manager._store
            assert [e.outcome for e in store.load().space("room").values()] == [True, False]

    run(story())


def test_redundancy_by_hand():
    index = ExactIndex(2)
    vectors = {"a": [1, 0], "b": [1, 0.1], "c": [0, 1], "d": [0.1, 1], "e": [-1, 0]}
    import numpy as np

    arrays = {i: np.asarray(v, np.float32) for i, v in vectors.items()}
    index.add(list(arrays), np.stack(list(arrays.values())), namespace="room")
    found = redundancy(index, arrays, namespace="room", cosine=0.9, largest=5)
    assert found.share == 4 / 5
    assert found.clusters == (("a", "b"), ("c", "d"))
    assert redundancy(index, {}, namespace="room", cosine=0.9, largest=5) == (0.0, ())
    assert redundancy(index, arrays, namespace="room", cosine=0.9999, largest=5).share == 0


def test_adaptive_merge_joins_near_entries_and_no_others():
    async def story():
        policy = MergePolicy(0, redundancy=0.5, cosine=0.8)
        async with build(merging, merge=policy, diversity=PLAIN) as manager:
            await teach(manager, "red door needs key", "blue lava burns feet")
            manager.on_step(1)
            assert await manager.drain(20) == 0
            assert len(texts(manager)) == 2, "nothing is redundant"
            await teach(manager, "red door needs key now", "red door needs key here")
            manager.on_step(2)
            assert await manager.drain(20) == 0
            assert texts(manager) == ["blue lava burns feet", "red door needs key red door needs key now red door needs key here"]
            stats = manager.stats()
            assert (stats["merges_adaptive"], stats["redundancy/room"]) == (1, 3 / 4)

    run(story())


def test_a_merge_that_falls_due_during_another_comes_after_it():
    async def story():
        async with build(merging, lambda prompt: 0.05, merge=MergePolicy(1)) as manager:
            await teach(manager, "a", "b")
            manager.on_step(1)
            manager.on_step(2)
            manager.on_step(3)
            assert await manager.drain(20) == 0
            stats = manager.stats()
            assert stats["merges_deferred"] == 2
            assert stats["generations_merge"] == 1, "the one that came after found a single entry"

    run(story())


def test_deduplication_of_a_stored_bank_keeps_the_best_with_its_credit_and_usage():
    async def story():
        async with build(write=WritePolicy(dedup_cosine=2.0, keep_better=True)) as manager:
            await teach(manager, "red door", "door red", "blue lava", "red door ")
            first, second, _, third = manager.state.space("room").values()
            await manager.observe([episode("x", shown=[second.id]), episode("y", shown=[third.id], success=False)])
        writer = manager._writer
        writer._policy = WritePolicy(dedup_cosine=0.95, keep_better=True)
        assert await asyncio.to_thread(writer.deduplicate, "room") == 2
        lava, kept = writer.state.space("room").values()
        assert (lava.text, kept.text, kept.generation_id, kept.parents) == (
            "blue lava",
            "door red",
            second.generation_id,
            (first.id, second.id, third.id),
        )
        assert writer.state.usage[kept.id] == Usage(2, 1, 0, 2.0, 1.0)
        assert writer.deduplicate("room") == 0

    run(story())


def test_eviction_by_utility_through_the_manager():
    async def story():
        policy = WritePolicy(capacity=2, eviction=Eviction.UTILITY, dedup_cosine=2.0)
        async with build(write=policy) as manager:
            await teach(manager, "a", "b")
            bad = next(iter(manager.state.space("room")))
            await manager.observe([episode("x", shown=[bad], success=False)])
            await teach(manager, "c")
            assert texts(manager) == ["b", "c"]

    run(story())


def test_a_lesson_in_new_words_inherits_faded_counts_and_the_log_replays_them():
    async def story():
        same = WritePolicy(dedup_cosine=0.9)
        async with build(write=same, decay=(0.5, 0.5, 1)) as manager:
            await teach(manager, "one two three four five", "go far away north")
            for step, entry in zip((1, 4), manager.state.space("room"), strict=True):
                manager.on_step(step)
                await manager.observe([episode(shown=[entry])])
            replaced = [BankOp(OpKind.UPDATE, "both", tuple(manager.state.space("room")))]
            await manager._thread.run(manager._writer.write, replaced, namespace="room", author=Author("", 0, 4), reason="dedup")
            (usage,) = manager.state.usage.values()
            assert (usage.shown, usage.last_shown_step, usage.recent_shown) == (2, 4, 1.125)
            assert verify(manager._store).faults == ()

    run(story())
