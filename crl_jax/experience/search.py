"""From texts to candidates without blocking anyone: batches that grow with the load, and search workers that scale with the cores.

Owns: which queries are searched together, what is embedded (cache misses, in one call for each batch), who waits how long. A batch is due
when it has ``batch_size`` queries or its oldest waited ``max_wait_s``; while every worker is busy queries gather, and the next one takes
its share of them, up to ``batch_limit``. Promises: embedding and search run off the event loop; results are handed over in the order the
queries came, whatever order the searches finish in; every query is answered, refused or failed within ``timeout_s``; at most ``max_open``
are open, more are refused at once. Does not: rank for diversity or count usage (the caller does, in that order).
"""

from __future__ import annotations

import asyncio
import functools
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from crl_jax.experience.index import Index
from crl_jax.experience.protocols import Embedder
from crl_jax.experience.query_vectors import QueryVectors, Vector, assemble
from crl_jax.experience.retrieve import Candidate
from crl_jax.experience.thread import DaemonThread
from crl_jax.scopes import scope

_END_S = 2.0  # a thread ends at once unless it hangs in foreign code
Pick = Callable[[list[Candidate]], object]
Found = list[list[Candidate]]

BATCH_LIMIT = 128
_AT_ONCE = 64  # answers handed over before the event loop gets its turn
_SIZES: tuple[int, ...] = (1, 4, 16, 64, 256)  # upper ends of the size classes of batches in the metrics


class TooManyQueries(RuntimeError):
    """More queries are open than the service takes: it is asked faster than it can answer. Nothing was begun: the caller may try again."""


class _Query(NamedTuple):
    namespaces: tuple[str, ...]
    text: str
    k: int
    pick: Pick
    answer: asyncio.Future[object]
    asked: float


class _Batch:
    """Mutable: queries that are searched together. ``outcome`` is written once, by the thread that ends it."""

    __slots__ = ("given", "loop", "lost", "new_vectors", "outcome", "queries")

    def __init__(self, queries: list[_Query], loop: asyncio.AbstractEventLoop) -> None:
        self.queries = queries
        self.loop = loop
        self.new_vectors: dict[str, Vector] = {}
        self.outcome: Found | BaseException | None = None
        self.given = 0  # queries answered so far
        self.lost = 0  # newly embedded texts without a direction


def worker_count(workers: int) -> int:
    """0 means one for each core this process may use."""
    if workers:
        return workers
    return max(1, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


class SearchService:
    """Mutable service on one event loop. ``index`` is a function because the index is replaced when the bank is rewound."""

    def __init__(
        self,
        *,
        embedder: Embedder,
        index: Callable[[], Index],
        counts: Counter[str],
        clock: Callable[[], float] = time.perf_counter,
        batch_size: int = 16,
        batch_limit: int = BATCH_LIMIT,
        max_wait_s: float = 0.001,
        workers: int = 0,
        cache_size: int = 1000,
        max_open: int = 8192,
        timeout_s: float = 30.0,
    ) -> None:
        self._embedder = embedder
        self._index = index
        self._counts = counts
        self._clock = clock
        self._batch_size = batch_size
        self._batch_limit = max(batch_size, batch_limit)
        self._max_wait_s = max_wait_s
        self._max_open = max_open
        self._timeout_s = timeout_s
        self._vectors = QueryVectors(cache_size, counts)
        self._n_workers = worker_count(workers)
        self._embed_thread = DaemonThread("crl-embed")
        self._pool = DaemonThread("crl-search", threads=self._n_workers)
        self._numbers: dict[int, int] = {}  # thread -> number of the worker
        self.per_worker = [0] * self._n_workers  # batches searched, for metrics
        self.by_size: dict[int, int] = dict.fromkeys(_SIZES, 0)  # batches by size class
        self.latency_s = 0.0  # sum over queries
        self._open: deque[_Query] = deque()  # in the order they came; answered ones are dropped from the front
        self._waiting: deque[_Query] = deque()  # the part of them that is in no batch yet
        self._due = False  # the head of the waiting ones is not to wait for more
        self._order: deque[_Batch] = deque()  # not handed over yet, oldest first
        self._in_flight = 0  # batches that are being embedded or searched, or lie ready for the next free worker
        self._handing = False  # more of the hand-over is to come in the loop's next round
        self._gather: asyncio.TimerHandle | None = None
        self._sweep: asyncio.TimerHandle | None = None
        self._closed = False

    async def query(self, namespaces: tuple[str, ...], text: str, k: int, pick: Pick) -> object:
        """The result of ``pick(candidates)``, called on the event loop in the order of the queries; the candidates are the ``k`` nearest of
        all ``namespaces`` together.

        Raises TooManyQueries when ``max_open`` are open, TimeoutError after the deadline, and ValueError for k < 1.
        """
        if self._closed:
            raise RuntimeError("the search service is closed")
        if k < 1:  # here, before it spoils the batch
            raise ValueError(f"k={k}: ask for at least one neighbour")
        if len(self._open) >= self._max_open:
            self._counts["searches_rejected"] += 1
            raise TooManyQueries(f"{self._max_open} queries of the bank are open: ask less at a time, or give it more search workers")
        loop = asyncio.get_running_loop()
        asked = _Query(namespaces, text, k, pick, loop.create_future(), self._clock())
        self._open.append(asked)
        self._waiting.append(asked)
        if self._sweep is None:
            self._sweep = loop.call_later(self._timeout_s, self._expire)
        if len(self._waiting) >= self._batch_size:
            self._due = True
            self._start(loop)
        elif self._gather is None and not self._due:
            self._gather = loop.call_later(self._max_wait_s, self._gathered)
        return await asked.answer

    def stats(self) -> dict[str, float]:
        """Gauges of back-pressure, and batches by size and by worker."""
        return {
            "search_open": len(self._open),
            "search_waiting": len(self._waiting),
            "search_oldest_wait_s": self._clock() - self._open[0].asked if self._open else 0.0,
            "search_latency_s": self.latency_s,
            **{f"search_sizes_to_{size}": n for size, n in self.by_size.items()},
            **{f"search_batches_worker_{w}": n for w, n in enumerate(self.per_worker)},
        }

    async def aclose(self) -> None:
        """Finish what was asked, within the deadline, and stop the threads."""
        self._closed = True
        self._start(asyncio.get_running_loop())
        if self._open:
            await asyncio.wait([query.answer for query in self._open], timeout=self._timeout_s)
        for timer in (self._gather, self._sweep):
            if timer is not None:
                timer.cancel()
        for threads in (self._embed_thread, self._pool):
            threads.shutdown()
        for threads in (self._embed_thread, self._pool):
            await asyncio.to_thread(threads.join, _END_S)

    # ------------------------------------------------------------------------------------------------------------ on the event loop

    def _gathered(self) -> None:
        self._gather = None
        self._due = True
        self._start(asyncio.get_running_loop())

    def _start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin batches while they are due and a worker is free. One more than there are workers: it lies ready when the next one ends."""
        while self._waiting and (self._due or self._closed) and self._in_flight <= self._n_workers:
            share = -(-len(self._waiting) // self._n_workers)
            size = min(len(self._waiting), self._batch_limit, max(self._batch_size, share))
            queries = [query for query in (self._waiting.popleft() for _ in range(size)) if not query.answer.done()]
            self._due = len(self._waiting) >= self._batch_size
            if queries:
                self._begin(_Batch(queries, loop))
        if self._gather is not None and not self._waiting:
            self._gather.cancel()
            self._gather = None
        elif self._gather is None and self._waiting and not self._due:
            self._gather = loop.call_later(self._max_wait_s, self._gathered)

    def _begin(self, batch: _Batch) -> None:
        self._order.append(batch)
        self._in_flight += 1
        self.by_size[next((size for size in _SIZES if len(batch.queries) <= size), _SIZES[-1])] += 1
        known, missing = self._vectors.look_up([query.text for query in batch.queries])
        if missing:
            self._counts["embed_calls"] += 1
            done = self._embed_thread.submit(self._embed, known, missing, batch)
            done.add_done_callback(functools.partial(self._failed, batch))
        else:
            self._submit(batch, known)

    def _finished(self, batch: _Batch) -> None:
        self._in_flight -= 1
        self._vectors.store(batch.new_vectors)
        if batch.lost:
            self._counts["queries_without_direction"] += batch.lost  # they find nothing
        self._start(batch.loop)  # first: a worker is waiting
        if not self._handing:
            self._hand_over()

    def _hand_over(self) -> None:
        """Answer, in order, what is found; a little at a time, for others use the event loop too."""
        left = _AT_ONCE
        while self._order and self._order[0].outcome is not None and left > 0:
            batch = self._order[0]
            part = batch.queries[batch.given : batch.given + left]
            self._answer(part, batch.outcome, batch.given)
            batch.given += len(part)
            left -= len(part)
            if batch.given == len(batch.queries):
                self._order.popleft()
        self._drop_answered()
        self._handing = bool(self._order) and self._order[0].outcome is not None
        if self._handing:
            self._order[0].loop.call_soon(self._hand_over)

    def _answer(self, queries: list[_Query], outcome: Found | BaseException | None, start: int) -> None:
        now, answered = self._clock(), 0
        for n, query in enumerate(queries, start):
            if query.answer.done():  # the caller gave up, or its time was over
                continue
            if not isinstance(outcome, list):
                query.answer.set_exception(outcome or RuntimeError("a search came to nothing"))
                continue
            try:
                query.answer.set_result(query.pick(outcome[n]))
            except Exception as error:  # handed to the caller, who raises it
                query.answer.set_exception(error)
                continue
            answered += 1
            self.latency_s += now - query.asked
        self._counts["searches"] += answered

    def _drop_answered(self) -> None:
        while self._open and self._open[0].answer.done():
            self._open.popleft()
        if not self._open and self._sweep is not None:
            self._sweep.cancel()
            self._sweep = None

    def _expire(self) -> None:
        """Fail the queries whose time is over; a batch of which nobody waits any more holds up no other."""
        self._sweep = None
        now, late = self._clock(), 0
        message = f"no answer to a query of the bank within {self._timeout_s:g} s: is the embedder stuck?"
        while self._open and (self._open[0].answer.done() or now - self._open[0].asked >= self._timeout_s):
            query = self._open.popleft()
            if not query.answer.done():
                query.answer.set_exception(TimeoutError(message))
                late += 1
        self._counts["search_timeouts"] += late
        if self._open:
            wait_s = max(0.001, self._timeout_s - (now - self._open[0].asked))
            self._sweep = asyncio.get_running_loop().call_later(wait_s, self._expire)
        while self._order and self._order[0].outcome is None and all(query.answer.done() for query in self._order[0].queries):
            self._order.popleft()
        if not self._handing:
            self._hand_over()

    # ------------------------------------------------------------------------------------------------------------ on other threads

    def _embed(self, known: dict[str, Vector], missing: list[str], batch: _Batch) -> None:
        with scope("embed"):
            made = self._embedder.embed(missing)
        batch.new_vectors = dict(zip(missing, made, strict=True))
        with np.errstate(over="ignore", invalid="ignore"):
            lengths = np.square(made, dtype=np.float32).sum(axis=1)  # of all at once: one by one would cost every query
        batch.lost = len(missing) - int(((lengths > 0) & np.isfinite(lengths)).sum())
        self._submit(batch, known | batch.new_vectors)

    def _failed(self, batch: _Batch, embedding: Future[None]) -> None:
        if not embedding.cancelled() and (error := embedding.exception()) is not None:
            self._end(batch, error)

    def _submit(self, batch: _Batch, vectors: dict[str, Vector]) -> None:
        self._pool.submit(self._search, batch, vectors, self._index())

    def _search(self, batch: _Batch, vectors: dict[str, Vector], index: Index) -> None:
        number = self._numbers.setdefault(threading.get_ident(), len(self._numbers))
        self.per_worker[number] += 1
        try:
            rows = assemble([query.text for query in batch.queries], vectors)
            with scope("search"):
                outcome = _search(index, batch.queries, rows)
        except BaseException as error:  # handed to every caller of the batch, who raises it
            self._end(batch, error)
        else:
            self._end(batch, outcome)

    def _end(self, batch: _Batch, outcome: Found | BaseException) -> None:
        batch.outcome = outcome
        if not batch.loop.is_closed():
            batch.loop.call_soon_threadsafe(self._finished, batch)


def _search(index: Index, queries: list[_Query], vectors: Float[np.ndarray, "q d"]) -> Found:
    """Candidates by query; one call of the index for each namespace and number of neighbours. Of equals the one of the namespace that the
    query names first comes first."""
    first = queries[0]
    if len(first.namespaces) == 1 and all(query.namespaces == first.namespaces and query.k == first.k for query in queries):
        return index.search(vectors, first.k, namespace=first.namespaces[0])
    groups: dict[tuple[str, int], list[int]] = {}
    for i, query in enumerate(queries):
        for namespace in query.namespaces:
            groups.setdefault((namespace, query.k), []).append(i)
    hits: list[dict[str, list[Candidate]]] = [{} for _ in queries]
    for (namespace, k), rows in groups.items():
        for i, found in zip(rows, index.search(vectors[rows], k, namespace=namespace), strict=True):
            hits[i][namespace] = found
    return [_nearest([found[name] for name in query.namespaces], query.k) for query, found in zip(queries, hits, strict=True)]


def _nearest(lists: list[list[Candidate]], k: int) -> list[Candidate]:
    if len(lists) == 1:
        return lists[0]
    return sorted((hit for hits in lists for hit in hits), key=lambda c: -c.similarity)[:k]
