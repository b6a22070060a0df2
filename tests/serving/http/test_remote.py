"""The sampler over a server: what the conformance suite asks of a sampler, here with a socket in between."""

import asyncio
import pathlib
import sys

import numpy as np
import pytest

pytest.importorskip("aiohttp", reason="the remote sampler needs aiohttp: pip install -e '.[serve]'")
sys.path.insert(0, str(pathlib.Path(__file__).parent))
from aiohttp import web
from aiohttp.test_utils import TestServer
from front_door import hold, tiny
from remote_client import greedy, run

from crl_jax.records import Finish, SamplingParams
from crl_jax.serving.remote import RemoteSampler
from crl_jax.serving.sampler import PromptTooLong, SamplerClosed


def test_it_knows_its_server():
    async def test(sampler, front, url):
        return sampler.vocab_size, sampler.max_length, sampler.version

    assert run(test) == (tiny.CONFIG.vocab_size, tiny.LENGTH, 0)


def test_greedy_and_sampled_equal_teacher_forcing():
    prompt = tiny.prompt(0, 21)
    free = SamplingParams(8, temperature=0.7, top_k=20, top_p=0.9, seed=3)

    async def test(sampler, front, url):
        return await asyncio.gather(sampler.complete(prompt, greedy(8)), sampler.complete(prompt, free))

    best, sampled = run(test)
    assert list(best.ids) == tiny.greedy(tiny.weights(0), prompt, 8)
    assert best.finish == Finish.LENGTH
    tiny.check_logps(tiny.weights(0), prompt, best)
    tiny.check_logps(tiny.weights(0), prompt, sampled, 0.7)


def test_a_burst_of_mixed_requests_equals_the_sampler_in_the_server():
    async def test(sampler, front, url):
        remote = await asyncio.gather(*(sampler.complete(*tiny.mixed(i)) for i in range(32)))
        return remote, await asyncio.gather(*(front.sampler.complete(*tiny.mixed(i)) for i in range(32))), sampler.stats()

    remote, local, stats = run(test)
    for one, other in zip(remote, local, strict=True):
        assert (one.ids, one.versions, one.states, one.finish) == (other.ids, other.versions, other.states, other.finish)
        np.testing.assert_allclose(one.logps, other.logps, atol=1e-4)
        np.testing.assert_allclose(one.sampling_logps, other.sampling_logps, atol=1e-4)
    assert (stats["retries"], stats["unversioned_answers"], stats["open_sessions"]) == (0, 0, 0)


def test_turns_send_and_prefill_only_new_tokens():
    turns = [tiny.prompt(1, 6), tiny.prompt(2, 3), tiny.prompt(3, 7)]

    async def test(sampler, front, url):
        session, log = await sampler.open(), []
        replies = []
        for turn in turns:
            log += turn
            replies.append((list(log), await sampler.generate(session, turn, greedy(3))))
            log += replies[-1][1].ids
        stats = front.stats()
        await sampler.close(session)
        with pytest.raises(KeyError):
            await sampler.generate(session, [1], greedy(1))
        return replies, stats

    replies, stats = run(test)
    for context, reply in replies:
        assert list(reply.ids) == tiny.greedy(tiny.weights(0), context, 3)
        tiny.check_logps(tiny.weights(0), context, reply)
    assert (stats["prefilled_tokens"], stats["recomputed_tokens"], stats["decoded_tokens"]) == (16, 0, 9)


def test_a_session_the_server_has_lost_is_opened_again_with_all_ids():
    async def test(sampler, front, url):
        session = await sampler.open()
        first = await sampler.generate(session, tiny.prompt(1, 6), greedy(3))
        for name in list(front.sessions._held):
            await front.sessions.close(name)
        return first, await sampler.generate(session, tiny.prompt(2, 3), greedy(3)), sampler.stats()

    first, second, stats = run(test)
    context = [*tiny.prompt(1, 6), *first.ids, *tiny.prompt(2, 3)]
    assert list(second.ids) == tiny.greedy(tiny.weights(0), context, 3)
    assert stats["sessions_lost"] == 1


def test_V06_bad_requests_are_refused_and_leave_the_session_as_it_was():
    async def test(sampler, front, url):
        session = await sampler.open()
        first = await sampler.generate(session, tiny.prompt(1, 6), greedy(3))
        refusals = [
            ([1] * 23, greedy(1), PromptTooLong),
            ([tiny.CONFIG.vocab_size], greedy(1), ValueError),
            ([1], SamplingParams(0), ValueError),
            ([1], SamplingParams(1, top_p=0.0), ValueError),
            ([1], greedy(1, stop_ids=(1, 2, 3, 4, 5)), ValueError),
        ]
        for ids, params, error in refusals:
            with pytest.raises(error):
                await sampler.generate(session, ids, params)
        with pytest.raises(ValueError, match="empty"):
            await sampler.complete([], greedy(1))
        second = await sampler.generate(session, tiny.prompt(2, 3), greedy(30))
        return first, second, front.stats(), sampler.stats()

    first, second, there, here = run(test)
    assert list(second.ids) == tiny.greedy(tiny.weights(0), [*tiny.prompt(1, 6), *first.ids, *tiny.prompt(2, 3)], 20)
    assert (there["recomputed_tokens"], here["sessions_lost"]) == (0, 0)


@pytest.mark.parametrize("whole", [False, True])
def test_V01_V03_cancel_frees_the_slot_and_is_idempotent(whole):
    async def test(sampler, front, url):
        session = await sampler.open()
        go, plain_cancel = hold(front), front.sampler.cancel

        async def cancel(name):
            await plain_cancel(name)
            go.set()

        front.sampler.cancel = cancel
        running = asyncio.create_task(sampler.generate(session, tiny.prompt(0, 4), greedy(27)))
        while not front.stats()["decoded_tokens"]:
            await asyncio.sleep(0.001)
        if whole:
            await asyncio.gather(*(sampler.cancel(name) for name in (session, session, "nope")))
            result = await running
            await sampler.cancel(session)
        else:
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            result = None
        async with asyncio.timeout(30):
            while front.completions.in_flight:
                await asyncio.sleep(0.005)
        go.set()
        again = await sampler.generate(session, [20], greedy(2))
        await sampler.close(session)
        return result, again

    result, again = run(test)
    context = tiny.prompt(0, 4)
    if result is not None:
        assert result.finish == Finish.CANCELLED
        assert 0 < len(result.ids) < 27
        assert list(result.ids) == tiny.greedy(tiny.weights(0), context, len(result.ids))
        context = [*context, *result.ids]
    else:
        context = []  # a cancelled call leaves the session as it was
    assert list(again.ids) == tiny.greedy(tiny.weights(0), [*context, 20], 2)


def test_closing_fails_what_is_in_flight_and_everything_after():
    async def test(sampler, front, url):
        go = hold(front)
        running = asyncio.create_task(sampler.generate(await sampler.open(), [20], greedy(25)))
        while not front.stats()["decoded_tokens"]:
            await asyncio.sleep(0.001)
        await sampler.aclose()
        go.set()
        with pytest.raises(SamplerClosed):
            await running
        with pytest.raises(SamplerClosed):
            await sampler.complete([1], greedy(1))

    run(test)


def test_a_session_goes_on_without_new_ids_as_in_this_process():
    prompt = tiny.prompt(1, 6)

    async def test(sampler, front, url):
        session = await sampler.open()
        first = await sampler.generate(session, prompt, greedy(3))
        return first, await sampler.generate(session, [], greedy(2)), sampler.stats()["sessions_lost"]

    first, more, lost = run(test)
    assert [*first.ids, *more.ids] == tiny.greedy(tiny.weights(0), prompt, 5)
    assert lost == 0


def test_constrained_sampling_is_refused_where_the_server_has_none():
    async def test(sampler, front, url):
        bound = await sampler.complete([20], SamplingParams(8, constrained=True))
        front.constrained = False
        other = await RemoteSampler.connect(url)
        with pytest.raises(ValueError, match=r"env\.constrained"):
            await other.complete([20], SamplingParams(8, constrained=True))
        await other.aclose()
        return bound

    bound = run(test)
    assert bound.ids in {(10, 7), (11, 12, 7), (11, 13, 7), (14, 7)}
    assert bound.states[0] == 1


# ------------------------------------------------------------------------------------------------ a server like vLLM


def vllm_like(seen, **changes):
    """An app that answers as vLLM does: no sessions, no versions, ids among the tokens."""

    async def models(request):
        return web.json_response({"object": "list", "data": [{"id": "org/model", "owned_by": "vllm", "max_model_len": 32}]})

    async def completions(request):
        seen.append(await request.json())
        choice = {
            "index": 0,
            "text": "x",
            "finish_reason": "length",
            "logprobs": {"tokens": ["token_id:7", "token_id:9"], "token_logprobs": [-0.5, -0.25]},
        }
        return web.json_response({"object": "text_completion", "choices": [choice | changes]})

    app = web.Application()
    app.router.add_get("/v1/models", models)
    app.router.add_post("/v1/completions", completions)
    return app


def with_vllm(test, remote=None, **changes):
    async def main():
        seen = []
        async with TestServer(vllm_like(seen, **changes)) as server:
            sampler = await RemoteSampler.connect(str(server.make_url("/v1")), **({"vocab_size": 40} | (remote or {})))
            try:
                return await test(sampler), seen, sampler.stats()
            finally:
                await sampler.aclose()

    return asyncio.run(main())


def test_R01_another_server_gets_all_ids_of_every_turn_and_gives_ids_not_text():
    async def test(sampler):
        session = await sampler.open()
        await sampler.generate(session, [1, 2, 3], SamplingParams(2, stop_ids=(5,), seed=3, forbidden_ids=(4,)))
        return await sampler.generate(session, [4], SamplingParams(40))

    second, seen, stats = with_vllm(test)
    assert [body["prompt"] for body in seen] == [[1, 2, 3], [1, 2, 3, 7, 9, 4]]
    first, last = seen
    assert (first["stop_token_ids"], first["ignore_eos"], first["seed"], first["logit_bias"]) == ([5], True, 3, {"4": -100})
    assert (first["model"], first["logprobs"], first["return_token_ids"], last["max_tokens"]) == ("org/model", 1, True, 26)
    assert "session" not in first
    assert (second.ids, second.logps, second.versions, second.states) == ((7, 9), (-0.5, -0.25), (0, 0), (0, 0))
    assert stats["unversioned_answers"] == 2


def test_log_probs_that_are_not_what_a_learner_needs_are_refused():
    async def raw(sampler):
        await sampler.complete([1], SamplingParams(2, top_p=0.5))
        with pytest.raises(ValueError, match="logprobs-mode processed_logprobs"):
            await sampler.complete([1], SamplingParams(2, temperature=0.7))

    async def processed(sampler):
        await sampler.complete([1], SamplingParams(2, temperature=0.7))
        with pytest.raises(ValueError, match="after truncation"):
            await sampler.complete([1], SamplingParams(2, top_p=0.5))

    with_vllm(raw)
    with_vllm(processed, {"logprobs_of": "processed"})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"logprobs": {"tokens": ["token_id:7", "token_id:9"], "token_logprobs": [-0.5]}}, "different lengths"),
        ({"token_ids": [7, 9, 11]}, "different lengths"),
        ({"token_ids": [7, 40]}, "outside the vocabulary"),
        ({"token_ids": [7, True]}, "outside the vocabulary"),
        ({"logprobs": {"tokens": ["a", "b"], "token_logprobs": [-0.5, -0.2]}}, "no token ids"),
        ({"logprobs": None}, "no token ids"),
        ({"logprobs": {"token_logprobs": [-0.5, None]}, "token_ids": [7, 9]}, "log-probs that are none"),
        ({"logprobs": {"token_logprobs": [-0.5, 0.5]}, "token_ids": [7, 9]}, "log-probs that are none"),
        ({"token_ids": [], "logprobs": {"token_logprobs": []}}, "0 tokens"),
        ({"token_versions": [1]}, "different lengths"),
        ({"token_versions": [1, -1]}, "no whole numbers"),
        ({"token_versions": [1, 2**40]}, "no whole numbers"),
        ({"token_versions": 3}, "another form"),
        ({"logprobs": {"token_logprobs": [-(10**400), -0.5]}, "token_ids": [7, 9]}, "another form"),
        ({"logprobs": {"tokens": ["token_id:" + "7" * 5000], "token_logprobs": [-0.5]}}, "another form"),
        ({"finish_reason": ["stop"]}, "another form"),
        ({"finish_reason": None}, "finish_reason=None"),
    ],
)
def test_R07_an_answer_that_cannot_be_is_an_error_not_a_completion(changes, said):
    async def test(sampler):
        from crl_jax.serving.remote_edge import RemoteError

        with pytest.raises(RemoteError, match=said):
            await sampler.complete([1], SamplingParams(2))

    _, seen, stats = with_vllm(test, **changes)
    assert (len(seen), stats["retries"]) == (1, 0)
