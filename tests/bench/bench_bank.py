"""Search of the experience bank by 1,024 concurrent clients against bare batched ScaNN; the last line is one JSON object.

Usage:  python tests/bench/bench_bank.py [--entries 20000 200000] [--seconds 6] [--rounds 3] [--out result.json]

A `ScannIndex` of clustered unit vectors of 384 numbers (seeded), k = 8; clients are asyncio tasks that ask a `SearchService` with an
embedder that looks vectors up in a table. There are many more query texts than the service's cache holds, so almost every query goes
through the embedder's thread. *Bare* is ``search_batched`` of the same built searcher with the same search options over the same queries,
in batches of 256 on as many threads as the service has workers, without Python for each query, in the same process.

throughput  clients ask back to back; answers per second over those of bare, in turns; once with a pick that keeps the candidates and once
            through `Reader.retrieve` of a real `BankState`, which re-ranks the 8 candidates by Eq. 6 and reserves one.
latency     clients think at random so that half of what bare can do is asked; a query's latency minus the bare call on a batch as large
            as the one it was searched in. *burst*: all clients at once, last answer minus the bare call on all their queries.
beside      latency at a quarter of what bare can do: quiet, during a background rebuild, and while a writer thread replaces five
            entries by one 40 times a second; as a ratio to quiet.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import pathlib
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

import immutables
import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from crl_jax.experience.bank import BankState
from crl_jax.experience.reader import Reader
from crl_jax.experience.retrieve import Candidate, Diversity
from crl_jax.experience.scann_index import ScannIndex
from crl_jax.experience.search import SearchService
from crl_jax.experience.space import Space
from crl_jax.records import Experience
from crl_jax.telemetry.result import Result, emit

DIM, K, CLIENTS, QUERIES, SPACE = 384, 8, 1024, 16_384, "bank"
BARE_BATCH, HALF, MODERATE = 256, 0.5, 0.25  # queries; shares of what bare can do
MERGES_PER_S, MERGED, WARM_S = 40, 5, 0.5
RATIO_GOAL, ADDED_GOAL_MS, BESIDE_GOAL = 0.80, 10.0, 1.5
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
    return lambda n: service.query((SPACE,), str(n), K, _keep)


def _keep(candidates: list[Candidate]) -> list[Candidate]:
    return candidates


def reader_of(service: SearchService, n: int) -> Ask:
    entries = {i: Experience(i, SPACE, f"lesson {i}", "g", 0, 0, 0) for i in (f"x{row}" for row in range(n))}
    state = BankState({SPACE: Space(immutables.Map(entries))})
    reader = Reader(search=service, state=lambda: state, step=lambda: 1, diversity=Diversity(k=1, oversample=K), seed=0)
    return lambda number: reader.retrieve(SPACE, str(number), peek=False)


async def back_to_back(ask: Ask, seconds: float) -> tuple[float, float]:
    """Answers per second of all clients asking at once, and CPU milliseconds of one."""
    answered = 0

    async def client(seed: int) -> None:
        nonlocal answered
        n = seed
        while time.perf_counter() < end:
            n = (n + 7919) % QUERIES
            await ask(n)
            answered += 1

    started, cpu = time.perf_counter(), time.process_time()
    end = started + seconds
    await asyncio.gather(*map(client, range(CLIENTS)))
    return answered / (time.perf_counter() - started), 1e3 * (time.process_time() - cpu) / answered


async def thinking(
    ask: Callable[[int], Coroutine[Any, Any, float]],
    rate: float,
    seconds: float,
    begin: Callable[[], None] = lambda: None,
    stop: Callable[[], bool] = lambda: False,
) -> list[float]:
    """What ``ask`` measured for clients that together ask ``rate`` times a second, at random, from ``begin`` (after half a second) on."""
    found: list[float] = []
    end = time.perf_counter() + WARM_S + seconds
    warm = asyncio.Event()

    async def client(seed: int) -> None:
        rng = random.Random(seed)
        await asyncio.sleep(rng.random() * CLIENTS / rate)
        while time.perf_counter() < end and not (warm.is_set() and stop()):
            measured = warm.is_set()
            took = await ask(rng.randrange(QUERIES))
            if measured:
                found.append(took)
            await asyncio.sleep(rng.expovariate(rate / CLIENTS))

    async def start() -> None:
        await asyncio.sleep(WARM_S)
        begin()
        warm.set()

    await asyncio.gather(start(), *map(client, range(CLIENTS)))
    return found


def percentiles(seconds: list[float]) -> dict[str, float]:
    p50, p99 = np.percentile(seconds, [50, 99]) * 1e3
    return {"p50_ms": round(float(p50), 3), "p99_ms": round(float(p99), 3), "queries": len(seconds)}


def throughput(bench: Bench, rounds: int) -> dict[str, Any]:
    """Bare, service and reader in turns; medians over the rounds."""
    rows: dict[str, list[tuple[float, float]]] = {"bare": [], "service": [], "reader": []}

    async def one(kind: str) -> tuple[float, float]:
        service = service_of(bench)
        ask = plain(service) if kind == "service" else reader_of(service, len(bench.vectors))
        await back_to_back(ask, 0.5)
        found = await back_to_back(ask, bench.seconds)
        await service.aclose()
        return found

    for _ in range(rounds):
        rows["bare"].append(bench.bare_rate(bench.seconds))
        for kind in ("service", "reader"):
            rows[kind].append(asyncio.run(one(kind)))
    median = {kind: [float(np.median([row[i] for row in found])) for i in (0, 1)] for kind, found in rows.items()}
    return {
        **{f"{kind}_per_s": round(rate) for kind, (rate, _) in median.items()},
        **{f"{kind}_cpu_ms": round(cpu, 4) for kind, (_, cpu) in median.items()},
        **{f"{kind}_ratio": round(median[kind][0] / median["bare"][0], 3) for kind in ("service", "reader")},
        "rounds_per_s": {kind: [round(rate) for rate, _ in found] for kind, found in rows.items()},
    }


def latency(bench: Bench, bare_rate: float) -> dict[str, Any]:
    """Added latency at half of what bare can do, and of a burst."""
    bare_s = bench.bare_seconds()
    sized = Sized(bench.index)
    service = service_of(bench, sized)

    async def ask(n: int) -> tuple[float, int]:
        started = time.perf_counter()
        answer = await service.query((SPACE,), str(n), K, _keep)
        return time.perf_counter() - started, sized.sizes.pop(id(answer))

    totals: list[float] = []
    sizes: list[int] = []

    async def added(n: int) -> float:
        took, size = await ask(n)
        totals.append(took)
        sizes.append(size)
        return took - bare_s(size)

    async def burst() -> float:
        started = time.perf_counter()
        await asyncio.gather(*map(ask, range(CLIENTS)))
        return time.perf_counter() - started

    async def story() -> tuple[list[float], list[float]]:
        found = await thinking(added, HALF * bare_rate, bench.seconds)
        bursts: list[float] = []
        for _ in range(5):
            await asyncio.sleep(0.2)
            bursts.append(await burst())
        await service.aclose()
        return found, bursts

    found, bursts = asyncio.run(story())
    alone_s = bench.bare_call_s(CLIENTS)
    return {
        "asked_per_s": round(HALF * bare_rate),
        "added": percentiles(found),
        "total": percentiles(totals),
        "mean_batch": round(float(np.mean(sizes)), 1),
        "burst_added_ms": round(1e3 * (float(np.median(bursts)) - alone_s), 2),
        "burst_ms": round(1e3 * float(np.median(bursts)), 2),
        "bare_call_on_all_ms": round(1e3 * alone_s, 2),
    }


def beside(bench: Bench, bare_rate: float) -> dict[str, Any]:
    """Latency at moderate load: quiet, during a rebuild, during merges; and the ratios to quiet (before and after)."""
    rate = MODERATE * bare_rate

    async def load(seconds: float, *moments: Callable[[], Any]) -> list[float]:
        service = service_of(bench)
        ask = plain(service)

        async def timed(n: int) -> float:
            started = time.perf_counter()
            await ask(n)
            return time.perf_counter() - started

        found = await thinking(timed, rate, seconds, *moments)
        await service.aclose()
        return found

    quiet = asyncio.run(load(bench.seconds))
    builds = bench.index.builds
    rebuild = asyncio.run(load(4 * bench.seconds, lambda: bench.index.rebuild(SPACE), lambda: bench.index.builds > builds))
    bench.index.wait_builds(600.0)
    quiet += asyncio.run(load(bench.seconds))
    stop = threading.Event()
    done: list[int] = []
    writer = threading.Thread(target=merges, args=(bench, stop, done))
    merge = asyncio.run(load(bench.seconds + 2, writer.start))
    stop.set()
    writer.join(60)
    bench.index.wait_builds(600.0)
    found: dict[str, Any] = {"asked_per_s": round(rate), "merges": len(done)}
    base = percentiles(quiet)
    for name, times in (("quiet", quiet), ("rebuild", rebuild), ("merge", merge)):
        row = percentiles(times)
        found[name] = row | {f"{p}_ratio": round(row[f"{p}_ms"] / base[f"{p}_ms"], 3) for p in ("p50", "p99")}
    return found


def merges(bench: Bench, stop: threading.Event, done: list[int]) -> None:
    """Replace five entries by one, again and again: the new one first, as the bank's writer does."""
    while not stop.wait(1 / MERGES_PER_S):
        n = len(done) * MERGED
        if n + MERGED > len(bench.vectors):
            return
        bench.index.add([f"m{n}"], bench.vectors[n : n + MERGED].mean(0, keepdims=True), namespace=SPACE)
        bench.index.remove([f"x{row}" for row in range(n, n + MERGED)])
        done.append(n)


def measure(n: int, args: argparse.Namespace) -> dict[str, Any]:
    """Everything at one size."""
    vectors, queries = clustered(n, seed=0)
    index = ScannIndex(DIM)
    started = time.perf_counter()
    index.add([f"x{row}" for row in range(n)], vectors, namespace=SPACE)
    index.wait_builds(600.0)
    build_s = time.perf_counter() - started
    bench = Bench(index, vectors, queries, args.workers, args.seconds)
    searcher = index.searcher(SPACE)
    assert searcher is not None
    rates = throughput(bench, args.rounds)
    found: dict[str, Any] = {
        "throughput": rates,
        "latency": latency(bench, rates["bare_per_s"]),
        "beside": beside(bench, rates["bare_per_s"]),
    }
    found |= {"setting": searcher.setting._asdict(), "build_s": round(build_s, 1), "index": index.stats()}
    index.close()
    return found


def goals_of(found: dict[int, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """What is asked of each size, and whether it was reached."""
    goals: dict[str, dict[str, Any]] = {}

    def goal(name: str, value: float, least: float | None = None, most: float | None = None) -> None:
        good = (least is None or value >= least) and (most is None or value <= most)
        goals[name] = {"value": value, "goal": f">= {least}" if most is None else f"<= {most}", "pass": good}

    for n, row in found.items():
        goal(f"throughput_ratio_{n}", row["throughput"]["service_ratio"], least=RATIO_GOAL)
        if n <= 20_000:
            goal(f"added_p99_ms_{n}", row["latency"]["added"]["p99_ms"], most=ADDED_GOAL_MS)
        for what in ("rebuild", "merge"):
            for p in ("p50", "p99"):
                goal(f"{what}_{p}_ratio_{n}", row["beside"][what][f"{p}_ratio"], most=BESIDE_GOAL)
    return goals


def main() -> None:
    from crl_jax.experience.search import worker_count

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", type=int, nargs="+", default=[20_000, 200_000])
    parser.add_argument("--seconds", type=float, default=6.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=3, help="of the throughput, in turns with bare")
    parser.add_argument("--out", type=pathlib.Path, default=None)
    args = parser.parse_args()
    args.workers = worker_count(0)
    found = {n: measure(n, args) for n in args.entries}
    goals = goals_of(found)
    details = {"goals": goals, "entries": found, "clients": CLIENTS, "k": K, "dim": DIM, "workers": args.workers, "rounds": args.rounds}
    value = min(row["throughput"]["service_ratio"] for row in found.values())
    unit = "x (answers per second of 1,024 clients / bare batched ScaNN, lowest of the sizes)"
    passed = all(row["pass"] for row in goals.values())
    emit(Result("bench_bank", value, unit, f">= {RATIO_GOAL}, and every goal in details", passed, details=details), args.out)


if __name__ == "__main__":
    main()
