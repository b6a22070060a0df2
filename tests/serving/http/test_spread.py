"""Several servers as one sampler: what one remote sampler does, where sessions go, and what becomes of a server that is away."""

import asyncio
import contextlib
import pathlib
import sys

import pytest

pytest.importorskip("aiohttp", reason="the remote sampler needs aiohttp: pip install -e '.[serve]'")
sys.path.insert(0, str(pathlib.Path(__file__).parent))
import test_remote
from front_door import hold, served, tiny, until
from remote_client import greedy

from crl_jax.records import Completion, Finish
from crl_jax.serving.remote import CannotPublish, RemoteSampler
from crl_jax.serving.remote_edge import RemoteRefused, RemoteUnavailable, Retry
from crl_jax.serving.remote_weights import Posts, PublishFailed, ServerAway, WeightFiles
from crl_jax.serving.sampler import SamplerClosed
from crl_jax.serving.spread import Backoff, NoServer, SpreadSampler

LIKE_ONE = [
    test_remote.test_it_knows_its_server,
    test_remote.test_greedy_and_sampled_equal_teacher_forcing,
    test_remote.test_a_burst_of_mixed_requests_equals_the_sampler_in_the_server,
    test_remote.test_turns_send_and_prefill_only_new_tokens,
    test_remote.test_a_session_the_server_has_lost_is_opened_again_with_all_ids,
    test_remote.test_V06_bad_requests_are_refused_and_leave_the_session_as_it_was,
    test_remote.test_closing_fails_what_is_in_flight_and_everything_after,
    test_remote.test_a_session_goes_on_without_new_ids_as_in_this_process,
]


@contextlib.asynccontextmanager
async def spread(**options):
    """(sampler over two servers, the front doors' parts by url)."""
    async with served() as (one, first), served() as (two, second):
        fronts = {str(client.make_url("/")): front for client, front in ((one, first), (two, second))}
        sampler = SpreadSampler({url: lambda url=url: RemoteSampler.connect(url, retry=Retry(attempts=2)) for url in fronts}, **options)
        await sampler.connected()
        try:
            yield sampler, fronts
        finally:
            await sampler.aclose()


def over_two(test):
    async def main():
        async with spread() as (sampler, fronts):
            url, front = next(iter(fronts.items()))
            return await asyncio.wait_for(test(sampler, front, url), 120)

    return asyncio.run(main())


@pytest.mark.parametrize("story", LIKE_ONE, ids=lambda story: story.__name__.removeprefix("test_"))
def test_over_two_servers_it_does_what_a_sampler_does(story, monkeypatch):
    monkeypatch.setattr(test_remote, "run", over_two)
    story()


@pytest.mark.parametrize("whole", [False, True])
def test_V01_V03_cancel_over_two_servers(whole, monkeypatch):
    monkeypatch.setattr(test_remote, "run", over_two)
    test_remote.test_V01_V03_cancel_frees_the_slot_and_is_idempotent(whole)


def test_R14_new_weights_come_to_all_servers_from_one_file(tmp_path):
    async def main():
        async with served(folder=tmp_path) as (one, _), served(folder=tmp_path) as (two, _):
            urls = [str(client.make_url("/")) for client in (one, two)]
            posts = {url: Posts(url, timeout_s=60) for url in urls}
            ways = {u: lambda u=u: RemoteSampler.connect(u, publish=posts[u], republish=posts[u].again) for u in urls}
            sampler = SpreadSampler(ways, files=WeightFiles(tmp_path, "actor"))
            await sampler.connected()
            for version in (3, 4, 5):
                await asyncio.to_thread(sampler.publish, tiny.weights(1), version)
            found = await asyncio.gather(*(sampler.complete(tiny.prompt(1, 6), greedy(3)) for _ in range(2)))
            with pytest.raises(PublishFailed, match="parameters"):
                await asyncio.to_thread(sampler.publish, {"head": tiny.weights(0)["head"]}, 6)
            stats, version = sampler.stats(), sampler.version
            await sampler.aclose()
            return found, stats, version

    found, stats, version = asyncio.run(main())
    assert [list(c.ids) for c in found] == [tiny.greedy(tiny.weights(1), tiny.prompt(1, 6), 3)] * 2
    assert {c.versions for c in found} == {(5,) * 3}
    assert (version, stats["swaps"], stats["decoded_tokens"], stats["servers_up"]) == (5, 3, 6, 2)
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"actor-{n}.safetensors" for n in (4, 5, 6)]


def test_K_P_completions_go_on_when_the_engine_of_one_server_stops_and_when_it_is_gone():
    def broken():
        raise RuntimeError("out of memory")

    async def main():
        async with contextlib.AsyncExitStack() as first, served() as (two, _):
            one, front = await first.enter_async_context(served())
            urls = [str(client.make_url("/")) for client in (one, two)]
            quick = Retry(attempts=2, first_wait_s=0.01)
            sampler = SpreadSampler({url: lambda url=url: RemoteSampler.connect(url, retry=quick) for url in urls})
            await sampler.connected()
            go = hold(front)
            running = [asyncio.create_task(sampler.complete(tiny.prompt(1, 6), greedy(12))) for _ in range(6)]
            await until(lambda: front.stats()["decoded_tokens"])
            front.sampler._turn.step = broken
            go.set()
            found = await asyncio.wait_for(asyncio.gather(*running), 60)
            await first.aclose()
            found += [await sampler.complete(tiny.prompt(1, 6), greedy(12)) for _ in range(2)]
            stats = sampler.stats()
            await sampler.aclose()
            return found, stats

    found, stats = asyncio.run(main())
    assert {c.ids for c in found} == {tuple(tiny.greedy(tiny.weights(0), tiny.prompt(1, 6), 12))}
    assert (stats["marked_down"], stats["servers_up"]) == (1, 1)
    assert stats["moved"] == 3


# ------------------------------------------------------------------------------------------------ with toy servers


class Toy:
    """Stands for a connected server; ``away`` is what its requests and looks raise."""

    vocab_size = 40

    def __init__(self, name, *, version=0, max_length=32):
        self.name, self.version, self.max_length, self.away = name, version, max_length, None
        self.asked = self.looks = self.opened = 0
        self.open_now, self.published = set(), []

    async def connect(self):
        await self.look(0)
        return self

    async def look(self, timeout_s):
        self.looks += 1
        if self.away:
            raise self.away

    async def open(self):
        self.opened += 1
        self.open_now.add(f"{self.name}{self.opened}")
        return f"{self.name}{self.opened}"

    async def close(self, session):
        self.open_now.discard(session)

    async def generate(self, session, new_ids, params):
        self.asked += 1
        await asyncio.sleep(0)
        if self.away:
            raise self.away
        return Completion((1,), (-1.0,), (self.version,), (0,), Finish.STOP)

    async def complete(self, prompt_ids, params):
        return await self.generate("", prompt_ids, params)

    async def cancel(self, session): ...

    def publish(self, name, version):
        if self.away:
            raise ServerAway(f"{self.name} could not be told")
        self.published.append(name)
        self.version = version

    def stats(self):
        return {"requests": self.asked, "open_sessions": len(self.open_now)}

    async def aclose(self): ...


GONE = RemoteUnavailable("http://b/v1/completions: refused (3 attempts)")


class Clock:
    now_s = 0.0

    def __call__(self):
        return self.now_s


def story(test, **options):
    """What ``test(sampler, a, b, clock, said)`` does over two toys."""

    async def main():
        a, b, clock, said = Toy("a"), Toy("b"), Clock(), []
        sampler = SpreadSampler({"http://a": a.connect, "http://b": b.connect}, clock=clock, tell=said.append, **options)
        await asyncio.wait_for(test(sampler, a, b, clock, said), 20)
        await sampler.aclose()

    asyncio.run(main())


def test_a_new_session_goes_where_the_fewest_are_and_stays():
    async def test(sampler, a, b, clock, said):
        await sampler.connected()
        sessions = [await sampler.open() for _ in range(4)]
        assert (a.opened, b.opened) == (2, 2)
        for name in (sessions[1], sessions[3]):
            await sampler.close(name)
        await sampler.close("unknown")
        more = [await sampler.open() for _ in range(2)]
        assert (a.opened, b.opened) == (2, 4)
        for _ in range(3):
            await sampler.generate(sessions[0], [1], greedy(1))
            await sampler.generate(more[0], [1], greedy(1))
        assert (a.asked, b.asked) == (3, 3)
        await asyncio.gather(*(sampler.complete([1], greedy(1)) for _ in range(6)))
        assert (a.asked, b.asked) == (6, 6)
        assert sampler.stats()["requests"] == 12
        assert (sampler.vocab_size, sampler.max_length) == (40, 32)

    story(test)


def test_a_completion_whose_server_is_away_is_asked_of_another_once():
    async def test(sampler, a, b, clock, said):
        await sampler.connected()
        b.away = GONE
        found = await asyncio.gather(*(sampler.complete([1], greedy(1)) for _ in range(8)))
        assert len(found) == 8
        stats = sampler.stats()
        assert (stats["moved"], stats["marked_down"], stats["servers_up"]) == (b.asked, 1, 1)
        a.away = GONE
        with pytest.raises(NoServer, match=r"http://a, http://b"):
            await sampler.complete([1], greedy(1))
        with pytest.raises(NoServer):
            await sampler.open()

    story(test)


def test_a_server_that_was_away_is_looked_at_in_the_background_and_comes_back():
    async def test(sampler, a, b, clock, said):
        await sampler.connected()
        session = await sampler.open()
        session = await sampler.open()
        b.away = GONE
        with pytest.raises(RemoteUnavailable):
            await sampler.generate(session, [1], greedy(1))  # a session ends with its server
        looks = b.looks
        assert [await sampler.open() for _ in range(3)]
        assert (a.opened, b.opened, b.looks) == (4, 1, looks)
        for waited_s in (1.0, 2.0, 4.0):  # longer and longer
            clock.now_s += waited_s - 0.1
            await sampler.open()
            assert b.looks == looks
            clock.now_s += 0.1
            await sampler.open()
            await until(lambda seen=looks: b.looks > seen)
            looks = b.looks
            await asyncio.sleep(0)
        b.away = None
        clock.now_s += 8
        await sampler.open()
        await until(lambda: sampler.stats()["servers_up"] == 2)
        opened = b.opened
        await sampler.open()
        assert b.opened == opened + 1
        assert said[-1] == "http://b answers again"
        assert sampler.stats()["looks_failed"] == 3

    story(test)


def test_version_is_the_smallest_and_a_server_that_was_away_at_a_publish_is_known_to_be_behind(tmp_path):
    class Files:
        def write(self, params, version):
            return f"w{version}"

        def prune(self): ...

    async def test(sampler, a, b, clock, said):
        await sampler.connected()
        a.version, b.version = 4, 3
        await asyncio.gather(*(sampler.complete([1], greedy(1)) for _ in range(2)))
        assert sampler.version == 3
        sampler.publish({}, 5)
        assert (a.published, b.published, sampler.version) == (["w5"], ["w5"], 5)
        b.away = GONE
        sampler.publish({}, 6)
        assert (a.published, b.version, sampler.version, sampler.stats()["servers_up"]) == (["w5", "w6"], 6, 6, 1)
        a.away = GONE
        with pytest.raises(NoServer):
            sampler.publish({}, 7)

    story(test, files=Files())


def test_without_a_folder_nothing_is_published():
    async def test(sampler, a, b, clock, said):
        with pytest.raises(CannotPublish, match="weights_folder"):
            sampler.publish({}, 1)

    story(test)


def test_K_servers_that_are_not_up_yet_are_waited_for_where_that_is_wanted():
    async def test(sampler, a, b, clock, said):
        a.away = b.away = GONE
        connecting = asyncio.create_task(sampler.connected(1e9))
        waiting = [asyncio.create_task(sampler.complete([1], greedy(1))) for _ in range(3)]
        await until(lambda: a.looks >= 2)
        assert not any(task.done() for task in waiting)
        b.away = None
        assert len(await asyncio.gather(*waiting)) == 3
        assert (a.asked, b.asked) == (0, 3)
        a.away = None
        await connecting
        assert "refused (3 attempts); looking again in 0.01 s" in said[0]

    async def real_time():
        a, b, said = Toy("a"), Toy("b"), []
        options = {"patience_s": 60.0, "backoff": Backoff(0.01, 0.05), "tell": said.append}
        sampler = SpreadSampler({"http://a": a.connect, "http://b": b.connect}, **options)
        await asyncio.wait_for(test(sampler, a, b, None, said), 20)
        await sampler.aclose()

    asyncio.run(real_time())


def test_a_server_that_cannot_be_used_is_no_matter_of_time():
    async def test(sampler, a, b, clock, said):
        b.away = RemoteRefused("http://b/v1/models: 401 send the server's token", 401, "wrong_token")
        with pytest.raises(RemoteRefused, match="401"):
            await sampler.connected(60)
        with pytest.raises(RemoteRefused, match="401"):
            await sampler.complete([1], greedy(1))

    story(test, patience_s=60.0)


def test_P_an_engine_that_stopped_is_a_server_that_is_away():
    async def test(sampler, a, b, clock, said):
        await sampler.connected()
        a.away = RemoteRefused("http://a/v1/completions: 500 out of memory", 500, "internal")
        await asyncio.gather(*(sampler.complete([1], greedy(1)) for _ in range(2)))
        assert sampler.stats()["moved"] == 1

    story(test)


def test_closing_ends_what_waits_for_a_server():
    async def test(sampler, a, b, clock, said):
        a.away = b.away = GONE
        waiting = asyncio.create_task(sampler.complete([1], greedy(1)))
        await until(lambda: a.looks and b.looks)
        await asyncio.sleep(0.01)
        await sampler.aclose()
        with pytest.raises(SamplerClosed):
            await waiting

    story(test, patience_s=60.0)
