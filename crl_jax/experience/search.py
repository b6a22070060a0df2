"""From texts to candidates without blocking anyone: micro-batches, an embedding cache, and search workers.

Owns: how queries are batched (16 queries or 1 ms by default), which of them are embedded (cache misses, in one call), which worker thread
searches. Promises: embedding and search run off the event loop; results are handed over in the order the queries came, whatever order the
searches finish in; every wait has a deadline. Does not: rank for diversity or count usage (the caller does, in that order).
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from crl_jax.experience.index import Index
from crl_jax.experience.protocols import Embedder
from crl_jax.experience.retrieve import Candidate
from crl_jax.experience.thread import DaemonThread

Pick = Callable[[list[Candidate]], object]


class _Query(NamedTuple):
    namespaces: tuple[str, ...]
    text: str
    k: int
    pick: Pick
    answer: asyncio.Future[object]


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
        max_wait_s: float = 0.001,
        workers: int = 4,
        cache_size: int = 1000,
        timeout_s: float = 30.0,
    ) -> None:
        self._embedder = embedder
        self._index = index
        self._counts = counts
        self._clock = clock
        self._batch_size = batch_size
        self._max_wait_s = max_wait_s
        self._cache_size = cache_size
        self._timeout_s = timeout_s
        self._cache: OrderedDict[str, Float[np.ndarray, " d"]] = OrderedDict()
        self._embed_thread = DaemonThread("crl-embed")
        self._workers = [DaemonThread(f"crl-search-{w}") for w in range(workers)]
        self._next_worker = 0
        self.per_worker = [0] * workers  # batches searched, for metrics
        self._open: list[_Query] = []
        self._timer: asyncio.TimerHandle | None = None
        self._running: set[asyncio.Task[None]] = set()
        self._last: asyncio.Task[None] | None = None
        self.latency_s = 0.0  # sum over queries

    async def query(self, namespaces: tuple[str, ...], text: str, k: int, pick: Pick) -> object:
        """The result of ``pick(candidates)``, called on the event loop in the order of the queries; the candidates are the ``k`` nearest of
        all ``namespaces`` together. Raises TimeoutError after the deadline."""
        started = self._clock()
        answer: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        self._open.append(_Query(namespaces, text, k, pick, answer))
        if len(self._open) >= self._batch_size:
            self._flush()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._max_wait_s, self._flush)
        try:
            found = await asyncio.wait_for(answer, self._timeout_s)
        except TimeoutError as error:
            if answer.done() and not answer.cancelled():  # the embedder's or the index's own
                raise
            raise TimeoutError(f"no answer to a query of the bank within {self._timeout_s:g} s: is the embedder stuck?") from error
        self._counts["searches"] += 1
        self.latency_s += self._clock() - started
        return found

    async def embed(self, texts: Sequence[str]) -> list[Float[np.ndarray, " d"]]:
        """Vectors of ``texts`` through the cache; the misses go to the embedder in one call, each distinct text once."""
        known: dict[str, Float[np.ndarray, " d"]] = {}
        for text in dict.fromkeys(texts):
            if text in self._cache:
                self._cache.move_to_end(text)
                known[text] = self._cache[text]
        missing = [text for text in dict.fromkeys(texts) if text not in known]
        self._counts["cache_hits"] += sum(text in known for text in texts)
        self._counts["cache_misses"] += len(missing)
        if missing:
            self._counts["embed_calls"] += 1
            vectors = await asyncio.get_running_loop().run_in_executor(self._embed_thread, self._embedder.embed, missing)
            for text, vector in zip(missing, vectors, strict=True):
                known[text] = self._cache[text] = vector
            while len(self._cache) > self._cache_size:
                self._cache.popitem(last=False)
        return [known[text] for text in texts]

    async def aclose(self) -> None:
        """Finish what was asked, within the deadline, and stop the threads."""
        self._flush()
        if self._running:
            await asyncio.wait(set(self._running), timeout=self._timeout_s)
        for pool in (self._embed_thread, *self._workers):
            pool.shutdown()

    def _flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._open:
            return
        batch, self._open = self._open, []
        worker = self._next_worker
        self._next_worker = (worker + 1) % len(self._workers)
        self.per_worker[worker] += 1
        task = asyncio.get_running_loop().create_task(self._answer(batch, worker, self._last))
        self._last = task
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _answer(self, batch: list[_Query], worker: int, before: asyncio.Task[None] | None) -> None:
        try:
            vectors = await self.embed([query.text for query in batch])
            candidates = await self._search(batch, np.stack(vectors), worker)
            if before is not None and not before.done():
                await asyncio.wait({before}, timeout=self._timeout_s)
            for query, found in zip(batch, candidates, strict=True):
                if not query.answer.done():  # the caller may have given up
                    query.answer.set_result(query.pick(found))
        except Exception as error:  # handed to every caller of the batch, which raises it
            for query in batch:
                if not query.answer.done():
                    query.answer.set_exception(error)

    async def _search(self, batch: list[_Query], vectors: Float[np.ndarray, "q d"], worker: int) -> list[list[Candidate]]:
        by_namespace: dict[str, list[int]] = {}
        for i, query in enumerate(batch):
            for namespace in query.namespaces:
                by_namespace.setdefault(namespace, []).append(i)
        index = self._index()

        def run() -> list[list[Candidate]]:
            found: list[list[Candidate]] = [[] for _ in batch]
            for namespace, rows in by_namespace.items():
                hits = index.search(vectors[rows], max(batch[i].k for i in rows), namespace=namespace)
                for i, row in zip(rows, hits, strict=True):
                    found[i] = sorted([*found[i], *row], key=lambda c: -c.similarity)[: batch[i].k] if found[i] else row[: batch[i].k]
            return found

        return await asyncio.get_running_loop().run_in_executor(self._workers[worker], run)
