"""What every ``Sampler`` must do with sessions, shared prompts and new weights.

Few slots and short caches, so that rows move; every reply is compared with teacher forcing.
"""

import asyncio

import pytest
from tiny_model import GREEDY, check_logps, greedy, opened, prompt, weights


def test_multi_turn_equals_one_shot_and_prefills_only_new_tokens(make):
    turns = [prompt(1, 6), prompt(2, 3), prompt(3, 7)]

    async def main():
        async with opened(make(), weights(0)) as sampler:
            session, log, replies = await sampler.open(), [], []
            for turn in turns:
                log += turn
                replies.append((list(log), await sampler.generate(session, turn, GREEDY(3))))
                log += replies[-1][1].ids
            stats = sampler.stats()
            shots = [await sampler.complete(context, GREEDY(3)) for context, _ in replies]
            return replies, shots, stats

    replies, shots, stats = asyncio.run(main())
    for (context, reply), shot in zip(replies, shots, strict=True):
        assert list(reply.ids) == list(shot.ids) == greedy(weights(0), context, 3)
        check_logps(weights(0), context, reply)
    assert stats["prefilled_tokens"] == sum(map(len, turns))
    assert (stats["recomputed_tokens"], stats["decoded_tokens"]) == (0, 9)


def test_R14_R15_swap_between_turns_uses_the_published_leaves_and_recomputes(make):
    async def main():
        async with opened(make(), weights(0)) as sampler:
            session = await sampler.open()
            first = await sampler.generate(session, prompt(1, 6), GREEDY(3))
            sampler.publish(weights(1), 5)
            assert sampler.version == 5
            second = await sampler.generate(session, prompt(2, 4), GREEDY(4))
            return first, second, sampler.stats()

    first, second, stats = asyncio.run(main())
    assert first.versions == (0,) * 3
    assert second.versions == (5,) * 4
    context = [*prompt(1, 6), *first.ids, *prompt(2, 4)]
    assert list(second.ids) == greedy(weights(1), context, 4)
    check_logps(weights(1), context, second)
    assert (stats["swaps"], stats["recomputed_tokens"], stats["prefilled_tokens"]) == (1, 8, 10)


def test_R14_swap_in_mid_flight_first_token_after_it_is_of_the_new_weights(make):
    engine = make()

    async def main():
        async with opened(engine, weights(0)) as sampler:
            plain, calls = engine.generate, []

            def publish_after_second(*args, **kwargs):
                calls.append(1)
                out = plain(*args, **kwargs)
                if len(calls) == 2:
                    sampler.publish(weights(1), 1)
                return out

            engine.generate = publish_after_second
            return await asyncio.gather(*(sampler.complete(prompt(i, 5 + i % 3), GREEDY(20)) for i in range(8))), sampler.stats()

    completions, stats = asyncio.run(main())
    assert stats["swaps"] == 1
    for i, completion in enumerate(completions):
        split = completion.versions.index(1)
        assert split > 0
        assert completion.versions == (0,) * split + (1,) * (20 - split)
        before, after = completion.ids[:split], completion.ids[split:]
        assert list(before) == greedy(weights(0), prompt(i, 5 + i % 3), split)
        assert list(after) == greedy(weights(1), [*prompt(i, 5 + i % 3), *before], 20 - split)


@pytest.mark.parametrize("host_bytes", [2**20, 0])
def test_V09_many_short_conversations_over_few_slots_all_finish(make, host_bytes):
    async def talk(sampler, i):
        session, log = await sampler.open(), []
        for turn in range(3):
            new = prompt(100 * i + turn, 1 + (i + turn) % 4)
            log += new
            reply = await sampler.generate(session, new, GREEDY(2, stop_ids=(20,)))
            assert list(reply.ids) == greedy(weights(0), log, 2)[: len(reply.ids)]
            log += reply.ids
        await sampler.close(session)
        return len(reply.ids)

    async def main():
        async with opened(make(2), weights(0), host_bytes=host_bytes) as sampler:
            done = await asyncio.gather(*(talk(sampler, i) for i in range(12)))
            session = await sampler.open()  # a round trip, so that the last closes have been seen
            await sampler.generate(session, [1], GREEDY(1))
            await sampler.close(session)
            return done, sampler.stats()

    done, stats = asyncio.run(main())
    assert len(done) == 12
    moved, lost = ("offloads", "evictions") if host_bytes else ("evictions", "offloads")
    assert stats[moved] > 0
    assert stats[lost] == 0
    assert (stats["restored_tokens"] > 0, stats["recomputed_tokens"] > 0) == (host_bytes > 0, host_bytes == 0)


def test_a_second_task_on_a_session_is_refused_and_its_end_is_not_the_end_of_the_first(make):
    async def main():
        async with opened(make(), weights(0)) as sampler:
            session = await sampler.open()
            first = asyncio.create_task(sampler.generate(session, prompt(0, 4), GREEDY(9)))
            await asyncio.sleep(0)
            second, third = (asyncio.create_task(sampler.generate(session, prompt(1, 4), GREEDY(9))) for _ in range(2))
            await asyncio.sleep(0)
            third.cancel()
            return await asyncio.gather(first, second, third, return_exceptions=True)

    first, second, third = asyncio.run(main())
    assert list(first.ids) == greedy(weights(0), prompt(0, 4), 9)
    assert "already has a request" in str(second)
    assert isinstance(third, asyncio.CancelledError)


def test_every_episode_prefills_its_new_tokens_and_nothing_else(make):
    """Twelve conversations over four slots: two shared system prompts, turns in any order, rows moved to the host and back."""
    system = [prompt(50, 10), prompt(51, 12)]
    turns = [[prompt(100 + 10 * i + t, 1 + (i + t) % 3) for t in range(3)] for i in range(12)]

    async def talk(sampler, i):
        session, log = await sampler.open(), []
        for turn, new in enumerate(turns[i]):
            new = [*system[i % 2], *new] if turn == 0 else new
            log += new
            reply = await sampler.generate(session, new, GREEDY(2))
            assert list(reply.ids) == greedy(weights(0), log, 2)
            log += reply.ids

    async def main():
        async with opened(make(4), weights(0)) as sampler:
            await asyncio.gather(*(talk(sampler, i) for i in range(12)))
            return sampler.stats()

    stats = asyncio.run(main())
    new_tokens = sum(len(system[i % 2]) + sum(map(len, turns[i])) for i in range(12))
    assert stats["prefilled_tokens"] + stats["shared_tokens"] == new_tokens
    assert stats["recomputed_tokens"] == 0
    assert stats["shared_tokens"] > 0
    assert stats["restored_tokens"] > 0


def test_a_system_prompt_is_computed_once_per_weight_version(make):
    prompts = [[*prompt(60, 16), 15 + i, 20, 21] for i in range(5)]

    async def main():
        async with opened(make(2), weights(0)) as sampler:
            before = [await sampler.complete(ids, GREEDY(2)) for ids in prompts]
            counts = sampler.stats()
            sampler.publish(weights(1), 1)
            after = [await sampler.complete(ids, GREEDY(2)) for ids in prompts]
            return before, counts, after, sampler.stats()

    before, first, after, second = asyncio.run(main())
    for i in range(5):
        assert list(before[i].ids) == greedy(weights(0), prompts[i], 2)
        assert list(after[i].ids) == greedy(weights(1), prompts[i], 2)
    assert (first["prefilled_tokens"], first["shared_tokens"]) == (16 + 5 * 3, 4 * 16)
    assert (second["prefilled_tokens"], second["shared_tokens"]) == (2 * (16 + 5 * 3), 8 * 16)
