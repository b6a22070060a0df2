"""A bank whose extractor's server is not up yet, goes away, or is the wrong one: searches never notice."""

import asyncio
import os
import pathlib
import signal

import pytest
from service_toys import ROOT, HashEmbedder, add, episode, remote, run

pytest.importorskip("aiohttp", reason="the extractor's server is asked over HTTP: pip install -e '.[serve]'")
from aiohttp import web

from crl_jax import build, serve_bank
from crl_jax.config.load import load
from crl_jax.config.parse import ConfigError
from crl_jax.serve_bank import ServeOptions
from crl_jax.serving.spread import Backoff

RECIPE = ROOT / "configs" / "smoke.yaml"


class Extractor:
    """Answers as ``crl serve`` does with one lesson, on a port of its own that it keeps over restarts."""

    def __init__(self, max_length=4096):
        self.port = self.answered = 0
        self.max_length, self.runner = max_length, None

    async def _models(self, request):
        card = {"id": "extractor", "owned_by": "crl_jax", "max_model_len": self.max_length, "vocab_size": 1000, "weight_version": 0}
        return web.json_response({"data": [card]})

    async def _complete(self, request):
        self.answered += 1
        body = await request.json()
        lists = {"token_ids": [1], "token_versions": [0], "finish_reason": "stop", "index": 0, "text": "x"}
        choice = lists | {"logprobs": {"token_logprobs": [-1.0], "tokens": ["x"], "sampling_logprobs": [-1.0]}}
        return web.json_response({"model": body["model"], "choices": [choice], "weight_version": 0})

    async def __aenter__(self):
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", lambda _: web.json_response({"status": "ok"}))
        app.router.add_post("/v1/completions", self._complete)
        self.runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        self.port = self.runner.addresses[0][1]
        return self

    async def __aexit__(self, *_):
        await self.runner.cleanup()


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(build, "MiniLM", HashEmbedder)
    monkeypatch.setattr(serve_bank, "_ATTEMPTS", 1)
    monkeypatch.setattr("crl_jax.serving.spread.Backoff", lambda **_: Backoff(0.05, 0.1))


async def served(path: pathlib.Path, extractor: Extractor, capsys, act, *settings):
    """The bank in this process while ``act(client)`` runs; what it said, and its end."""
    url = f"http://127.0.0.1:{extractor.port}"
    config = load(RECIPE, [f"extractor.server.url={url}", "run.collect_timeout_s=30", "bank.min_similarity=-1.0", *settings])
    serving = asyncio.create_task(serve_bank._serve(config, path / "bank.sqlite", ServeOptions(port=0, drain_s=0.2), "", None))
    said = ""
    while " at grpc" not in said:
        await asyncio.sleep(0.02)
        said += capsys.readouterr().out
        assert not serving.done(), serving.result()
    async with remote("grpc" + said.split(" at grpc")[1].split()[0]) as bank:
        acting = asyncio.create_task(act(bank))
        await asyncio.wait({acting, serving}, return_when=asyncio.FIRST_COMPLETED)
        acting.cancel() if serving.done() else acting.result()
    if not serving.done():
        os.kill(os.getpid(), signal.SIGTERM)
    assert await serving == 0
    return said + capsys.readouterr().out


async def learned(bank, extractor, count):
    """Every one of ``count`` episodes was answered and settled."""
    assert await bank.drain(20) == 0
    stats = await bank.stats()
    assert (stats["generations_distil"], stats["inbox"], extractor.answered) == (count, 0, count)


def test_K_searches_are_served_before_the_extractor_is_up_and_while_it_restarts(tmp_path, quick, capsys):
    extractor = Extractor()

    async def act(bank):
        await bank.write("room", add("the key is under the bed"))
        assert await bank.submit(episode("e1", observation="one"))
        await asyncio.sleep(0.3)
        assert await bank.drain(0.01) == 1  # waits
        assert (await bank.retrieve("room", "where is the key?"))[0].text == "the key is under the bed"
        async with extractor:
            await learned(bank, extractor, 1)
        assert await bank.submit(episode("e2", observation="two"))
        for _ in range(5):
            assert await bank.retrieve("room", "where is the key?")
            await asyncio.sleep(0.05)
        assert await bank.drain(0.01) == 1
        stats = await bank.stats()
        assert (stats["extractor_servers_up"], stats["extractor_marked_down"]) == (0, 1)
        async with extractor:
            await learned(bank, extractor, 2)
        assert (await bank.stats())["extractor_servers_up"] == 1

    async def story():
        async with extractor:
            pass  # its port is free now
        return await served(tmp_path, extractor, capsys, act)

    said = run(story())
    assert "crl bank serve: extractor: http://127.0.0.1:" in said
    assert "looking again in" in said
    assert said.count("answers again") == 2


def test_K_distillations_that_wait_too_long_are_counted_and_the_bank_goes_on(tmp_path, quick, capsys):
    extractor = Extractor()

    async def act(bank):
        assert await bank.submit(episode("e1", observation="one"))
        assert await bank.drain(20) == 0
        stats = await bank.stats()
        assert (stats["sample_timeouts"], stats["inbox"], extractor.answered) == (1, 0, 0)
        async with extractor:
            assert await bank.submit(episode("e2", observation="two"))
            assert await bank.drain(20) == 0
        assert extractor.answered == 1

    async def story():
        async with extractor:
            pass
        await served(tmp_path, extractor, capsys, act, "run.collect_timeout_s=1")

    run(story())


def test_an_extractor_that_cannot_be_used_ends_the_bank_with_the_reason(tmp_path, quick, capsys):
    async def act(bank):
        await asyncio.sleep(5)

    async def story():
        async with Extractor(max_length=16) as extractor:
            await served(tmp_path, extractor, capsys, act)

    with pytest.raises(ConfigError, match=r"`extractor\.max_length`: .* the server takes 16 tokens"):
        run(story())
