"""JetStream's own protocol: its Driver and orchestrator in a process of their own, its client stub here."""

import concurrent.futures
import contextlib
import functools
import os
import pathlib
import subprocess
import sys
import threading
import time

import jax
import pytest

pytest.importorskip("jetstream", reason="JetStream's protocol needs google-jetstream: pip install -e '.[jetstream]'")
import grpc

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE / "http"))
import tiny_model as tiny  # noqa: E402
from letters import LetterCodec  # noqa: E402

from crl_jax.serving.access import AccessError, AddressError  # noqa: E402
from crl_jax.serving.jetstream_import import import_jetstream  # noqa: E402

pb2 = import_jetstream("jetstream.core.proto.jetstream_pb2")
pb2_grpc = import_jetstream("jetstream.core.proto.jetstream_pb2_grpc")


SERVERS = {"both": "1,1,", "two prefill": "2,1,", "two generate": "1,2,", "token": "1,1,secret"}


@pytest.fixture(scope="module")
def ports():
    """The ports of several servers in one process, whose exit code must be 0 afterwards."""
    command = [sys.executable, str(HERE / "drive_jetstream_server.py"), *SERVERS.values()]
    environment = os.environ | {
        "JAX_COMPILATION_CACHE_DIR": str(jax.config.jax_compilation_cache_dir),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "PYTHONPATH": str(HERE.parents[1]),
    }
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    deadline = threading.Timer(400, process.kill)
    deadline.start()
    try:
        assert process.stdout is not None
        yield dict(zip(SERVERS, map(int, process.stdout.readline().split()), strict=True))
        process.stdin.close()
        assert process.wait(60) == 0
    finally:
        deadline.cancel()
        process.kill()
        process.wait(30)


@contextlib.contextmanager
def stub(port):
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        grpc.channel_ready_future(channel).result(timeout=60)
        yield pb2_grpc.OrchestratorStub(channel)


def text_request(ids, max_tokens):
    return pb2.DecodeRequest(text_content=pb2.DecodeRequest.TextContent(text=LetterCodec().decode(ids)), max_tokens=max_tokens)


def id_request(ids, max_tokens):
    return pb2.DecodeRequest(token_content=pb2.DecodeRequest.TokenContent(token_ids=ids), max_tokens=max_tokens)


def decode(client, request, metadata=()):
    """(text, ids) of the answer."""
    parts = [part.stream_content.samples[0] for part in client.Decode(request, timeout=120, metadata=metadata)]
    return "".join(p.text for p in parts), [i for p in parts for i in p.token_ids]


@functools.cache
def expected(seed, n, max_tokens):
    ids = tiny.greedy(tiny.weights(0), tiny.prompt(seed, n), max_tokens)
    return ids[: ids.index(tiny.STOP)] if tiny.STOP in ids else ids


def code_of(client, request, metadata=()):
    with pytest.raises(grpc.RpcError) as error:
        decode(client, request, metadata)
    return error.value.code(), error.value.details()


@pytest.mark.system
def test_answers_are_greedy_decoding_wrong_requests_are_refused_and_the_process_lives(ports):
    with stub(ports["both"]) as client:
        assert client.HealthCheck(pb2.HealthCheckRequest(), timeout=30).is_live
        for seed, n in ((1, 6), (2, 21)):
            text, ids = decode(client, text_request(tiny.prompt(seed, n), 8))
            assert ids == expected(seed, n, 8)
            assert text == LetterCodec().decode(ids)
        assert decode(client, id_request(tiny.prompt(1, 6), 8)) == ("", expected(1, 6, 8))
        bad = [
            id_request([1] * tiny.LENGTH, 1),
            id_request([40], 1),
            id_request([], 1),
            id_request([1], 0),
            pb2.DecodeRequest(max_tokens=1),
        ]
        assert [code_of(client, request)[0] for request in bad] == [grpc.StatusCode.INVALID_ARGUMENT] * 5
        assert f"max_length={tiny.LENGTH}" in code_of(client, bad[0])[1]
        # One request at a time empties the slots after each: the moment in which JetStream's own loop ends its process.
        for i in range(30):
            assert decode(client, id_request(tiny.prompt(1, 6), 1 + i % 3))[1] == expected(1, 6, 3)[: 1 + i % 3]
        # Clients that go away free their slots: 12 of them over 4 slots, then one that must get through.
        for _ in range(12):
            call = client.Decode(id_request([20], 31), timeout=60)
            next(iter(call))
            call.cancel()
        assert decode(client, id_request(tiny.prompt(1, 6), 8))[1] == expected(1, 6, 8)


@pytest.mark.system
@pytest.mark.parametrize("which", ["two prefill", "two generate"])
def test_V11_engines_in_unequal_numbers_complete_all_requests(ports, which):
    with stub(ports[which]) as client, concurrent.futures.ThreadPoolExecutor(8) as pool:
        started_s = time.monotonic()
        asked = [pool.submit(decode, client, id_request(tiny.prompt(1 + i % 2, 6), 8)) for i in range(8)]
        for i, answer in enumerate(asked):
            assert answer.result(120)[1] == expected(1 + i % 2, 6, 8)
        assert time.monotonic() - started_s < 120


REQUESTER = pathlib.Path(os.environ.get("JETSTREAM_REQUESTER", ""))


@pytest.mark.system
@pytest.mark.skipif(
    not REQUESTER.is_file(),
    reason="JetStream's wheel leaves out jetstream/tools/requester.py: set JETSTREAM_REQUESTER to that file of its source (tag v0.2.2)",
)
def test_jetstreams_own_requester_talks_to_it(ports):
    prompt = LetterCodec().decode(tiny.prompt(1, 6))
    options = ["--server=127.0.0.1", f"--port={ports['both']}", f"--text={prompt}", "--max_tokens=8", "--tokenizer=none"]
    run = subprocess.run([sys.executable, str(REQUESTER), *options], capture_output=True, text=True, timeout=240, check=True)
    assert f"Response: {LetterCodec().decode(expected(1, 6, 8))}" in run.stdout.splitlines()


@pytest.mark.system
def test_Z07_calls_without_the_token_are_refused(ports):
    with stub(ports["token"]) as client:
        for metadata in ((), (("authorization", "Bearer no"),)):
            assert code_of(client, id_request([20], 1), metadata)[0] == grpc.StatusCode.UNAUTHENTICATED
        with pytest.raises(grpc.RpcError, match="token"):
            client.HealthCheck(pb2.HealthCheckRequest(), timeout=30)
        right = (("authorization", "Bearer secret"),)
        assert decode(client, id_request(tiny.prompt(1, 6), 2), right)[1] == expected(1, 6, 2)


def test_Z07_an_open_host_needs_a_token_and_a_taken_port_is_said():
    code = (
        "import asyncio, socket\n"
        "from crl_jax.serving import jetstream_server as server\n"
        "import logging\n"
        "assert logging.getLogger().level == logging.WARNING and not logging.getLogger().handlers\n"
        "async def main():\n"
        "    for host, port in (('0.0.0.0', 0), ('127.0.0.1', taken.getsockname()[1])):\n"
        "        try:\n"
        "            server.bind(host, port, '')\n"
        "        except Exception as error:\n"
        "            print(type(error).__name__, error)\n"
        "with socket.socket() as taken:\n"
        "    taken.bind(('127.0.0.1', 0)); taken.listen()\n"
        "    asyncio.run(main())\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    first, second = run.stdout.splitlines()
    assert first.startswith(AccessError.__name__)
    assert "--token-file" in first
    assert second.startswith(AddressError.__name__)
    assert "--port" in second
