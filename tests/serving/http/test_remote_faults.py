"""A server that fails on purpose: what is repeated, how often, what is an error at once, and that all of it is counted."""

import asyncio
import contextlib
import pathlib
import socket
import sys
import time

import pytest

pytest.importorskip("aiohttp", reason="the remote sampler needs aiohttp: pip install -e '.[serve]'")
sys.path.insert(0, str(pathlib.Path(__file__).parent))
from aiohttp import web
from aiohttp.test_utils import TestServer
from front_door import served, tiny

from crl_jax.records import SamplingParams
from crl_jax.serving.remote import RemoteSampler
from crl_jax.serving.remote_edge import Edge, RemoteError, RemoteRefused, RemoteUnavailable, Retry

QUICK = Retry(attempts=4, first_wait_s=0.001, longest_wait_s=0.01)
GOOD = {"choices": [{"finish_reason": "length", "token_ids": [7, 9], "logprobs": {"token_logprobs": [-0.5, -0.25]}}]}


class Faulty:
    """Answers completions by the faults of ``script`` in turn, then rightly. ``seen`` are the request ids."""

    def __init__(self, *script):
        self.script, self.seen = list(script), []

    def app(self):
        app = web.Application()
        app.router.add_get("/v1/models", self.models)
        app.router.add_post("/v1/completions", self.completions)
        return app

    async def models(self, request):
        return web.json_response({"data": [{"id": "m", "owned_by": "x", "max_model_len": 32, "vocab_size": 40}]})

    async def completions(self, request):
        self.seen.append(request.headers["x-request-id"])
        fault = self.script.pop(0) if self.script else {}
        if fault == "drop":
            request.transport.abort()
            return web.Response()
        if fault == "drop mid-body":
            answer = web.StreamResponse(headers={"Content-Length": "1000"})
            await answer.prepare(request)
            await answer.write(b'{"choices": [')
            request.transport.abort()
            return answer
        if fault == "slow":
            await asyncio.sleep(30)
        if isinstance(fault, int):
            return web.json_response({"error": {"message": "no", "code": "x"}}, status=fault)
        if isinstance(fault, tuple):
            return web.Response(status=fault[0], headers=fault[1])
        if isinstance(fault, bytes):
            return web.Response(body=fault, content_type="application/json")
        return web.json_response(GOOD | fault.get("body", {}), headers=fault.get("headers"))


def run(*script, ask=SamplingParams(2), **options):  # noqa: B008
    """(result or error, request ids the server saw, counters)."""

    async def main():
        faulty = Faulty(*script)
        async with TestServer(faulty.app()) as server:
            sampler = await RemoteSampler.connect(str(server.make_url("/")), **({"retry": QUICK} | options))
            try:
                result = await asyncio.wait_for(sampler.complete([1], ask), 60)
            except Exception as error:
                result = error
            stats = sampler.stats()
            await sampler.aclose()
            return result, faulty.seen, stats

    return asyncio.run(main())


def retried(stats):
    return {name: value for name, value in stats.items() if name.startswith("retr") or name == "unavailable"}


@pytest.mark.parametrize(
    ("faults", "why"),
    [
        (["drop"], {"connection": 1}),
        (["drop mid-body"], {"connection": 1}),
        ([503, 503, 503], {"503": 3}),
        ([429, 502, 504], {"429": 1, "502": 1, "504": 1}),
        (["drop mid-body", 503, "drop"], {"connection": 2, "503": 1}),
    ],
)
def test_what_may_be_repeated_is_with_the_same_id_and_counted(faults, why):
    result, seen, stats = run(*faults)
    assert (result.ids, result.logps) == ((7, 9), (-0.5, -0.25))
    assert len(seen) == len(faults) + 1
    assert len(set(seen)) == 1
    assert retried(stats) == {"retries": len(faults), "unavailable": 0} | {f"retried_{k}": n for k, n in why.items()}
    assert stats["requests"] == 2  # the card, the completion


def test_attempts_are_bounded():
    result, seen, stats = run(*[503] * 9)
    assert isinstance(result, RemoteUnavailable)
    assert "503 no (4 attempts)" in str(result)
    assert (len(seen), retried(stats)) == (4, {"retries": 3, "unavailable": 1, "retried_503": 3})


@pytest.mark.parametrize(
    ("fault", "error", "said"),
    [
        (b"<html>", RemoteError, "no JSON: is this an OpenAI-compatible server"),
        (b"[1]", RemoteError, "a JSON list"),
        (b'{"choices": []}', RemoteError, "0 choices"),
        (b"{}", RemoteError, "no choices"),
        (500, RemoteRefused, "500 no"),
        (401, RemoteRefused, "401 no"),
        (404, RemoteRefused, "404 no"),
        (400, ValueError, "400 no"),
        ((302, {"Location": "http://127.0.0.1:9/"}), RemoteRefused, "302"),
        ({"body": {"weight_version": "x"}}, RemoteError, "no whole numbers"),
        ({"headers": {"x-weight-version": "new"}}, RemoteError, "x-weight-version"),
    ],
)
def test_what_cannot_be_mended_by_asking_again_is_an_error_at_once(fault, error, said):
    result, seen, stats = run(fault)
    assert isinstance(result, error)
    assert said in str(result)
    assert (len(seen), stats["retries"]) == (1, 0)


def test_a_slow_server_meets_the_deadline_and_so_do_waits():
    started_s = time.monotonic()
    result, seen, _ = run("slow", request_timeout_s=0.2)
    assert isinstance(result, TimeoutError)
    assert len(seen) == 1
    result, seen, stats = run((503, {"Retry-After": "30"}), request_timeout_s=5.0)
    assert isinstance(result, RemoteUnavailable)
    assert (len(seen), stats["retries"]) == (1, 0)
    assert time.monotonic() - started_s < 5


def test_waits_double_are_capped_and_the_servers_wish_lengthens_them():
    waits = []

    async def sleep(seconds):
        waits.append(seconds)

    async def main():
        faulty = Faulty(503, 503, 503, (429, {"Retry-After": "7"}), 503)
        async with TestServer(faulty.app()) as server:
            edge = Edge(str(server.make_url("/")), retry=Retry(6, 0.5, 1.5), sleep=sleep)
            await edge.ask("POST", "/v1/completions", {}, request_id="a", timeout_s=60)
            await edge.aclose()

    asyncio.run(main())
    assert waits == [0.5, 1.0, 1.5, 7.0, 1.5]


def test_a_server_that_is_not_there_is_said_after_the_last_attempt():
    with contextlib.closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(RemoteUnavailable, match=r"4 attempts\): is the server up"):
            asyncio.run(RemoteSampler.connect(url, retry=QUICK))


@pytest.mark.parametrize("place", ["body", "headers"])
def test_tokens_carry_the_version_the_server_says_and_an_old_one_is_counted(place):
    async def main():
        said = [{"body": {"weight_version": v}} if place == "body" else {"headers": {"x-weight-version": str(v)}} for v in (4, 3, 5)]
        async with TestServer(Faulty(*said).app()) as server:
            sampler = await RemoteSampler.connect(str(server.make_url("/")), publish=lambda params, version: None)
            sampler.publish({}, 4)
            found = [(await sampler.complete([1], SamplingParams(2))).versions for _ in said]
            stats = sampler.stats()
            await sampler.aclose()
            return found, sampler.version, stats

    found, version, stats = asyncio.run(main())
    assert (found, version) == ([(4, 4), (3, 3), (5, 5)], 5)
    assert (stats["stale_answers"], stats["unversioned_answers"]) == (1, 0)


class Breaking:
    """Stands between a client and our own server and breaks the connection after the answer to chosen requests."""

    def __init__(self, target, broken):
        self.target, self.broken, self.count = target, set(broken), 0

    async def serve(self, reader, writer):
        there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self.target)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                there_writer.write(head + await reader.readexactly(length_of(head)))
                answer = await there_reader.readuntil(b"\r\n\r\n")
                body = await there_reader.readexactly(length_of(answer))
                if b"/v1/completions" in head.split(b"\r\n")[0]:
                    self.count += 1
                    if self.count in self.broken:
                        break
                writer.write(answer + body)
        for end in (writer, there_writer):
            end.close()


def length_of(head):
    lines = [line.partition(b":")[2] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")]
    return int(lines[0]) if lines else 0


def test_an_answer_lost_on_the_way_is_given_again_and_nothing_is_sampled_twice():
    turns = [tiny.prompt(1, 6), tiny.prompt(2, 3), tiny.prompt(3, 7)]

    async def main():
        async with served() as (client, front):
            between = Breaking(client.port, broken={1, 3})
            listener = await asyncio.start_server(between.serve, "127.0.0.1", 0)
            async with listener:
                sampler = await RemoteSampler.connect(f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}", retry=QUICK)
                session, log, replies = await sampler.open(), [], []
                for turn in turns:
                    log += turn
                    reply = await sampler.generate(session, turn, SamplingParams(3, temperature=0.0))
                    replies.append((list(log), reply.ids))
                    log += reply.ids
                stats = sampler.stats()
                await sampler.aclose()
                listener.close()
            return replies, stats, front.stats()

    replies, here, there = asyncio.run(main())
    for context, ids in replies:
        assert list(ids) == tiny.greedy(tiny.weights(0), context, 3)
    assert (here["retries"], here["retried_connection"], here["sessions_lost"]) == (2, 2, 0)
    assert (there["http_answers_repeated"], there["decoded_tokens"], there["prefilled_tokens"]) == (2, 9, 16)


def test_a_server_that_restarts_again_and_again_under_one_request_costs_time_only():
    """A restarted server knows no session; the first restart is met with a session of before, the others with one just opened."""

    async def restarted(front, turns, call, *rest):
        if turns:
            turns.pop()
            for name in list(front.sessions._held):
                await front.sessions.close(name)
        return await call(*rest)

    async def main():
        async with served() as (client, front):
            plain, lost = front.completions.answer, []
            front.completions.answer = lambda *request: restarted(front, lost, plain, *request)
            sampler = await RemoteSampler.connect(f"http://127.0.0.1:{client.port}", retry=QUICK)
            session = await sampler.open()
            first = await sampler.generate(session, tiny.prompt(1, 6), SamplingParams(3, temperature=0.0))
            lost += [1, 2, 3]
            second = await sampler.generate(session, tiny.prompt(2, 3), SamplingParams(3, temperature=0.0))
            lost += range(10)
            with pytest.raises(RemoteRefused, match="is not open"):
                await sampler.generate(session, tiny.prompt(3, 3), SamplingParams(3, temperature=0.0))
            stats = sampler.stats()
            await sampler.aclose()
            return first, second, stats, len(lost)

    first, second, stats, left = asyncio.run(main())
    assert list(second.ids) == tiny.greedy(tiny.weights(0), [*tiny.prompt(1, 6), *first.ids, *tiny.prompt(2, 3)], 3)
    assert (stats["sessions_lost"], left) == (3 + QUICK.attempts, 10 - QUICK.attempts - 1), "bounded all the same"
