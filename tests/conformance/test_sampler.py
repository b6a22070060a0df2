"""What every ``Sampler`` must do. Each test runs on the plain slot engine and on the same engine behind JetStream's interface.

Oracle: the uncached model, run on whole sequences (teacher forcing). A new implementation is done when it passes with its own ``make``.
"""

import asyncio
import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from crl_jax.models import transformer
from crl_jax.records import Completion, Finish, SamplingParams
from crl_jax.serving.constraint import ActionTrie
from crl_jax.serving.engine import SlotEngine
from crl_jax.serving.sampler import EngineSampler, PromptTooLong, SamplerClosed
from crl_jax.serving.turn import WeightsDiverged

CONFIG = transformer.ModelConfig("tiny", 40, 16, 2, 4, 2, 8, 32, tie_embeddings=False)
LENGTH, STOP = 32, 7
TRIE = ActionTrie.build([(10, STOP), (11, 12, STOP), (11, 13, STOP), (14, STOP)])
GREEDY = functools.partial(SamplingParams, temperature=0.0)


@functools.cache
def weights(seed: int):
    params = transformer.init(CONFIG, jax.random.key(seed))
    params["head"]["kernel"] = params["head"]["kernel"] * 60  # clear winners
    return params


@functools.cache
def _forced():
    def logits(params, tokens, positions):
        return transformer.unembed(CONFIG, params, transformer.hidden_states(CONFIG, params, tokens, positions)[0])[0]

    return jax.jit(logits)


def teacher(params, ids) -> np.ndarray:
    """Logits [len(ids), V] of the uncached model."""
    n = len(ids)
    tokens = np.zeros((1, LENGTH), np.int32)
    tokens[0, :n] = ids
    return np.asarray(_forced()(params, tokens, np.where(np.arange(LENGTH) < n, np.arange(LENGTH), -1)[None]))[:n]


def greedy(params, prompt, n) -> list[int]:
    ids = list(prompt)
    for _ in range(n):
        ids.append(int(teacher(params, ids)[-1].argmax()))
    return ids[len(prompt) :]


def check_logps(params, prompt, completion: Completion, temperature=1.0) -> None:
    n = len(completion.ids)
    assert n == len(completion.logps) == len(completion.versions) == len(completion.states)
    logits = teacher(params, [*prompt, *completion.ids])[len(prompt) - 1 : -1] / temperature
    for row, token, logp, state in zip(logits, completion.ids, completion.logps, completion.states, strict=True):
        support = np.arange(len(row)) if state == 0 else TRIE.allowed[state][TRIE.allowed[state] >= 0]
        assert token in support
        exact = row[token] - np.log(np.exp(row[support].astype(np.float64)).sum())
        assert logp == pytest.approx(exact, abs=1e-4)


@pytest.fixture(params=["slots", "jetstream"])
def make(request):
    """``make(slots=8, params=...)`` gives an engine and, as an async context, a sampler over it."""

    def build(slots: int = 8):
        kind = SlotEngine
        if request.param == "jetstream":
            pytest.importorskip("jetstream")
            from crl_jax.serving.jetstream_engine import JetStreamEngine as kind
        return kind(CONFIG, max_slots=slots, max_length=LENGTH, trie=TRIE, row_buckets=(2,), chunk_buckets=(4, 16), max_steps=4)

    return build


@contextlib.asynccontextmanager
async def opened(engine, params, **options):
    sampler = EngineSampler(engine, params, **options)
    try:
        yield sampler
    finally:
        await sampler.aclose()


def prompt(i: int, n: int) -> list[int]:
    return np.random.default_rng(i).integers(15, 40, n).tolist()


def test_greedy_equals_teacher_forcing_and_so_do_its_log_probs(make):
    async def main():
        async with opened(make(), weights(0)) as sampler:
            return await sampler.complete(prompt(0, 21), GREEDY(8))

    completion = asyncio.run(main())
    assert list(completion.ids) == greedy(weights(0), prompt(0, 21), 8)
    assert completion.finish == Finish.LENGTH
    check_logps(weights(0), prompt(0, 21), completion)


def test_R07_sampled_and_constrained_log_probs_equal_teacher_forcing(make):
    async def main():
        async with opened(make(), weights(0)) as sampler:
            free = SamplingParams(8, temperature=0.7, top_k=20, top_p=0.9, seed=3)
            bound = SamplingParams(8, temperature=1.3, seed=4, constrained=True)
            return await asyncio.gather(
                sampler.complete(prompt(1, 5), free),
                *(sampler.complete(prompt(2, 6), SamplingParams(8, 1.3, seed=s, constrained=True)) for s in range(6)),
                sampler.complete(prompt(3, 6), bound),
            )

    free, *bound = asyncio.run(main())
    check_logps(weights(0), prompt(1, 5), free, 0.7)
    assert free.states == (0,) * 8
    for completion in bound[:-1]:
        check_logps(weights(0), prompt(2, 6), completion, 1.3)
        assert completion.ids in {(10, STOP), (11, 12, STOP), (11, 13, STOP), (14, STOP)}
        assert completion.finish == Finish.STOP
        assert completion.states[0] == 1
    assert len({c.ids for c in bound}) >= 2


def mixed(i: int) -> tuple[list[int], SamplingParams]:
    stops = (20, 21) if i % 3 == 0 else ()
    params = SamplingParams(1 + i % 7, (0.0, 1.0, 0.5)[i % 3], (1.0, 0.8)[i % 2], (0, 5)[i % 4 == 1], stops, seed=i, constrained=i % 5 == 0)
    return prompt(i, 1 + i % 20), params


def test_burst_of_64_mixed_requests_equals_solo_runs(make):
    async def main():
        async with opened(make(), weights(0)) as sampler:
            solo = [await sampler.complete(*mixed(i)) for i in range(64)]
            dispatches = sampler.stats()["dispatches"]
            burst = await asyncio.gather(*(sampler.complete(*mixed(i)) for i in range(64)))
            return solo, burst, dispatches, sampler.stats()["dispatches"] - dispatches

    solo, burst, alone, together = asyncio.run(main())
    for one, other in zip(solo, burst, strict=True):
        assert (one.ids, one.states, one.finish) == (other.ids, other.states, other.finish)
        np.testing.assert_allclose(one.logps, other.logps, atol=1e-4)
    assert together < alone / 2


def test_V01_V03_cancel_frees_the_slot_and_is_idempotent(make):
    async def main():
        engine = make(2)
        async with opened(engine, weights(0)) as sampler:
            sessions = [await sampler.open() for _ in range(2)]
            started = asyncio.Event()
            loop, plain = asyncio.get_running_loop(), engine.generate

            def announce(*args, **kwargs):
                loop.call_soon_threadsafe(started.set)
                return plain(*args, **kwargs)

            engine.generate = announce
            running = [asyncio.create_task(sampler.generate(s, prompt(0, 4), GREEDY(25))) for s in sessions]
            await asyncio.wait_for(started.wait(), 60)
            for name in (sessions[0], sessions[0], "nope"):
                await sampler.cancel(name)
            running[1].cancel()  # a cancelled task cancels its request
            first = await running[0]
            with pytest.raises(asyncio.CancelledError):
                await running[1]
            others = await asyncio.gather(*(sampler.complete(prompt(i, 3), GREEDY(1 + i)) for i in range(5)))
            for session in sessions * 2:
                await sampler.close(session)
            with pytest.raises(KeyError):
                await sampler.generate(sessions[0], [1], GREEDY(1))
            return first, others, sampler.stats()

    first, others, stats = asyncio.run(main())
    assert first.finish in (Finish.CANCELLED, Finish.LENGTH)
    assert list(first.ids) == greedy(weights(0), prompt(0, 4), len(first.ids))
    assert [len(c.ids) for c in others] == [1, 2, 3, 4, 5]
    assert (stats["free_slots"], stats["open_sessions"]) == (2, 0)


def test_V06_length_bound_is_exact_and_a_refusal_hurts_nobody_else(make):
    async def main():
        async with opened(make(), weights(0)) as sampler:
            outcomes = await asyncio.gather(
                sampler.complete(prompt(0, LENGTH - 3), GREEDY(3)),
                sampler.complete(prompt(0, LENGTH - 3), GREEDY(9)),
                sampler.complete(prompt(0, LENGTH - 1), GREEDY(9)),
                sampler.complete(prompt(0, LENGTH), GREEDY(1)),
                sampler.complete([], GREEDY(1)),
                return_exceptions=True,
            )
            with pytest.raises(ValueError, match="token ids"):
                await sampler.complete([CONFIG.vocab_size], GREEDY(1))
            return outcomes

    exact, clipped, one, long, empty = asyncio.run(main())
    assert list(exact.ids) == greedy(weights(0), prompt(0, LENGTH - 3), 3) == list(clipped.ids)
    assert clipped.finish == Finish.LENGTH
    assert len(one.ids) == 1
    assert isinstance(long, PromptTooLong)
    assert isinstance(empty, ValueError)


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


def test_S06_S08_seeds_reproduce_whatever_is_in_the_batch(make):
    def request(seed):
        return prompt(0, 4), SamplingParams(6, temperature=3.0, seed=seed)

    async def main():
        async with opened(make(), weights(0)) as sampler:
            alone = await sampler.complete(*request(7))
            crowd = await asyncio.gather(*(sampler.complete(*request(s)) for s in (3, 7, 9, 7, 1)), sampler.complete(*mixed(8)))
            group = [await asyncio.gather(*(sampler.complete(*request(70 + i)) for i in range(8))) for _ in range(2)]
            return alone, crowd, group

    alone, crowd, (group, again) = asyncio.run(main())
    assert alone.ids == crowd[1].ids == crowd[3].ids
    assert len({c.ids for c in group}) >= 2
    assert [c.ids for c in group] == [c.ids for c in again]


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


def test_a_bad_request_is_refused_and_hurts_nobody_else(make):
    bad = [
        SamplingParams(2, temperature=float("nan")),
        SamplingParams(2, top_k=2**40),
        SamplingParams(2, stop_ids=(2**40,)),
        SamplingParams(2, stop_ids=None),  # type: ignore[arg-type]
        SamplingParams(0.5),  # type: ignore[arg-type]
    ]
    odd = [SamplingParams(2, top_k=2**31 - 1), SamplingParams(2, top_p=1e-12), SamplingParams(2, seed=-1), SamplingParams(2, seed=2**70)]

    async def main():
        async with opened(make(), weights(0)) as sampler:
            requests = (asyncio.wait_for(sampler.complete(prompt(0, 4), p), 60) for p in [*bad, *odd, GREEDY(2)])
            outcomes = await asyncio.gather(*requests, return_exceptions=True)
            return outcomes, sampler.stats()

    outcomes, stats = asyncio.run(main())
    assert [type(o) for o in outcomes[: len(bad)]] == [ValueError, ValueError, ValueError, TypeError, ValueError]
    assert [len(o.ids) for o in outcomes[len(bad) :]] == [2] * (len(odd) + 1)
    assert stats["refused"] == len(bad)


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


def test_a_request_that_takes_too_long_says_which_limit_it_met(make):
    async def main():
        async with opened(make(), weights(0), request_timeout_s=1e-4) as sampler:
            with pytest.raises(TimeoutError, match=r"request_timeout_s=0\.0001 s"):
                await sampler.complete(prompt(0, 4), GREEDY(20))

    asyncio.run(main())


def test_A08_an_engine_error_reaches_every_caller_and_later_ones(make):
    engine = make()

    def explode(*args, **kwargs):
        raise RuntimeError("out of memory")

    async def main():
        engine.extend = explode
        async with opened(engine, weights(0)) as sampler:
            waiting = (sampler.complete(prompt(i, 4), GREEDY(4)) for i in range(3))
            outcomes = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 20)
            with pytest.raises(RuntimeError, match="out of memory"):
                await sampler.open()
            return outcomes

    assert [str(o) for o in asyncio.run(main())] == ["out of memory"] * 3


def test_non_finite_weights_stop_the_sampler_with_their_version(make):
    async def main():
        async with opened(make(), weights(0)) as sampler:
            sampler.publish(jax.tree.map(lambda x: x * jnp.nan, weights(0)), 3)
            with pytest.raises(WeightsDiverged, match=r"version 3 .* lower the learning rate"):
                await sampler.complete(prompt(0, 4), GREEDY(2))

    asyncio.run(main())


def test_A13_aclose_fails_what_is_in_flight_and_ends_the_thread(make):
    async def main():
        sampler = EngineSampler(make(), weights(0))
        task = asyncio.create_task(sampler.complete(prompt(0, 4), GREEDY(25)))
        await asyncio.sleep(0)
        await asyncio.wait_for(sampler.aclose(), 30)
        outcome = await asyncio.gather(task, return_exceptions=True)
        with pytest.raises(SamplerClosed):
            await sampler.open()
        await sampler.aclose()
        return outcome[0]

    outcome = asyncio.run(main())
    assert isinstance(outcome, SamplerClosed | Completion)
