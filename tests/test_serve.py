"""`crl serve` as a process: mistakes are one line and found early; it answers, and ends with code 0 when told to."""

import asyncio
import contextlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

import jax
import pytest

from crl_jax import cli, serve
from crl_jax.config import load
from crl_jax.models.transformer import ModelConfig, init
from crl_jax.served_role import Source
from crl_jax.serving.engine import SlotEngine
from crl_jax.serving.sampler import EngineSampler

pytest.importorskip("aiohttp", reason="the HTTP front door needs aiohttp: pip install -e '.[serve]'")
from crl_jax.serving.access import AccessError, check_open_to, is_local_request, is_loopback, may_enter

ROOT = pathlib.Path(__file__).resolve().parents[1]
QUICKSTART = str(ROOT / "configs" / "quickstart.yaml")
SERVE = ["serve", "actor", QUICKSTART]


def test_Z07_this_machine_is_the_default_and_any_other_address_needs_a_token():
    assert cli.parser().parse_args(SERVE).host == "127.0.0.1"
    for host in ("127.0.0.1", "localhost", "::1", "[::1]", "127.1.2.3", "LOCALHOST"):
        assert is_loopback(host)
        check_open_to(host, "")
    for host in ("0.0.0.0", "::", "", "10.0.0.1", "example.org", "127.0.0.1.example.org", "localhost.example.org"):
        assert not is_loopback(host)
        with pytest.raises(AccessError, match="--token-file"):
            check_open_to(host, "")
        check_open_to(host, "token")
    for token in ("with space", "new\nline", "ümlaut"):
        with pytest.raises(AccessError, match="printable ASCII"):
            check_open_to("127.0.0.1", token)


def test_Z07_tokens_and_host_names():
    assert may_enter(None, "")
    assert may_enter("Bearer abc", "abc")
    assert may_enter("bearer abc", "abc")
    for wrong in (None, "", "abc", "Bearer", "Bearer ab", "Bearer abcd", "Basic abc", "Bearer ABC"):
        assert not may_enter(wrong, "abc")
    for host in ("127.0.0.1:8000", "localhost", "[::1]:8000", "[::1]"):
        assert is_local_request(host)
    for host in ("", "evil.example", "evil.example:8000", "127.0.0.1.evil.example:80"):
        assert not is_local_request(host)


@pytest.mark.parametrize(("settings", "drain_s"), [([], 0.0), (["actor.publish.drain=true", "actor.publish.drain_timeout_s=7"], 7.0)])
def test_new_weights_come_as_the_recipe_says(settings, drain_s, monkeypatch):
    class Enough(Exception):
        pass

    def sampler(*args, **options):
        assert (options["drain_timeout_s"], options["host_bytes"]) == (drain_s, 256 * 2**20)
        raise Enough

    monkeypatch.setattr(serve, "EngineSampler", sampler)
    with pytest.raises(Enough):
        asyncio.run(serve._serve_http(load(QUICKSTART, settings), "actor", Source(), serve.ServeOptions(port=0), ""))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--host", "0.0.0.0"], "give a token with --token-file"),
        (["--token-file", "nowhere"], "token file nowhere cannot be read"),
        (["--host", "256.1.1.1", "--token-file", "TOKEN"], "256.1.1.1"),
        (["--protocol", "jetstream", "--weights-folder", "."], "cannot publish weights"),
        (["--weights-folder", "nowhere"], "is no folder"),
        (["--port", "65536"], "a port is 1 to 65535"),
        (["--timeout-s", "0"], "--timeout-s 0 above 0"),
        (["--step", "3"], "say which with --run"),
        (["--port", "TAKEN"], "is in use by another program: choose another --port"),
    ],
)
def test_mistakes_are_said_before_the_model_is_loaded(arguments, said, tmp_path, capsys, monkeypatch):
    (tmp_path / "token").write_text("secret\n")
    monkeypatch.setattr("crl_jax.serve.load_role", lambda *_: pytest.fail("the model was loaded"))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        names = {"TOKEN": str(tmp_path / "token"), "TAKEN": str(taken.getsockname()[1])}
        assert cli.main([*SERVE, "run.compile_cache=", *(names.get(a, a) for a in arguments)]) in (1, 2)
    error = capsys.readouterr().err
    assert said in error
    assert len(error.splitlines()) == 1


@contextlib.contextmanager
def process(*arguments):
    """A server process and its address."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    cache = f"run.compile_cache={jax.config.jax_compilation_cache_dir}"
    command = [sys.executable, "-m", "crl_jax.cli", *SERVE, cache, "actor.slots=4", "actor.chunk_buckets=[12]", "--port", "0", *arguments]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    deadline = threading.Timer(240, running.kill)
    deadline.start()
    try:
        assert running.stdout is not None
        yield running, next(word for word in running.stdout.readline().split() if "://" in word)
    finally:
        deadline.cancel()
        running.kill()
        running.wait(30)


def post(url, body, token=""):
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read())


@pytest.mark.system
def test_Z07_it_answers_who_has_the_token_and_ends_in_seconds_with_code_0(tmp_path):
    (tmp_path / "token").write_text("secret\n")
    with process("--token-file", str(tmp_path / "token")) as (running, url):
        assert url.startswith("http://127.0.0.1:")
        answer = post(f"{url}/completions", {"prompt": "find the stairs", "max_tokens": 3, "ignore_eos": True}, "secret")
        assert answer["usage"]["completion_tokens"] == 3
        with pytest.raises(urllib.error.HTTPError, match="401"):
            post(f"{url}/completions", {"prompt": "find the stairs"}, "wrong")
        # A request in flight does not keep it from ending.
        busy = threading.Thread(target=long_stream, args=(url, "secret"), daemon=True)
        busy.start()
        time.sleep(0.2)
        running.send_signal(signal.SIGTERM)
        started_s = time.monotonic()
        assert running.wait(30) == 0
        assert time.monotonic() - started_s < 15


@pytest.mark.system
def test_jetstreams_protocol_is_answered_and_ends_with_code_0():
    pytest.importorskip("jetstream", reason="JetStream's protocol needs google-jetstream: pip install -e '.[jetstream]'")
    import grpc

    from crl_jax.serving.jetstream_import import import_jetstream

    pb2 = import_jetstream("jetstream.core.proto.jetstream_pb2")
    with process("--protocol", "jetstream") as (running, url):
        with grpc.insecure_channel(url.removeprefix("grpc://")) as channel:
            client = import_jetstream("jetstream.core.proto.jetstream_pb2_grpc").OrchestratorStub(channel)
            request = pb2.DecodeRequest(text_content=pb2.DecodeRequest.TextContent(text="find the stairs"), max_tokens=3)
            parts = list(client.Decode(request, timeout=60))
        ids = [i for part in parts for i in part.stream_content.samples[0].token_ids]  # without the stop id
        assert (len(parts) >= 1, len(ids) <= 3) == (True, True)
        running.send_signal(signal.SIGINT)
        assert running.wait(30) == 0


def long_stream(url, token):
    with contextlib.suppress(OSError, ValueError):
        post(f"{url}/completions", {"prompt": "find", "max_tokens": 180, "n": 16, "ignore_eos": True}, token)


def test_a_stop_signal_is_an_event():
    from crl_jax.serving.signals import stop_event

    async def main():
        with stop_event() as stop:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.wait_for(stop.wait(), 5)
            return stop.is_set()

    assert asyncio.run(main())


def test_the_warm_up_runs_inputs_of_every_chunk_size():
    model = ModelConfig("tiny", 40, 16, 1, 2, 1, 8, 32)
    engine = SlotEngine(model, max_slots=2, max_length=64, row_buckets=(1,), chunk_buckets=(4, 12, 24, 48))
    plain, widths = engine.extend, []

    def extend(params, state, rows):
        widths.extend(len(row.tokens) for row in rows)
        return plain(params, state, rows)

    engine.extend = extend

    async def main():
        sampler = EngineSampler(engine, init(model, jax.random.key(0)))
        try:
            await serve.warm_up(engine, sampler)
        finally:
            await sampler.aclose()

    asyncio.run(main())
    assert widths == [4, 12, 24, 48]
