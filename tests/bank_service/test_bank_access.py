"""Who may use the bank's server, how much at once, and how long it may take. Known faults: Z07."""

import asyncio
import time

import grpc
import pytest
from service_toys import QUICK, add, episode, remote, run, serving

from crl_jax.bank_service import bank_pb2 as pb
from crl_jax.bank_service.edge import Address, BankRefused, BankUnavailable, Retry
from crl_jax.bank_service.limits import Limits
from crl_jax.bank_service.server import BankServer
from crl_jax.serving.access import AccessError, AddressError

TWICE = Retry(attempts=2, first_wait_s=0.01, longest_wait_s=0.01, attempt_s=0.2)


def test_Z07_another_address_needs_a_token():
    async def story():
        for host in ("0.0.0.0", "::", "example.org"):
            with pytest.raises(AccessError, match="give a token with --token-file"):
                BankServer(host, 0, token="", tls=None, limits=Limits())

    run(story())


@pytest.mark.parametrize("given", ["", "wrong", "right2", "Right"])
def test_Z07_without_the_right_token_nothing_is_answered(given):
    async def story():
        async with serving(token="right") as (url, manager, server):
            async with remote(url, token=given) as bank:
                for call in (bank.write("room", add("x")), bank.retrieve("room", "x"), bank.stats()):
                    with pytest.raises(BankRefused, match="authorization: Bearer TOKEN") as refused:
                        await call
                    assert refused.value.code == "UNAUTHENTICATED"
                    assert "right" not in str(refused.value)
            assert len(manager.state) == 0
            assert server.counts["calls_without_token"] == 3
            async with remote(url, token="right") as bank:
                assert (await bank.write("room", add("x"))).written

    run(story())


def test_Z07_only_the_health_check_is_open():
    from grpc_health.v1 import health_pb2, health_pb2_grpc
    from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

    async def story():
        async with serving(token="right") as (url, _, server), grpc.aio.insecure_channel(url.removeprefix("grpc://")) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            for name in ("", "crl.bank.v1.Bank"):
                found = await health.Check(health_pb2.HealthCheckRequest(service=name), timeout=5)
                assert found.status == health_pb2.HealthCheckResponse.SERVING
            ask = reflection_pb2.ServerReflectionRequest(list_services="")
            stub = reflection_pb2_grpc.ServerReflectionStub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.ServerReflectionInfo(iter([ask]), timeout=5).read()
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
            token = (("authorization", "Bearer right"),)
            answer = await stub.ServerReflectionInfo(iter([ask]), timeout=5, metadata=token).read()
            assert "crl.bank.v1.Bank" in {s.name for s in answer.list_services_response.service}
            with pytest.raises(grpc.aio.AioRpcError):
                await health.Watch(health_pb2.HealthCheckRequest(), timeout=5).read()
            await server.stop(0.1)

    run(story())


def test_a_port_in_use_is_refused():
    async def story():
        async with serving() as (_, _, server):
            with pytest.raises(AddressError, match="choose another --port or --host"):
                BankServer("127.0.0.1", server.port, token="", tls=None, limits=Limits())

    run(story())


def test_what_is_too_large_is_refused_with_what_to_do():
    async def story():
        limits = Limits(message_bytes=20_000, queries=4, ops=2, episodes=3, text_chars=100, page=5)
        async with serving(limits=limits) as (url, manager, _), remote(url, batch=8) as bank:
            for call, fix in (
                (bank.write("room", add("a", "b", "c")), "3 operations in one call, 2 at most: send them in several calls"),
                (bank.write("room", []), "no operations in the call: send at least one"),
                (bank.write("room", add("x" * 101)), "a lesson has 101 characters, 100 at most: shorten it"),
                (bank.retrieve("room", "x" * 101), "a query has 101 characters, 100 at most"),
                (asyncio.gather(*(bank.retrieve("room", "x") for _ in range(8))), "8 queries in one call, 4 at most"),
                (bank.newest(6), "a page of 6 entries, 5 at most: ask for several pages"),
                (bank.get([str(n) for n in range(6)]), "6 ids in one call, 5 at most"),
                (bank.write("room", add("x" * 30_000)), r"a message of 30\d\d\d bytes, 20000 at most"),
            ):
                with pytest.raises(BankRefused, match=fix):
                    await call
            assert len(manager.state) == 0
            assert bank.counters()["refused_RESOURCE_EXHAUSTED"] == 7
        async with serving(limits=limits) as (url, _, _), remote(url, message_bytes=10**7) as bank:  # past gRPC's own limit
            with pytest.raises(BankRefused, match="larger than max") as refused:
                await bank.write("room", add("x" * 3_000_000))
            assert refused.value.code == "RESOURCE_EXHAUSTED"

    run(story())


def test_a_client_cuts_what_is_long_and_pages_by_bytes():
    async def story():
        async with serving(limits=Limits(message_bytes=20_000)) as (url, manager, server), remote(url, message_bytes=20_000) as bank:
            long = [episode(f"e{n}", observation=f"{n} " + "x" * 1500) for n in range(12)]
            assert await bank.submit(*long)
            assert await bank.drain(10) == 0
            assert len(manager.state) == 12
            calls = server.counts["calls"]
            assert [e.experience async for e in bank.entries()] == list(manager.state.space("room").values())
            assert server.counts["calls"] - calls >= 2
            await bank.observe([episode("r", shown=list(manager.state.space("room"))[:2])])
            assert [len(s.generation.prompt_ids) > 1500 for s in await bank.pop_batch()] == [True, True]

    run(story())


def test_calls_above_the_limit_are_refused_and_the_client_has_a_limit_of_its_own():
    async def story():
        limits = Limits(calls=2)
        async with serving(limits=limits, delay=lambda prompt: 0.3) as (url, _, server):
            async with remote(url) as bank:
                await bank.write("room", add("a lesson"))
                asked = [bank.ask("room", "q", episode_id=f"e{n}") for n in range(4)]
                found = await asyncio.gather(*asked, return_exceptions=True)
                assert sum(isinstance(f, BankRefused) and "--calls" in str(f) for f in found) == 2
                stats = await bank.stats()
                assert (stats["server_calls_RESOURCE_EXHAUSTED"], stats["client_refused_RESOURCE_EXHAUSTED"]) == (2, 2)
                assert (stats["server_calls_running"], stats["inbox"]) == (1, 0)
            async with remote(url, most_calls=2) as bank:
                asked = asyncio.gather(*(bank.ask("room", "q", episode_id=f"f{n}") for n in range(4)))
                await asyncio.sleep(0.1)
                assert (bank.counters()["running"], bank.counters()["queue"]) == (2, 2)
                assert all(await asked)
            assert server.gate.running == 0

    run(story())


def test_a_slow_server_is_a_deadline_and_not_a_hang():
    async def story():
        async with serving() as (url, manager, _):
            embed = manager._search._embedder.embed

            def late(texts):
                time.sleep(1.0)
                return embed(texts)

            manager._search._embedder.embed = late
            async with remote(url, retry=QUICK, timeout_s=0.3) as bank:
                started = time.monotonic()
                with pytest.raises(TimeoutError, match=r"no answer within 0\.3 s"):
                    await bank.retrieve("room", "x", peek=True)
                assert time.monotonic() - started < 0.9

    run(story())


def test_a_call_without_a_deadline_gets_the_servers():
    async def story():
        limits = Limits(call_timeout_s=0.2)
        async with serving(limits=limits, delay=lambda prompt: 5.0) as (url, _, _), remote(url) as bank:
            await bank.write("room", add("a lesson"))
            async with grpc.aio.insecure_channel(url.removeprefix("grpc://")) as channel:
                ask = channel.unary_unary(
                    "/crl.bank.v1.Bank/Ask",
                    request_serializer=pb.AskRequest.SerializeToString,
                    response_deserializer=pb.AskReply.FromString,
                )
                with pytest.raises(grpc.aio.AioRpcError, match=r"Ask took longer than 0\.2 s: give it a later deadline"):
                    await ask(pb.AskRequest(request_id="a", namespace="room", query="q", peek=True))

    run(story())


def test_no_server_is_an_error_after_the_last_attempt():
    async def story():
        async with remote("grpc://127.0.0.1:9", retry=TWICE) as bank:
            with pytest.raises(BankUnavailable, match=r"2 attempts\): is the bank's server up and reachable"):
                await bank.stats()
            assert (bank.counters()["retries"], bank.counters()["unavailable"]) == (1, 1)

    run(story())


@pytest.mark.parametrize("url", ["127.0.0.1:7", "http://127.0.0.1:7", "grpc://", "grpc://host:1/path"])
def test_an_address_of_another_form_is_refused(url):
    with pytest.raises(ValueError, match="write grpc://HOST:PORT"):
        Address.of(url)
