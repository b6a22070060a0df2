"""What every ``Sampler`` must do with a request. Each test runs on the plain slot engine and on the same behind JetStream's interface.

A new implementation is done when it passes with its own ``make``, here and in ``test_sampler_sessions``.
"""

import asyncio

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_model import CONFIG, GREEDY, LENGTH, PIECES, STOP, check_logps, greedy, mixed, opened, prompt, teacher, weights

from crl_jax.records import Completion, Finish, SamplingParams
from crl_jax.serving.sampler import EngineSampler, PromptTooLong, SamplerClosed
from crl_jax.serving.turn import WeightsDiverged


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


def test_burst_of_64_mixed_requests_equals_solo_runs(make):
    async def main():
        async with opened(make(), weights(0)) as sampler:
            solo = [await sampler.complete(*mixed(i)) for i in range(64)]
            dispatches = sampler.stats()["dispatches"]
            burst = await asyncio.gather(*(sampler.complete(*mixed(i)) for i in range(64)))
            return solo, burst, dispatches, sampler.stats()

    solo, burst, alone, stats = asyncio.run(main())
    together = stats["dispatches"] - alone
    for one, other in zip(solo, burst, strict=True):
        assert (one.ids, one.states, one.finish) == (other.ids, other.states, other.finish)
        np.testing.assert_allclose(one.logps, other.logps, atol=1e-4)
    assert together < alone / 2
    assert stats["offloads"] == 0  # a completion's session ends with it: nobody waits for its caller to close it


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


def test_R08_stop_strings_end_with_the_token_that_completes_them(make):
    async def main():
        async with opened(make(), weights(0)) as sampler:
            plain = await sampler.complete(prompt(4, 5), GREEDY(12))
            text = b"".join(PIECES[i] for i in plain.ids).decode()
            strings = (text[2:5], "#")
            stops = [
                GREEDY(12, stop_strings=strings),
                SamplingParams(12, seed=2, stop_strings=("b", "mm")),
                GREEDY(12, stop_strings=("#",)),
            ]
            return plain, strings, await asyncio.gather(*(sampler.complete(prompt(4, 5), params) for params in stops))

    plain, strings, (cut, sampled, never) = asyncio.run(main())
    n = next(n for n in range(1, 13) if strings[0] in b"".join(PIECES[i] for i in plain.ids[:n]).decode())
    assert cut.ids == plain.ids[:n], "nothing is cut off the last token, nothing follows it"
    assert cut.finish == Finish.STOP
    check_logps(weights(0), prompt(4, 5), cut)
    check_logps(weights(0), prompt(4, 5), sampled)
    assert (never.ids, never.finish) == (plain.ids, Finish.LENGTH)


def test_both_log_probs_are_those_of_teacher_forcing(make):
    requests = [
        SamplingParams(6, 0.7, min_p=0.05, forbidden_ids=(20, 21), seed=1),
        SamplingParams(6, 1.5, top_k=4, seed=2),
        GREEDY(6, forbidden_ids=(20,)),
        SamplingParams(6, seed=3),
    ]

    async def main():
        async with opened(make(), weights(0)) as sampler:
            return await asyncio.gather(*(sampler.complete(prompt(5, 6), params) for params in requests))

    for params, done in zip(requests, asyncio.run(main()), strict=True):
        check_logps(weights(0), prompt(5, 6), done, params.temperature or 1.0)
        logits = teacher(weights(0), [*prompt(5, 6), *done.ids])[5:-1].astype(np.float64) / (params.temperature or 1.0)
        for row, token, logp in zip(logits, done.ids, done.sampling_logps, strict=True):
            row[list(params.forbidden_ids)] = -np.inf
            kept = row >= np.sort(row)[-params.top_k] if params.top_k else row >= row.max() + np.log(max(params.min_p, 1e-300))
            assert kept[token]
            assert logp == pytest.approx(row[token] - np.log(np.exp(row[kept]).sum()) if params.temperature else 0.0, abs=1e-4)


def test_a_long_input_does_not_hold_up_those_that_sample(make):
    engine, order = make(prefill_tokens=8, chunk_buckets=(4,)), []
    plain = {name: getattr(engine, name) for name in ("extend", "generate")}
    for name in plain:
        setattr(engine, name, lambda *args, name=name, **kwargs: (order.append(name), plain[name](*args, **kwargs))[1])

    async def main():
        async with opened(engine, weights(0), gather_s=5.0) as sampler:
            sessions = [await sampler.open() for _ in range(2)]
            requests = zip(sessions, (prompt(0, 3), prompt(1, 25)), (GREEDY(20), GREEDY(2)), strict=True)
            return await asyncio.gather(*(sampler.generate(*request) for request in requests))

    first, late = asyncio.run(main())
    assert list(first.ids) == greedy(weights(0), prompt(0, 3), 20)
    assert list(late.ids) == greedy(weights(0), prompt(1, 25), 2)
    assert order == ["extend", "generate"] * 6, "six chunks of the long input, four tokens of the other after each"
