"""The search service under load: order, batches that grow, back-pressure, deadlines, and errors that reach the right caller."""

import asyncio
import itertools
import random
import threading
import time
from collections import Counter

import numpy as np
import pytest
from experience_toys import HashEmbedder

from crl_jax.experience.index import ExactIndex
from crl_jax.experience.query_vectors import assemble
from crl_jax.experience.search import SearchService, TooManyQueries, worker_count


def filled(index=None, spaces=("room", "cave"), n=30):
    index = index or ExactIndex(HashEmbedder.dim)
    for space in spaces:
        texts = [f"{space} lesson {i}" for i in range(n)]
        index.add([f"{space}-{i}" for i in range(n)], HashEmbedder().embed(texts), namespace=space)
    return index


def service(index=None, embedder=None, **options):
    index = index or filled()
    return SearchService(embedder=embedder or HashEmbedder(), index=lambda: index, counts=Counter(), **options)


class Gated(ExactIndex):
    """Searches wait for the gate; ``began`` counts them and ``sizes`` holds their number of queries."""

    def __init__(self):
        super().__init__(HashEmbedder.dim)
        self.gate, self.began, self.sizes = threading.Event(), threading.Semaphore(0), []

    def search(self, queries, k, *, namespace):
        self.sizes.append(len(queries))
        self.began.release()
        assert self.gate.wait(20)
        return super().search(queries, k, namespace=namespace)


def run(story):
    return asyncio.run(asyncio.wait_for(story, 30))


def ids(candidates):
    return [c.id for c in candidates]


async def until(condition):
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        await asyncio.sleep(0.001)


def test_X10_a_thousand_clients_get_their_own_answers_in_the_order_of_their_queries():
    """Namespaces and k are mixed in every batch, searches take random times: the answers are those of the index, picks come in order."""

    class Uneven(ExactIndex):
        def search(self, queries, k, *, namespace):
            time.sleep(random.Random(len(queries)).random() / 500)
            return super().search(queries, k, namespace=namespace)

    async def story():
        index = filled(Uneven(HashEmbedder.dim))
        found, picked = service(index, workers=3), []
        asks = [((("room",), ("cave",), ("cave", "room"))[n % 3], f"lesson {n % 37}", 1 + n % 2) for n in range(1024)]

        async def ask(n):
            return await found.query(*asks[n], lambda candidates: picked.append(n) or ids(candidates))

        answers = await asyncio.gather(*map(ask, range(1024)))
        assert picked == list(range(1024))
        for (spaces, text, k), answer in zip(asks, answers, strict=True):
            query = HashEmbedder().embed([text])
            scores = {c.id: c.similarity for space in spaces for c in ExactIndex.search(index, query, 30, namespace=space)[0]}
            assert [scores[i] for i in answer] == pytest.approx(sorted(scores.values(), reverse=True)[:k], abs=1e-5)  # ids may tie
        assert found._counts["searches"] == 1024
        assert sum(found.per_worker) == sum(found.by_size.values())
        assert found.stats()["search_open"] == 0
        await found.aclose()

    run(story())


def test_queries_gather_while_every_worker_is_busy():
    async def story():
        index = filled(Gated())
        found = service(index, workers=1, batch_size=4, batch_limit=10)
        asks = [asyncio.ensure_future(found.query(("room",), f"lesson {n}", 1, len)) for n in range(30)]
        await until(lambda: len(index.sizes) == 1)
        stats = found.stats()
        assert (stats["search_open"], stats["search_waiting"]) == (30, 22)
        assert stats["search_oldest_wait_s"] > 0
        index.gate.set()
        assert await asyncio.gather(*asks) == [1] * 30
        assert index.sizes == [4, 4, 10, 10, 2]  # one searched, one ready for the worker, then as many as the limit lets
        assert found.stats()["search_sizes_to_16"] == 2
        await found.aclose()

    run(story())


def test_a_lone_query_waits_for_others_only_a_moment():
    async def story():
        found = service(batch_size=1000, batch_limit=1000, max_wait_s=0.01)
        first = found.query(("room",), "room lesson 3", 1, ids)
        assert await first == ["room-3"]
        await found.aclose()

    run(story())


def test_more_than_the_limit_are_refused_at_once_and_counted():
    async def story():
        index = filled(Gated())
        found = service(index, workers=1, max_open=8)
        asks = [asyncio.ensure_future(found.query(("room",), "lesson", 1, len)) for _ in range(8)]
        await until(lambda: found.stats()["search_open"] == 8)
        with pytest.raises(TooManyQueries, match="8 queries of the bank are open"):
            await found.query(("room",), "lesson", 1, len)
        index.gate.set()
        assert await asyncio.gather(*asks) == [1] * 8
        assert await found.query(("room",), "lesson", 1, len) == 1, "there is room again"
        assert (found._counts["searches_rejected"], found._counts["searches"]) == (1, 9)
        await found.aclose()

    run(story())


def test_A13_every_wait_ends_and_a_stuck_search_holds_up_nobody_who_comes_later():
    release = threading.Event()

    class Stuck(ExactIndex):
        def search(self, queries, k, *, namespace):
            if namespace == "cave":
                assert release.wait(20)
            return super().search(queries, k, namespace=namespace)

    async def story():
        found = service(filled(Stuck(HashEmbedder.dim)), workers=2, timeout_s=0.3)
        stuck = asyncio.ensure_future(found.query(("cave",), "lesson", 1, len))
        await asyncio.sleep(0.15)
        later = asyncio.ensure_future(found.query(("room",), "lesson", 1, len))
        with pytest.raises(TimeoutError, match=r"within 0\.3 s"):
            await stuck
        assert await later == 1
        assert found._counts["search_timeouts"] == 1
        release.set()
        assert await found.query(("cave",), "lesson", 1, len) == 1
        await found.aclose()

    run(story())


def test_who_gives_up_is_not_answered_and_changes_nothing_for_the_others():
    async def story():
        index = filled(Gated())
        found, picked = service(index, workers=1, batch_size=2, batch_limit=2), []
        asks = [asyncio.ensure_future(found.query(("room",), "lesson", 1, lambda c, n=n: picked.append(n))) for n in range(8)]
        await until(lambda: len(index.sizes) == 1)
        for n in (0, 3, 7):  # searched, ready, waiting
            asks[n].cancel()
        await asyncio.sleep(0)
        index.gate.set()
        await asyncio.gather(*asks, return_exceptions=True)
        assert picked == [1, 2, 4, 5, 6]
        assert found._counts["searches"] == 5
        await found.aclose()

    run(story())


def test_errors_reach_the_callers_they_belong_to():
    class Moody(HashEmbedder):
        def embed(self, texts):
            if any("bad" in text for text in texts):
                raise OSError("model file gone")
            return super().embed(texts)

    def pick(candidates):
        raise ZeroDivisionError

    async def story():
        found = service(embedder=Moody(), batch_size=3)
        answers = await asyncio.gather(*(found.query(("room",), t, 1, len) for t in ("bad", "fine", "fine")), return_exceptions=True)
        assert [str(a) for a in answers] == ["model file gone"] * 3  # one batch, one call of the embedder
        mine, other = await asyncio.gather(
            found.query(("room",), "x", 1, pick), found.query(("room",), "x", 1, len), return_exceptions=True
        )
        assert isinstance(mine, ZeroDivisionError)
        assert other == 1
        with pytest.raises(ValueError, match="k=0"):
            await found.query(("room",), "x", 0, len)
        await found.aclose()

    run(story())


def test_the_event_loop_gets_its_turn_during_a_hand_over():
    async def story():
        found, picked, seen = service(workers=1, batch_size=512, batch_limit=512), [], []
        loop = asyncio.get_running_loop()

        def turn():
            seen.append(len(picked))
            if len(picked) < 512:
                loop.call_soon(turn)

        loop.call_soon(turn)
        await asyncio.gather(*(found.query(("room",), "lesson", 1, picked.append) for _ in range(512)))
        assert max(b - a for a, b in itertools.pairwise(seen)) <= 64
        await found.aclose()

    run(story())


def test_closing_answers_what_was_asked_and_refuses_the_rest():
    async def story():
        found = service(max_wait_s=10.0)
        asks = [asyncio.ensure_future(found.query(("room",), "lesson", 1, len)) for _ in range(5)]
        await asyncio.sleep(0)
        await found.aclose()
        assert await asyncio.gather(*asks) == [1] * 5
        with pytest.raises(RuntimeError, match="closed"):
            await found.query(("room",), "lesson", 1, len)

    run(story())


def test_the_cache_keeps_the_texts_used_last():
    async def story():
        embedder = HashEmbedder()
        found = service(embedder=embedder, cache_size=2)
        for text in ("a", "b", "a", "c", "a", "b"):
            await found.query(("room",), text, 1, len)
        assert embedder.calls == [["a"], ["b"], ["c"], ["b"]]
        assert (found._counts["cache_hits"], found._counts["cache_misses"]) == (2, 4)
        await found.aclose()

    run(story())


def test_workers_follow_the_cores():
    assert worker_count(3) == 3
    assert worker_count(0) >= 1


def test_one_batch_of_vectors_is_the_rows_of_its_texts():
    vectors = {"a": np.asarray([1.0, 2.0], np.float32), "b": np.asarray([3.0, 4.0], np.float32)}
    np.testing.assert_array_equal(assemble(["b", "a", "b"], vectors), [[3, 4], [1, 2], [3, 4]])


@pytest.mark.parametrize("value", [np.nan, np.inf, 3e38])
def test_a_query_without_a_direction_keeps_no_other_from_its_answer(value):
    class Odd(HashEmbedder):
        def embed(self, texts):
            made = super().embed(texts)
            made[["odd" in text for text in texts]] = value
            return made

    async def story():
        found = service(embedder=Odd(), batch_size=3)
        for _ in range(2):  # the second time out of the cache
            asked = (found.query(("room",), text, 1, len) for text in ("odd", "lesson 1", "lesson 2"))
            assert await asyncio.gather(*asked) == [0, 1, 1]
        assert found._counts["queries_without_direction"] == 1
        await found.aclose()

    run(story())
