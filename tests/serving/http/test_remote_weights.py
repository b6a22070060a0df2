"""New weights through a remote sampler: published, refused, and brought back to a server that restarted."""

import asyncio
import pathlib
import sys

import pytest

pytest.importorskip("aiohttp", reason="the remote sampler needs aiohttp: pip install -e '.[serve]'")
sys.path.insert(0, str(pathlib.Path(__file__).parent))
from front_door import served, tiny
from remote_client import greedy, run

from crl_jax.serving.remote import CannotPublish, RemoteSampler
from crl_jax.serving.remote_edge import RemoteRefused
from crl_jax.serving.remote_weights import PublishFailed, SharedFolder


@pytest.mark.parametrize("first", [0, 60], ids=["with its recipe's weights", "with a later version of another run"])
def test_R14_a_server_that_restarted_gets_the_newest_weights_again(tmp_path, first):
    async def main():
        async with served(folder=tmp_path) as (client, front):
            url = str(client.make_url("/"))
            hook = SharedFolder(url, tmp_path, "actor", timeout_s=60)
            sampler = await RemoteSampler.connect(url, publish=hook, republish=hook.again)
            await asyncio.to_thread(sampler.publish, tiny.weights(1), 5)
            front.sampler.publish(tiny.weights(0), first)  # what a restart does
            stale = await asyncio.gather(*(sampler.complete(tiny.prompt(i, 6), greedy(3)) for i in range(4)))
            fresh = await sampler.complete(tiny.prompt(9, 6), greedy(3))
            stats, version = sampler.stats(), sampler.version
            await sampler.aclose()
            return stale, fresh, stats, version

    stale, fresh, stats, version = asyncio.run(main())
    assert {c.versions for c in stale} == {(first,) * 3}, "said truthfully"
    assert (fresh.versions, version) == ((5,) * 3, 5)
    assert list(fresh.ids) == tiny.greedy(tiny.weights(1), tiny.prompt(9, 6), 3)
    assert (stats["stale_answers"], stats["republished"]) == (4, 1)


def test_weights_the_server_refused_are_not_those_it_gets_again(tmp_path):
    async def main():
        async with served(folder=tmp_path) as (client, front):
            hook = SharedFolder(str(client.make_url("/")), tmp_path, "actor", timeout_s=60)
            await asyncio.to_thread(hook, tiny.weights(1), 5)
            with pytest.raises(PublishFailed):
                await asyncio.to_thread(hook, {"head": tiny.weights(0)["head"]}, 6)
            front.sampler.publish(tiny.weights(0), 0)
            await asyncio.to_thread(hook.again)
            return front.sampler.version

    assert asyncio.run(main()) == 5


def test_R14_R15_published_weights_are_what_samples_next(tmp_path):
    async def main():
        async with served(folder=tmp_path) as (client, _):
            url = str(client.make_url("/"))
            hook = SharedFolder(url, tmp_path, "actor", timeout_s=60)
            sampler = await RemoteSampler.connect(url, publish=hook)
            session = await sampler.open()
            first = await sampler.generate(session, tiny.prompt(1, 6), greedy(3))
            for version in (5, 6, 7):
                await asyncio.to_thread(sampler.publish, tiny.weights(1), version)
            second = await sampler.generate(session, tiny.prompt(2, 4), greedy(4))
            with pytest.raises(PublishFailed, match="parameters"):
                await asyncio.to_thread(sampler.publish, {"head": tiny.weights(0)["head"]}, 8)
            stats = sampler.stats()
            await sampler.aclose()
            return first, second, stats, sampler.version

    first, second, stats, version = asyncio.run(main())
    assert (first.versions, second.versions, version) == ((0,) * 3, (7,) * 4, 7)
    context = [*tiny.prompt(1, 6), *first.ids, *tiny.prompt(2, 4)]
    assert list(second.ids) == tiny.greedy(tiny.weights(1), context, 4)
    tiny.check_logps(tiny.weights(1), context, second)
    assert (stats["swaps"], stats["stale_answers"]) == (3, 0)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["actor-6.safetensors", "actor-7.safetensors", "actor-8.safetensors"]


def test_without_a_way_to_publish_it_says_so_and_a_wrong_token_is_refused():
    async def test(sampler, front, url):
        with pytest.raises(CannotPublish, match="weights_folder"):
            sampler.publish({}, 1)
        with pytest.raises(RemoteRefused, match="401"):
            await RemoteSampler.connect(url, token="no")

    run(test, token="secret", remote={"token": "secret"})
