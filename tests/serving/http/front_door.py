"""A server over the tiny model in this process, and a client for it."""

import asyncio
import contextlib
import itertools
import pathlib
import sys
import threading

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import tiny_model as tiny
from aiohttp.test_utils import TestClient, TestServer
from letters import LetterCodec

from crl_jax.models.safetensors_io import load_params
from crl_jax.serving.http import server
from crl_jax.serving.http.app import make_app

GREEDY = {"temperature": 0, "ignore_eos": True, "return_token_ids": True, "logprobs": 0}


def make_front(sampler, *, token="", limit=64, folder=None, clock=lambda: 0.0, codec=None, session_limit=100):
    front = server.front(
        sampler,
        codec or LetterCodec(),
        "tiny",
        token=token,
        queue=limit,
        constrained=True,
        weights=None if folder is None else (folder, lambda path: load_params(tiny.CONFIG, path)),
        clock=clock,
        now=itertools.count(1_700_000_000).__next__,
    )
    front.sessions._limit, front.sessions._idle_s = session_limit, 60
    return front


def hold(front):
    """After the first tokens the engine waits (at most 60 s) until the event is set, so that a request is surely still running."""
    go, plain = threading.Event(), front.sampler._turn.step

    def step():
        if front.sampler._scheduler.counts["decoded_tokens"]:
            go.wait(60)
        plain()

    front.sampler._turn.step = step
    return go


@contextlib.asynccontextmanager
async def served(*, slots=8, sampler_options=None, **options):
    """(client, front); the socket is on this machine."""
    async with tiny.opened(tiny.engine(slots), tiny.weights(0), **(sampler_options or {})) as sampler:
        front = make_front(sampler, **options)
        async with TestClient(TestServer(make_app(front), handler_cancellation=True)) as client:
            yield client, front


def run(test, **options):
    """What ``test(client, front)`` gives, within two minutes."""

    async def main():
        async with served(**options) as (client, front):
            return await asyncio.wait_for(test(client, front), 120)

    return asyncio.run(main())


async def ask(client, route="/v1/completions", /, headers=None, **body):
    """(status, JSON, headers) of a POST."""
    async with client.post(route, json=body, headers=headers) as answer:
        return answer.status, await answer.json(), answer.headers


async def until(reached, deadline_s=60):
    """Waits for ``reached()``."""
    async with asyncio.timeout(deadline_s):
        while not reached():
            await asyncio.sleep(0.002)
