"""Publishing with a drain: nobody samples from two versions, nobody is stuck, and the deadline is said by name."""

import asyncio
import contextlib
import threading

import jax
import numpy as np
import pytest

from crl_jax.models import transformer
from crl_jax.records import SamplingParams
from crl_jax.serving.engine import SlotEngine
from crl_jax.serving.sampler import EngineSampler, SamplerClosed

CONFIG = transformer.ModelConfig("tiny", 40, 16, 2, 4, 2, 8, 32, tie_embeddings=False)
LENGTH, WAIT_S = 32, 60.0


@pytest.fixture(scope="module")
def weights():
    both = [transformer.init(CONFIG, jax.random.key(seed)) for seed in range(2)]
    for params in both:
        params["head"]["kernel"] = params["head"]["kernel"] * 60  # clear winners
    return both


@contextlib.asynccontextmanager
async def opened(params, **options):
    engine = SlotEngine(CONFIG, max_slots=2, max_length=LENGTH, row_buckets=(), chunk_buckets=(16,), max_steps=2)
    sampler = EngineSampler(engine, params, **options)
    try:
        yield engine, sampler
    finally:
        await sampler.aclose()


def ask(sampler, i: int, n: int = 12):
    return sampler.complete(np.random.default_rng(i).integers(8, 40, 5).tolist(), SamplingParams(n, temperature=0.0))


def before_second_generate(engine, action) -> None:
    """``action`` runs in the engine's thread before its second ``generate``."""
    plain, calls = engine.generate, []

    def generate(*args, **kwargs):
        calls.append(1)
        if len(calls) == 2:
            action()
        return plain(*args, **kwargs)

    engine.generate = generate


def in_another_thread(sampler, params, version: int, outcomes: list) -> None:
    """Publishes from a thread of its own; returns when the engine has been told, so before it can have acted."""
    told, put = threading.Event(), sampler._inbox.put

    def announce(*args, **kwargs):
        put(*args, **kwargs)
        told.set()

    def publish():
        try:
            sampler.publish(params, version)
            outcomes.append(sampler.version)
        except Exception as error:
            outcomes.append(error)

    sampler._inbox.put = announce
    threading.Thread(target=publish, daemon=True).start()
    assert told.wait(WAIT_S)
    sampler._inbox.put = put


def test_R14_with_a_drain_no_request_sees_two_versions_and_none_starts_meanwhile(weights) -> None:
    published: list = []

    async def main():
        async with opened(weights[0], drain_timeout_s=WAIT_S) as (engine, sampler):
            before_second_generate(engine, lambda: in_another_thread(sampler, weights[1], 1, published))
            crowd = await asyncio.wait_for(asyncio.gather(*(ask(sampler, i) for i in range(6))), WAIT_S)
            return crowd, sampler.stats()

    async def fresh():
        async with opened(weights[1]) as (_, sampler):
            return [await ask(sampler, i) for i in range(2, 6)]

    crowd, stats = asyncio.run(main())
    assert published == [1]
    assert [set(c.versions) for c in crowd] == [{0}] * 2 + [{1}] * 4, "two slots were taken when the drain began"
    assert [c.ids for c in crowd[2:]] == [c.ids for c in asyncio.run(fresh())]
    assert (stats["swaps"], stats["recomputed_tokens"]) == (1, 0)


def test_a_drain_that_takes_too_long_names_its_limit_and_changes_nothing(weights) -> None:
    late, go_on = [], threading.Event()

    async def main():
        async with opened(weights[0], drain_timeout_s=0.05) as (engine, sampler):

            def stall():
                in_another_thread(sampler, weights[1], 1, late)
                assert go_on.wait(WAIT_S)

            before_second_generate(engine, stall)
            running = asyncio.gather(*(ask(sampler, i) for i in range(4)))
            while not late:
                await asyncio.sleep(0.01)
            go_on.set()
            crowd = await asyncio.wait_for(running, WAIT_S)
            return crowd, sampler.version, sampler.stats()

    crowd, version, stats = asyncio.run(main())
    assert isinstance(late[0], TimeoutError)
    assert "drain_timeout_s=0.05 s: raise publish.drain_timeout_s" in str(late[0])
    assert [set(c.versions) for c in crowd] == [{0}] * 4
    assert (version, stats["swaps"]) == (0, 0)


def test_A13_closing_a_sampler_ends_the_wait_of_its_publisher(weights) -> None:
    ended: list = []

    async def main():
        async with opened(weights[0], drain_timeout_s=WAIT_S) as (engine, sampler):

            def close_while_draining():
                in_another_thread(sampler, weights[1], 1, ended)
                sampler._inbox.close(SamplerClosed("the sampler is closed"))

            before_second_generate(engine, close_while_draining)
            with pytest.raises(SamplerClosed):
                await asyncio.wait_for(ask(sampler, 0), WAIT_S)
        for _ in range(100):
            if not ended:
                await asyncio.sleep(0.01)

    asyncio.run(main())
    assert isinstance(ended[0], SamplerClosed)


def test_an_idle_sampler_drains_at_once(weights) -> None:
    async def main():
        async with opened(weights[0], drain_timeout_s=WAIT_S) as (_, sampler):
            await asyncio.to_thread(sampler.publish, weights[1], 1)
            return (await ask(sampler, 0, 3)).versions

    assert asyncio.run(main()) == (1, 1, 1)


def test_requests_that_come_with_a_message_that_breaks_the_engine_get_its_error_at_once(weights):
    def broken():
        raise RuntimeError("broken on purpose")

    async def main():
        async with opened(weights[0], drain_timeout_s=WAIT_S) as (_, sampler):
            with sampler._inbox._changed:  # the engine gets them together
                sampler._inbox.put(broken)
                request = asyncio.create_task(ask(sampler, 0))
                while len(sampler._inbox._messages) < 3:  # broken, open, submit
                    await asyncio.sleep(0)
            with pytest.raises(RuntimeError, match="on purpose"):
                await asyncio.wait_for(request, 20)

    asyncio.run(main())
