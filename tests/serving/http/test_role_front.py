"""A process that trains and serves: its front opens after its models, follows its weights, and tells of an engine that stopped."""

import asyncio
import contextlib
import pathlib
import socket
import sys
import time
import urllib.error
import urllib.request

import pytest

pytest.importorskip("aiohttp", reason="the front needs aiohttp: pip install -e '.[serve]'")
sys.path.insert(0, str(pathlib.Path(__file__).parent))
from front_door import LetterCodec, hold, tiny
from remote_client import greedy

from crl_jax.role_front import open_front, reserved
from crl_jax.rollout.shell import Shell
from crl_jax.serving.access import AccessError, AddressError
from crl_jax.serving.remote import RemoteSampler
from crl_jax.serving.remote_edge import RemoteError, Retry
from crl_jax.serving.sampler import EngineSampler

ONCE = Retry(attempts=1)


@contextlib.contextmanager
def opened(token="", **options):
    """(front, sampler) on a thread of their own."""
    with reserved("127.0.0.1", 0, token) as at, Shell("extractor") as shell:
        sampler = EngineSampler(tiny.engine(), tiny.weights(0))
        try:
            with open_front("extractor", sampler, LetterCodec(), at=at, shell=shell, queue=32, **options) as front:
                yield front, sampler
        finally:
            shell.call(sampler.aclose(), 30, "closing")


def asked(front, story, **options):
    """What ``story(remote sampler)`` gives, from another event loop."""

    async def main():
        remote = await RemoteSampler.connect(front.url, retry=ONCE, **options)
        try:
            return await asyncio.wait_for(story(remote), 60)
        finally:
            await remote.aclose()

    return asyncio.run(main())


def test_T_an_address_that_cannot_be_used_is_found_before_there_is_a_model():
    with pytest.raises(AccessError, match="--token-file"), reserved("0.0.0.0", 0):
        pass
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(AddressError, match=f"127.0.0.1:{port} is in use"), reserved("127.0.0.1", port):
            pass
    with reserved("0.0.0.0", 0, "secret") as at:
        assert at.url.startswith("http://0.0.0.0:")


def test_nobody_is_let_in_before_there_is_a_sampler_and_after_the_end():
    with reserved("127.0.0.1", 0) as at, pytest.raises(urllib.error.URLError, match="refused"):
        urllib.request.urlopen(f"{at.url}/health", timeout=5)
    with opened(token="secret") as (front, _):
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(f"{front.url}/health", timeout=5)
        front.close()
        front.close()
        with pytest.raises(urllib.error.URLError, match="refused"):
            urllib.request.urlopen(f"{front.url}/health", timeout=5)


def test_R14_requests_in_flight_go_on_when_the_process_publishes_and_each_token_says_its_version():
    prompt = tiny.prompt(1, 6)

    async def story(remote, sampler, go):
        running = asyncio.create_task(remote.complete(prompt, greedy(12)))
        while not sampler.stats()["decoded_tokens"]:
            await asyncio.sleep(0.002)
        sampler.publish(tiny.weights(1), 5)
        go.set()
        return await running, remote.version, await remote.complete(prompt, greedy(3))

    with opened() as (front, sampler):
        go = hold(front._front)
        mixed, version, later = asked(front, lambda remote: story(remote, sampler, go))
        assert front.stats()["http_requests"] >= 3
        front.check()
    old = mixed.versions.count(0)
    assert 0 < old < 12
    assert mixed.versions == (0,) * old + (5,) * (12 - old)
    assert list(mixed.ids[:old]) == tiny.greedy(tiny.weights(0), prompt, old)
    assert list(mixed.ids[old:]) == tiny.greedy(tiny.weights(1), [*prompt, *mixed.ids[:old]], 12 - old)
    assert (version, later.versions) == (5, (5,) * 3)


def test_P_an_engine_that_stops_answers_an_error_and_tells_the_job():
    async def story(remote):
        with pytest.raises(RemoteError, match=r"50[03].*out of memory"):
            await remote.complete([20], greedy(4))
        with pytest.raises(RemoteError, match=r"50[03]"):
            await remote.complete([21], greedy(4))

    def broken():
        if sampler._scheduler.waiting or sampler._scheduler.running:
            raise RuntimeError("out of memory")

    with opened() as (front, sampler):
        front.check()
        sampler._turn.step = broken
        asked(front, story)
        with pytest.raises(RuntimeError, match="out of memory"):
            front.check()


def test_closing_does_not_wait_for_a_request_that_does_not_end():
    async def story(remote, front, sampler):
        running = asyncio.create_task(remote.complete([20], greedy(25)))
        while not sampler.stats()["decoded_tokens"]:
            await asyncio.sleep(0.002)
        started = time.monotonic()
        await asyncio.to_thread(front.close)
        took_s = time.monotonic() - started
        with pytest.raises(RemoteError):
            await running
        return took_s

    with opened(grace_s=0.2) as (front, sampler):
        go = hold(front._front)
        try:
            assert asked(front, lambda remote: story(remote, front, sampler)) < 5
        finally:
            go.set()
