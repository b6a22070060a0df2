"""The HTTP front door over a real engine: what is answered, streamed, refused and freed."""

import asyncio
import json
import math
import pathlib
import socket
import sys

import numpy as np
import pytest

pytest.importorskip("aiohttp", reason="the HTTP front door needs aiohttp: pip install -e '.[serve]'")
sys.path.insert(0, str(pathlib.Path(__file__).parent))
from front_door import GREEDY, LetterCodec, ask, hold, run, tiny, until

from crl_jax.serving.access import AddressError, may_enter
from crl_jax.serving.http import server


async def events(client, **body):
    async with client.post("/v1/completions", json=body | {"stream": True}) as answer:
        assert answer.status == 200, await answer.text()
        assert answer.content_type == "text/event-stream"
        raw = (await answer.text()).split("\n\n")
    assert raw[-1] == ""
    return [part.removeprefix("data: ") for part in raw[:-1]]


def letters(ids):
    return LetterCodec().decode(ids)


def test_greedy_answer_has_text_ids_log_probs_versions_and_usage():
    prompt = tiny.prompt(1, 6)

    async def test(client, front):
        front.sampler.publish(tiny.weights(0), 4)
        whole = await ask(client, prompt=prompt, max_tokens=5, **GREEDY)
        by_text = await ask(client, prompt=letters(prompt), max_tokens=5, temperature=0, ignore_eos=True, model="tiny")
        return whole, by_text

    (status, body, headers), (_, plain, _) = run(test)
    expected = tiny.greedy(tiny.weights(0), prompt, 5)
    (choice,) = body["choices"]
    assert (status, choice["token_ids"], choice["text"], choice["finish_reason"]) == (200, expected, letters(expected), "length")
    assert choice["logprobs"]["tokens"] == [letters([i]) for i in expected]
    assert choice["logprobs"]["text_offset"] == [len(letters(expected[:i])) for i in range(5)]
    logits = tiny.teacher(tiny.weights(0), [*prompt, *expected]).astype(np.float64)[len(prompt) - 1 : -1]
    exact = [row[i] - np.log(np.exp(row).sum()) for row, i in zip(logits, expected, strict=True)]
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(exact, abs=1e-4)
    assert choice["token_versions"] == [4] * 5
    assert (body["weight_version"], headers["x-weight-version"], body["object"], body["model"]) == (4, "4", "text_completion", "tiny")
    assert body["usage"] == {"prompt_tokens": 6, "completion_tokens": 5, "total_tokens": 11}
    assert plain["choices"][0]["text"] == letters(expected)
    assert plain["choices"][0]["logprobs"] is None
    assert "token_ids" not in plain["choices"][0]


def test_S08_S11_choices_seeds_and_options_belong_to_their_request():
    async def test(client, front):
        sampled = {"prompt": [20, 21], "max_tokens": 6, "temperature": 3, "ignore_eos": True}
        return await asyncio.gather(
            ask(client, **sampled, seed=7, n=8, logprobs=0, return_token_ids=True),
            ask(client, **sampled, seed=7, n=8, return_token_ids=True),
            ask(client, **sampled, seed=7, logprobs=5),
            ask(client, **sampled, seed=7, return_tokens_as_token_ids=True, logprobs=0),
        )

    with_logps, without, five, named = run(test)
    ids = [c["token_ids"] for c in with_logps[1]["choices"]]
    assert ids == [c["token_ids"] for c in without[1]["choices"]]
    assert len({tuple(i) for i in ids}) >= 2
    assert all(math.isfinite(x) and x <= 0 for c in with_logps[1]["choices"] for x in c["logprobs"]["token_logprobs"])
    assert all(c["logprobs"] is None for c in without[1]["choices"])
    assert five[0] == 400
    assert named[1]["choices"][0]["logprobs"]["tokens"] == [f"token_id:{i}" for i in ids[0]]


def test_a_stop_id_ends_the_answer_and_stays_among_the_ids_but_not_in_the_text():
    prompt = tiny.prompt(1, 6)
    expected = tiny.greedy(tiny.weights(0), prompt, 4)

    async def test(client, front):
        return (await ask(client, prompt=prompt, max_tokens=9, stop_token_ids=[expected[3]], **GREEDY))[1]["choices"][0]

    choice = run(test)
    end = expected.index(expected[3]) + 1
    assert choice["token_ids"] == expected[:end]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (letters(expected[: end - 1]), "stop", expected[3])
    assert len(choice["logprobs"]["token_logprobs"]) == len(choice["logprobs"]["tokens"]) == end


def test_C09_R08_a_stop_string_ends_ids_at_its_token_and_text_before_it():
    prompt = tiny.prompt(1, 6)
    expected = tiny.greedy(tiny.weights(0), prompt, 8)
    text = letters(expected)
    stop = letters(expected[2:4])  # over two tokens
    end = next(n for n in range(9) if stop in letters(expected[:n]))

    async def test(client, front):
        body = {"prompt": prompt, "max_tokens": 8, "stop": stop, **GREEDY}
        return (await ask(client, **body))[1]["choices"][0], await events(client, **body)

    choice, streamed = run(test)
    assert choice["token_ids"] == expected[:end]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (text[: text.index(stop)], "stop", stop)
    assert len(choice["logprobs"]["token_logprobs"]) == len(choice["logprobs"]["tokens"]) == end
    assert "".join(json.loads(part)["choices"][0]["text"] for part in streamed[:-1]) == choice["text"]


def test_R07_streamed_parts_joined_are_the_whole_answer():
    body = {"prompt": [tiny.prompt(1, 6), tiny.prompt(2, 5)], "max_tokens": 11, **GREEDY}

    async def test(client, front):
        return await events(client, **body, stream_options={"include_usage": True}), (await ask(client, **body))[1]

    streamed, whole = run(test)
    assert streamed[-1] == "[DONE]"
    *parts, last = [json.loads(part) for part in streamed[:-1]]
    assert (last["choices"], last["usage"]) == ([], whole["usage"])
    assert len(parts) > 4  # 4 tokens per dispatch
    for choice in whole["choices"]:
        mine = [p["choices"][0] for p in parts if p["choices"][0]["index"] == choice["index"]]
        assert "".join(p["text"] for p in mine) == choice["text"]
        for name in ("token_ids", "token_versions"):
            assert [x for p in mine for x in p[name]] == choice[name]
        for name in ("tokens", "token_logprobs", "text_offset", "sampling_logprobs"):
            assert [x for p in mine for x in p["logprobs"][name]] == choice["logprobs"][name]
        assert [p["finish_reason"] for p in mine] == [None] * (len(mine) - 1) + ["length"]


class HalfCharacters(LetterCodec):
    """Every id is one byte of a character of two."""

    def decode(self, ids):
        return b"".join(bytes([0xC3 if n % 2 == 0 else 0x80 + i]) for n, i in enumerate(ids)).decode("utf-8", "replace")


def test_V07_streams_never_show_half_a_character():
    async def test(client, front):
        return await events(client, prompt=[20], max_tokens=7, temperature=0, ignore_eos=True)

    texts = [json.loads(part)["choices"][0]["text"] for part in run(test, codec=HalfCharacters())[:-1]]
    assert "".join(texts[:-1]).count("\ufffd") == 0
    assert len("".join(texts[:-1])) == 3
    assert texts[-1] == "\ufffd"  # the seventh byte never became a character


def test_V09_many_small_streams_all_complete():
    async def test(client, front):
        for _ in range(3):
            done = await asyncio.gather(*(events(client, prompt=[20 + i % 9], max_tokens=1 + i % 3, ignore_eos=True) for i in range(48)))
            assert all(parts[-1] == "[DONE]" for parts in done)
        await until(lambda: front.stats()["free_slots"] == 8)
        return front.stats()

    stats = run(test)
    assert (stats["free_slots"], stats["open_sessions"], stats["http_in_flight"]) == (8, 0, 0)


@pytest.mark.parametrize("stream", [False, True])
def test_V01_a_client_that_goes_away_frees_its_slots(stream):
    async def test(client, front):
        body = {"prompt": [20], "max_tokens": 30, "n": 4, "ignore_eos": True, "stream": stream}
        go = hold(front)
        call = asyncio.create_task(client.session.post(client.make_url("/v1/completions"), json=body))
        if stream:
            (await call).close()  # after the headers, which come with the first tokens
        else:
            await until(lambda: front.completions.in_flight == 4)
            call.cancel()
        await until(lambda: front.completions.in_flight == 0)
        go.set()
        await until(lambda: front.stats()["free_slots"] == 8)
        await ask(client, prompt=[20], max_tokens=1)
        await until(lambda: front.stats()["free_slots"] == 8)
        return front.stats()

    stats = run(test)
    assert (stats["open_sessions"], stats["cancelled"]) == (0, 4)


def test_a_client_that_stays_and_reads_nothing_loses_its_place():
    body = json.dumps({"prompt": [20], "n": 64, "max_tokens": 30, "stream": True, "ignore_eos": True, "return_token_ids": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"

    async def test(client, front):
        front.stall_s = 0.3
        (site,) = client.server.runner.sites
        site._server.sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        with socket.socket() as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            slow.connect(("127.0.0.1", client.port))
            slow.sendall(head.encode() + body)
            await until(lambda: front.completions.in_flight == 64)
            await until(lambda: front.completions.in_flight == 0)
            await until(lambda: front.stats()["open_sessions"] == 0)
            return front.stats(), (await ask(client, prompt=[20], max_tokens=1))[0]

    stats, status = run(test)
    assert (stats["http_stalled"], status) == (1, 200)


def test_of_two_servers_that_bound_one_address_the_second_to_listen_is_told():
    async def test(client, front):
        with server.bound(server.Address(port=0)) as first, server.bound(server.Address(port=first.getsockname()[1])) as second:
            first.listen()
            with pytest.raises(AddressError, match="is in use by another program: choose another --port"):
                await server.serve(front, second, ready=lambda host, port: pytest.fail("listens"))

    run(test)


def test_V06_an_over_long_prompt_is_refused_by_name_and_hurts_nobody_else():
    async def test(client, front):
        return await asyncio.gather(
            ask(client, prompt=[1] * tiny.LENGTH, max_tokens=1),
            ask(client, prompt=[1] * (tiny.LENGTH - 3), max_tokens=9, ignore_eos=True),
            ask(client, prompt=[[1], [1] * tiny.LENGTH], max_tokens=1),
            ask(client, prompt=""),
        )

    long, clipped, one_of_two, empty = run(test)
    assert (long[0], long[1]["error"]["code"], one_of_two[0], empty[0]) == (400, "context_length_exceeded", 400, 400)
    assert f"max_length={tiny.LENGTH}" in long[1]["error"]["message"]
    assert clipped[1]["usage"]["completion_tokens"] == 3


def test_wrong_bodies_routes_and_sizes_have_openais_error_shape():
    async def test(client, front):
        found = []
        for data, kind in ((b"{", "application/json"), (b"{}", "text/plain"), (b"x" * (9 << 20), "application/json")):
            async with client.post("/v1/completions", data=data, headers={"Content-Type": kind}) as answer:
                found.append((answer.status, (await answer.json())["error"]["code"]))
        async with client.get("/v1/nothing") as answer:
            found.append((answer.status, (await answer.json())["error"]["code"]))
        async with client.get("/v1/completions") as answer:
            found.append((answer.status, (await answer.json())["error"]["code"]))
        torn = {"Content-Encoding": "gzip", "Content-Type": "application/json", "Connection": "close"}
        async with client.post("/v1/completions", data=b"{}", headers=torn) as answer:
            found.append((answer.status, (await answer.json())["error"]["code"]))
        for stream in (False, True):
            status, body, _ = await ask(client, prompt="a", max_tokens=1, stream=stream, headers={"x-request-id": "é"})
            found.append((status, body["error"]["code"]))
        found.append((await ask(client, prompt="a", max_tokens=1, temperature=1e-9))[0])
        return found

    assert run(test) == [
        (400, "invalid_json"),
        (400, "content_type"),
        (413, "too_large"),
        (404, "no_such_route"),
        (405, "no_such_route"),
        (400, "broken_body"),
        (400, "invalid_request_id"),
        (400, "invalid_request_id"),
        400,
    ]


def test_a_full_queue_is_said_at_once():
    async def test(client, front):
        go = hold(front)
        asked = [asyncio.create_task(ask(client, prompt=[20], max_tokens=9, n=3, ignore_eos=True)) for _ in range(4)]
        await until(lambda: front.completions.overloaded == 2)
        go.set()
        return [await task for task in asked], front.stats()

    answers, stats = run(test, limit=6)
    assert sorted(a[0] for a in answers) == [200, 200, 429, 429]
    assert next(a[2]["Retry-After"] for a in answers if a[0] == 429) == "1"
    assert (stats["http_overloaded"], stats["http_in_flight"], stats["http_status_429"]) == (2, 0, 2)


def test_more_choices_than_there_will_ever_be_room_for_are_refused_for_good():
    status, body, headers = run(lambda client, front: ask(client, prompt=[20], n=7), limit=6)
    assert (status, body["error"]["code"], "Retry-After" in headers) == (400, "too_many_choices", False)


def test_a_deadline_is_504_and_a_closed_sampler_503():
    async def test(client, front):
        late = await ask(client, prompt=[20], max_tokens=30, n=8)
        front.completions.closing = True
        async with client.get("/health") as health:
            return late, await ask(client, prompt=[20]), health.status

    late, closing, health = run(test, sampler_options={"request_timeout_s": 0.0})
    assert (late[0], late[1]["error"]["code"], closing[0], health) == (504, "deadline", 503, 503)


def test_Z07_a_wrong_or_missing_token_is_401_and_a_foreign_host_name_403():
    async def with_token(client, front):
        found = [
            (await ask(client, prompt=[20], headers=h))[0]
            for h in ({}, *({"Authorization": a} for a in ("Bearer no", "secret", "Basic secret")))
        ]
        async with client.get("/stats") as answer:
            found.append(answer.status)
        return [*found, (await ask(client, prompt=[20], headers={"Authorization": "Bearer secret"}))[0]]

    async def without(client, front):
        return [
            (await ask(client, prompt=[20], headers={"Host": h}))[0] for h in ("evil.example", "evil.example:80", "localhost:1", "[::1]:2")
        ]

    assert run(with_token, token="secret") == [401, 401, 401, 401, 401, 200]
    assert run(without) == [403, 403, 200, 200]
    assert not may_enter("Bearer \udcff", "secret"), "a byte that is no text"


def test_a_repeated_request_id_is_answered_from_memory_and_never_for_another_body():
    body = {"prompt": [20], "max_tokens": 4, "temperature": 2}

    async def test(client, front):
        header = {"x-request-id": "one"}
        first, twin = await asyncio.gather(ask(client, headers=header, **body), ask(client, headers=header, **body))
        again = await ask(client, headers=header, **body)
        other = await ask(client, headers=header, **(body | {"max_tokens": 5}))
        return first, twin, again, other, front.stats()

    first, twin, again, other, stats = run(test)
    assert first[1] == twin[1] == again[1]
    assert first[1]["id"] == first[2]["x-request-id"] == "one"
    assert (other[0], stats["http_answers_repeated"], stats["decoded_tokens"]) == (409, 2, 4)


def test_constrained_answers_carry_their_states():
    async def test(client, front):
        return (await ask(client, prompt=[20], max_tokens=8, constrained=True, logprobs=0, return_token_ids=True))[1]["choices"][0]

    choice = run(test)
    assert tuple(choice["token_ids"]) in {(10, 7), (11, 12, 7), (11, 13, 7), (14, 7)}
    assert choice["token_states"][0] == 1
    assert choice["finish_reason"] == "stop"


def test_a_broken_engine_is_500_and_unhealthy():
    async def test(client, front):
        front.sampler.publish({}, 1)
        broken = await ask(client, prompt=[20], max_tokens=1)
        async with client.get("/health") as health:
            return broken, health.status

    broken, health = run(test)
    assert (broken[0], broken[1]["error"]["type"], health) == (500, "server_error", 503)
