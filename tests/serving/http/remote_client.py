"""A remote sampler over the tiny model's server, both in this process."""

import asyncio
import contextlib
import pathlib
import sys

import pytest

pytest.importorskip("aiohttp", reason="the remote sampler needs aiohttp: pip install -e '.[serve]'")
sys.path.insert(0, str(pathlib.Path(__file__).parent))
from front_door import served

from crl_jax.records import SamplingParams
from crl_jax.serving.remote import RemoteSampler


def greedy(n, **more):
    return SamplingParams(n, temperature=0.0, **more)


@contextlib.asynccontextmanager
async def connected(*, remote=None, **options):
    """(remote sampler, the front door's parts, its address)."""
    async with served(**options) as (client, front):
        url = str(client.make_url("/"))
        sampler = await RemoteSampler.connect(url, **(remote or {}))
        try:
            yield sampler, front, url
        finally:
            await sampler.aclose()


def run(test, **options):
    async def main():
        async with connected(**options) as parts:
            return await asyncio.wait_for(test(*parts), 120)

    return asyncio.run(main())
