"""Sessions and new weights at the HTTP front door."""

import asyncio
import pathlib
import sys
import threading

import jax
import numpy as np
import pytest

pytest.importorskip("aiohttp", reason="the HTTP front door needs aiohttp: pip install -e '.[serve]'")
sys.path.insert(0, str(pathlib.Path(__file__).parent))
from front_door import GREEDY, ask, hold, run, tiny, until

from crl_jax.models.safetensors_io import save_params


def test_a_session_prefills_only_new_tokens_and_equals_one_shot():
    turns = [tiny.prompt(1, 6), tiny.prompt(2, 3), tiny.prompt(3, 7)]

    async def test(client, front):
        name = (await ask(client, "/v1/sessions"))[1]["id"]
        log, replies = [], []
        for turn in turns:
            log += turn
            reply = (await ask(client, prompt=turn, max_tokens=3, session=name, **GREEDY))[1]["choices"][0]["token_ids"]
            replies.append((list(log), reply))
            log += reply
        async with client.get(f"/v1/sessions/{name}") as answer:
            shown = await answer.json()
        too_long = await ask(client, prompt=[1] * tiny.LENGTH, session=name)
        still_there = await ask(client, prompt=[1], max_tokens=1, session=name)
        stats = front.stats()
        async with client.delete(f"/v1/sessions/{name}") as answer:
            assert answer.status == 200
        gone = await ask(client, prompt=[1], session=name)
        return replies, shown, stats, too_long, still_there, gone

    replies, shown, stats, too_long, still_there, gone = run(test)
    for context, reply in replies:
        assert reply == tiny.greedy(tiny.weights(0), context, 3)
    assert (stats["prefilled_tokens"], stats["recomputed_tokens"]) == (17, 0)
    assert (shown["tokens"], shown["busy"]) == (25, False)
    assert (too_long[0], still_there[0], gone[0], gone[1]["error"]["code"]) == (400, 200, 404, "session_not_found")


def test_sessions_are_bounded_expire_cancel_and_take_one_request_at_a_time():
    now = [0.0]

    async def test(client, front):
        first = (await ask(client, "/v1/sessions"))[1]["id"]
        second = (await ask(client, "/v1/sessions"))[1]["id"]
        full = await ask(client, "/v1/sessions")
        go = hold(front)
        running = asyncio.create_task(ask(client, prompt=[20], max_tokens=30, session=first, **GREEDY))
        while not front.sessions.get(first).busy:
            await asyncio.sleep(0.001)
        busy = await ask(client, prompt=[20], session=first)
        await ask(client, f"/v1/sessions/{first}/cancel")
        go.set()
        cancelled = await running
        now[0] = 100.0
        third = await ask(client, "/v1/sessions")
        return full, busy, cancelled, third, await ask(client, prompt=[20], session=second), front.stats()

    full, busy, cancelled, third, expired, stats = run(test, session_limit=2, clock=lambda: now[0])
    assert (full[0], busy[0], third[0], expired[0]) == (429, 409, 200, 404)
    choice = cancelled[1]["choices"][0]
    assert choice["finish_reason"] == "cancelled"
    assert choice["token_ids"] == tiny.greedy(tiny.weights(0), [20], len(choice["token_ids"]))
    assert stats["http_sessions_expired"] == 2


def test_Z06_R14_weights_are_published_from_the_folder_only(tmp_path):
    folder = tmp_path / "in"
    save_params(tiny.weights(1), folder / "new.safetensors")
    save_params(tiny.weights(1), tmp_path / "out.safetensors")
    (folder / "link.safetensors").symlink_to(tmp_path / "out.safetensors")
    save_params({"head": tiny.weights(1)["head"]}, folder / "part.safetensors")
    save_params(jax.tree.map(lambda leaf: leaf.at[0].set(np.nan), tiny.weights(1)), folder / "nan.safetensors")
    (folder / "torn.safetensors").write_bytes(b"\xff" * 20)
    (folder / "list.safetensors").write_bytes(b"\2" + b"\0" * 7 + b"[]")
    (folder / "round.safetensors").symlink_to(folder / "round.safetensors")
    prompt = tiny.prompt(1, 6)

    async def test(client, front):
        wrong = [
            (await ask(client, "/v1/weights", path=path, version=1))
            for path in (
                "../out.safetensors",
                "/etc/passwd",
                "a/../../out.safetensors",
                "link.safetensors",
                "round.safetensors",
                "none.safetensors",
                "n" * 5000 + ".safetensors",
                "part.safetensors",
                "torn.safetensors",
                "list.safetensors",
                "nan.safetensors",
                "",
            )
        ]
        wrong += [await ask(client, "/v1/weights", path="new.safetensors", version=v) for v in (-1, True, "2", None)]
        before = await ask(client, prompt=prompt, max_tokens=4, **GREEDY)
        swap = await ask(client, "/v1/weights", path="new.safetensors", version=2)
        after = await ask(client, prompt=prompt, max_tokens=4, **GREEDY)
        return wrong, before, swap, after, front.stats()

    wrong, before, swap, after, stats = run(test, folder=folder)
    assert [w[0] for w in wrong] == [400] * 16
    assert [w[1]["error"]["code"] for w in wrong[:11]] == ["outside_folder"] * 5 + ["no_such_file"] * 2 + ["wrong_weights"] * 4
    assert before[1]["choices"][0]["token_ids"] == tiny.greedy(tiny.weights(0), prompt, 4)
    assert after[1]["choices"][0]["token_ids"] == tiny.greedy(tiny.weights(1), prompt, 4)
    assert (swap[0], before[1]["weight_version"], after[2]["x-weight-version"], stats["swaps"]) == (200, 0, "2", 1)


def test_R14_a_load_whose_client_has_left_goes_on_and_the_next_one_waits_for_it(tmp_path):
    save_params(tiny.weights(1), tmp_path / "new.safetensors")
    go, loading = threading.Event(), []

    async def test(client, front):
        plain = front.weights._load

        def load(path):
            loading.append(path)
            go.wait(60)
            return plain(path)

        front.weights._load = load
        first = asyncio.create_task(front.weights.publish({"path": "new.safetensors", "version": 1}))
        await until(lambda: loading)
        first.cancel()
        await asyncio.wait([first])
        second = asyncio.create_task(front.weights.publish({"path": "new.safetensors", "version": 2}))
        await asyncio.sleep(0.05)
        at_a_time = len(loading)
        go.set()
        return first.cancelled(), at_a_time, await second, front.weights.published

    assert run(test, folder=tmp_path) == (True, 1, 2, 2)


def test_weights_are_refused_where_they_are_not_enabled_and_cards_say_what_is():
    async def test(client, front):
        refused = await ask(client, "/v1/weights", path="a.safetensors", version=1)
        async with client.get("/v1/models") as models, client.get("/health") as health, client.get("/metrics") as metrics:
            return refused, (await models.json())["data"], await health.json(), await metrics.text()

    refused, (card,), health, metrics = run(test)
    assert (refused[0], refused[1]["error"]["code"]) == (403, "weights_disabled")
    assert (card["id"], card["max_model_len"], card["vocab_size"]) == ("tiny", tiny.LENGTH, tiny.CONFIG.vocab_size)
    assert card["offers"] == {"sessions": True, "constrained": True, "weights": False}
    assert health == {"status": "ok", "weight_version": 0}
    assert "\ncrl_serve_free_slots 8\n" in metrics
