"""What the benchmark of the bank's search is made of: the index, the queries, the bare call, the clients' services, and other load.

Owns: `Bench` and the parts around it. Does not: measure the service (``bench_bank``).
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

import immutables
import numpy as np

from crl_jax.experience.bank import BankState
from crl_jax.experience.reader import Reader
from crl_jax.experience.retrieve import Candidate, Diversity
from crl_jax.experience.scann_index import ScannIndex
from crl_jax.experience.search import SearchService
from crl_jax.experience.space import Space
from crl_jax.records import Experience

DIM, K, CLIENTS, QUERIES, SPACE = 384, 8, 1024, 16_384, "bank"
BARE_BATCH = 256  # queries
MERGES_PER_S, MERGED = 40, 5
Ask = Callable[[int], Coroutine[Any, Any, object]]


class Table:
    """An embedder of the texts ``0``, ``1``, ... by look-up."""

    dim, fingerprint = DIM, "table"

    def __init__(self, rows: np.ndarray) -> None:
        self._rows = rows

    def embed(self, texts: list[str]) -> np.ndarray:
        return self._rows[list(map(int, texts))]


class Sized:
    """The index, noting for each answer how many queries were searched together."""

    def __init__(self, index: ScannIndex) -> None:
        self._index = index
        self.sizes: dict[int, int] = {}

    def search(self, queries: np.ndarray, k: int, *, namespace: str) -> list[list[Candidate]]:
        found = self._index.search(queries, k, namespace=namespace)
        self.sizes.update(dict.fromkeys(map(id, found), len(queries)))
        return found


@dataclasses.dataclass
class Bench:
    """One size: the index, the queries, and what bare does."""

    index: ScannIndex
    vectors: np.ndarray
    queries: np.ndarray
    workers: int
    seconds: float

    def bare(self, rows: np.ndarray) -> None:
        searcher = self.index.searcher(SPACE)
        assert searcher is not None
        searcher.raw.search_batched(rows, final_num_neighbors=K, **searcher.options(K))

    def bare_rate(self, seconds: float) -> tuple[float, float]:
        """Queries per second, and CPU milliseconds of one."""
        end, counts = time.perf_counter() + seconds, [0] * self.workers

        def work(n: int) -> None:
            at = n * BARE_BATCH
            while time.perf_counter() < end:
                self.bare(self.queries[at : at + BARE_BATCH])
                counts[n] += BARE_BATCH
                at = (at + BARE_BATCH * self.workers) % (QUERIES - BARE_BATCH)

        threads = [threading.Thread(target=work, args=(n,)) for n in range(self.workers)]
        started, cpu = time.perf_counter(), time.process_time()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(seconds + 60)
        return sum(counts) / (time.perf_counter() - started), 1e3 * (time.process_time() - cpu) / sum(counts)

    def bare_call_s(self, size: int) -> float:
        """Median seconds of one bare call on one thread."""
        times: list[float] = []
        for n in range(7):
            started = time.perf_counter()
            self.bare(self.queries[n * size : (n + 1) * size])
            times.append(time.perf_counter() - started)
        return float(np.median(times))

    def bare_seconds(self) -> Callable[[int], float]:
        """Seconds of a bare call by batch size, between measured sizes on a line."""
        sizes = (1, 4, 16, 64, 128, 256, 512)
        times = [self.bare_call_s(size) for size in sizes]
        return lambda size: float(np.interp(size, sizes, times))


def clustered(n: int, *, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Unit entries and unit queries around 200 shared centres."""
    rng = np.random.default_rng(seed)
    centres = rng.standard_normal((200, DIM), np.float32)

    def draw(count: int) -> np.ndarray:
        rows = centres[rng.integers(0, len(centres), count)] + 0.7 * rng.standard_normal((count, DIM), np.float32)
        return rows / np.linalg.norm(rows, axis=1, keepdims=True)

    return draw(n), draw(QUERIES)


def service_of(bench: Bench, index: object = None) -> SearchService:
    made = index or bench.index
    return SearchService(embedder=Table(bench.queries), index=lambda: made, counts=Counter())  # type: ignore[arg-type, return-value]


def plain(service: SearchService) -> Ask:
    return lambda n: service.query((SPACE,), str(n), K, keep)


def keep(candidates: list[Candidate]) -> list[Candidate]:
    return candidates


def reader_of(service: SearchService, n: int) -> Ask:
    entries = {i: Experience(i, SPACE, f"lesson {i}", "g", 0, 0, 0) for i in (f"x{row}" for row in range(n))}
    state = BankState({SPACE: Space(immutables.Map(entries))})
    reader = Reader(search=service, state=lambda: state, step=lambda: 1, diversity=Diversity(k=1, oversample=K), seed=0)
    return lambda number: reader.retrieve(SPACE, str(number), peek=False)


def merges(bench: Bench, stop: threading.Event, done: list[int]) -> None:
    """Replace five entries by one, again and again: the new one first, as the bank's writer does."""
    while not stop.wait(1 / MERGES_PER_S):
        n = len(done) * MERGED  # goes on where the last writer stopped
        if n + MERGED > len(bench.vectors):
            return
        bench.index.add([f"m{n}"], bench.vectors[n : n + MERGED].mean(0, keepdims=True), namespace=SPACE)
        bench.index.remove([f"x{row}" for row in range(n, n + MERGED)])
        done.append(n)


class OtherLoad:
    """CPU that other processes use, as a share of the machine (Linux; 0 elsewhere)."""

    def __init__(self) -> None:
        self._start = self._now()

    def share(self) -> float:
        """Since this was made."""
        (busy, total, own), (busy0, total0, own0) = self._now(), self._start
        return max(0.0, (busy - busy0) - (own - own0)) / max(total - total0, 1e-9)

    @staticmethod
    def _now() -> tuple[float, float, float]:
        stat = pathlib.Path("/proc/stat")
        if not stat.exists():
            return 0.0, 0.0, 0.0
        ticks = [int(word) for word in stat.read_text().split("\n", 1)[0].split()[1:9]]
        idle, total = ticks[3] + ticks[4], sum(ticks)
        unit = os.sysconf("SC_CLK_TCK")
        return (total - idle) / unit, total / unit, time.process_time()
