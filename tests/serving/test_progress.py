"""Tokens while a request runs: each once, in order, before the result."""

import asyncio
import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import tiny_model as tiny

from crl_jax.records import SamplingParams
from crl_jax.serving.sampler import PromptTooLong


def test_every_token_is_told_once_in_order_and_before_the_result():
    async def main():
        async with tiny.opened(tiny.engine(), tiny.weights(0)) as sampler:
            heard = [[] for _ in range(3)]
            sessions = [await sampler.open() for _ in range(3)]
            params = SamplingParams(14, temperature=0.0)
            results = await asyncio.gather(
                *(
                    sampler.generate(s, tiny.prompt(i, 4 + i), params, on_tokens=heard[i].append if i else None)
                    for i, s in enumerate(sessions)
                )
            )
            at_the_result = [list(h) for h in heard]
            await asyncio.sleep(0.01)
            return at_the_result, heard, results

    early, heard, results = asyncio.run(main())
    assert early == heard
    assert heard[0] == []
    for parts, completion in zip(heard[1:], results[1:], strict=True):
        assert len(parts) > 1  # 14 tokens at 4 per dispatch
        for name in ("ids", "logps", "versions"):
            assert sum((getattr(p, name) for p in parts), ()) == getattr(completion, name)
    assert list(results[1].ids) == tiny.greedy(tiny.weights(0), tiny.prompt(1, 5), 14)


def test_a_refused_and_a_cancelled_request_tell_nothing_more():
    async def main():
        async with tiny.opened(tiny.engine(), tiny.weights(0)) as sampler:
            heard, first = [], asyncio.Event()

            def hear(sampled):
                heard.append(sampled)
                first.set()

            with pytest.raises(PromptTooLong):
                await sampler.generate(await sampler.open(), [1] * tiny.LENGTH, SamplingParams(1), on_tokens=hear)
            assert heard == []
            running = asyncio.create_task(sampler.generate(await sampler.open(), [1], SamplingParams(30), on_tokens=hear))
            await asyncio.wait_for(first.wait(), 60)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            count = len(heard)
            await sampler.complete([2], SamplingParams(30))
            return count, len(heard)

    before, after = asyncio.run(main())
    assert before == after >= 1
