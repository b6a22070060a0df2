"""Search of the experience bank by 1,024 concurrent clients against bare batched ScaNN; the last line is one JSON object.

Usage:  python tests/bench/bench_bank.py [--entries 20000 200000] [--seconds 5] [--rounds 3] [--tries 1] [--out result.json]

A `ScannIndex` of clustered unit vectors of 384 numbers (seeded), k = 8; clients are asyncio tasks that ask a `SearchService` with an
embedder that looks vectors up in a table. There are many more query texts than the service's cache holds, so almost every query goes
through the embedder's thread. *Bare* is ``search_batched`` of the same built searcher with the same search options over the same queries,
in batches of 256 on as many threads as the service has workers, without Python for each query, in the same process.

throughput  clients ask back to back; answers per second over those of bare, in turns; once with a pick that keeps the candidates and once
            through `Reader.retrieve` of a real `BankState`, which re-ranks the 8 candidates by Eq. 6 and reserves one.
latency     clients think at random so that half of what bare can do is asked (and a quarter, for comparison); a query's latency minus
            the bare call on a batch as large as the one it was searched in. *burst*: all clients at once, last answer minus the bare
            call on all their queries.
beside      latency at a quarter of what bare can do: quiet, during a background rebuild, and while a writer thread replaces five
            entries by one 40 times a second; as a ratio to quiet.

``other_load`` says which share of the machine's CPU time other processes had during each measurement that counts.
"""

from __future__ import annotations

import argparse
import asyncio
import pathlib
import random
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import numpy as np

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE)]

import bank_load as bl  # noqa: E402

from crl_jax.experience.scann_index import ScannIndex  # noqa: E402
from crl_jax.experience.search import worker_count  # noqa: E402
from crl_jax.telemetry.result import Result, emit  # noqa: E402

HALF, MODERATE, WARM_S = 0.5, 0.25, 0.5  # shares of what bare can do; seconds
RATIO_GOAL, ADDED_GOAL_MS, BESIDE_GOAL = 0.80, 10.0, 1.5
T = TypeVar("T")


class Calm:
    """Mutable: repeats a measurement, at most ``tries`` times in all, while other processes use more than ``most`` of the machine."""

    def __init__(self, tries: int, most: float = 0.03) -> None:
        self._tries, self._most = tries, most
        self.other_load: dict[str, list[float]] = {}  # by name: the share of others during each measurement that counts

    def __call__(self, name: str, measure: Callable[[], T], *, tries: int | None = None) -> T:
        """The first calm result; if there is none, that with the least load of others."""
        best: tuple[float, T] | None = None
        for _ in range(min(self._tries, tries or self._tries)):
            load = bl.OtherLoad()
            found = measure()
            share = load.share()
            best = (share, found) if best is None or share < best[0] else best
            if share <= self._most:
                break
        assert best is not None
        self.other_load.setdefault(name, []).append(round(best[0], 3))
        return best[1]


async def back_to_back(ask: bl.Ask, seconds: float) -> tuple[float, float]:
    """Answers per second of all clients asking at once, and CPU milliseconds of one."""
    answered = 0

    async def client(seed: int) -> None:
        nonlocal answered
        n = seed
        while time.perf_counter() < end:
            n = (n + 7919) % bl.QUERIES
            await ask(n)
            answered += 1

    started, cpu = time.perf_counter(), time.process_time()
    end = started + seconds
    await asyncio.gather(*map(client, range(bl.CLIENTS)))
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
        await asyncio.sleep(rng.random() * bl.CLIENTS / rate)
        while time.perf_counter() < end and not (warm.is_set() and stop()):
            measured = warm.is_set()
            took = await ask(rng.randrange(bl.QUERIES))
            if measured:
                found.append(took)
            await asyncio.sleep(rng.expovariate(rate / bl.CLIENTS))

    async def start() -> None:
        await asyncio.sleep(WARM_S)
        begin()
        warm.set()

    await asyncio.gather(start(), *map(client, range(bl.CLIENTS)))
    return found


def percentiles(seconds: list[float]) -> dict[str, float]:
    p50, p99 = np.percentile(seconds, [50, 99]) * 1e3
    return {"p50_ms": round(float(p50), 3), "p99_ms": round(float(p99), 3), "queries": len(seconds)}


def throughput(bench: bl.Bench, rounds: int, calm: Calm) -> dict[str, Any]:
    """Bare, service and reader in turns; medians over the rounds."""
    rows: dict[str, list[tuple[float, float]]] = {"bare": [], "service": [], "reader": []}

    async def one(kind: str) -> tuple[float, float]:
        service = bl.service_of(bench)
        ask = bl.plain(service) if kind == "service" else bl.reader_of(service, len(bench.vectors))
        await back_to_back(ask, 0.5)
        found = await back_to_back(ask, bench.seconds)
        await service.aclose()
        return found

    for _ in range(rounds):
        rows["bare"].append(calm("bare", lambda: bench.bare_rate(bench.seconds)))
        rows["service"].append(calm("service", lambda: asyncio.run(one("service"))))
        rows["reader"].append(calm("reader", lambda: asyncio.run(one("reader"))))
    median = {kind: [float(np.median([row[i] for row in found])) for i in (0, 1)] for kind, found in rows.items()}
    return {
        **{f"{kind}_per_s": round(rate) for kind, (rate, _) in median.items()},
        **{f"{kind}_cpu_ms": round(cpu, 4) for kind, (_, cpu) in median.items()},
        **{f"{kind}_ratio": round(median[kind][0] / median["bare"][0], 3) for kind in ("service", "reader")},
        "rounds_per_s": {kind: [round(rate) for rate, _ in found] for kind, found in rows.items()},
    }


def latency(bench: bl.Bench, bare_rate: float) -> dict[str, Any]:
    """Added latency at half and at a quarter of what bare can do, and of a burst."""
    bare_s = bench.bare_seconds()
    sized = bl.Sized(bench.index)
    service = bl.service_of(bench, sized)

    async def ask(n: int) -> tuple[float, int]:
        started = time.perf_counter()
        answer = await service.query((bl.SPACE,), str(n), bl.K, bl.keep)
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
        await asyncio.gather(*map(ask, range(bl.CLIENTS)))
        return time.perf_counter() - started

    async def story() -> tuple[list[float], list[float], list[float]]:
        moderate = await thinking(added, MODERATE * bare_rate, bench.seconds)
        totals.clear()
        sizes.clear()
        found = await thinking(added, HALF * bare_rate, bench.seconds)
        bursts: list[float] = []
        for _ in range(5):
            await asyncio.sleep(0.2)
            bursts.append(await burst())
        await service.aclose()
        return moderate, found, bursts

    moderate, found, bursts = asyncio.run(story())
    alone_s = bench.bare_call_s(bl.CLIENTS)
    return {
        "asked_per_s": round(HALF * bare_rate),
        "added": percentiles(found),
        "total": percentiles(totals),
        "added_at_a_quarter": percentiles(moderate),
        "mean_batch": round(float(np.mean(sizes)), 1),
        "burst_added_ms": round(1e3 * (float(np.median(bursts)) - alone_s), 2),
        "burst_ms": round(1e3 * float(np.median(bursts)), 2),
        "bare_call_on_all_ms": round(1e3 * alone_s, 2),
    }


def beside(bench: bl.Bench, bare_rate: float, calm: Calm) -> dict[str, Any]:
    """Latency at moderate load: quiet, during a rebuild, during merges; and the ratios to quiet (before and after)."""
    rate = MODERATE * bare_rate

    async def load(seconds: float, *moments: Callable[[], Any]) -> list[float]:
        service = bl.service_of(bench)
        ask = bl.plain(service)

        async def timed(n: int) -> float:
            started = time.perf_counter()
            await ask(n)
            return time.perf_counter() - started

        found = await thinking(timed, rate, seconds, *moments)
        await service.aclose()
        return found

    def rebuilding() -> list[float]:
        bench.index.wait_builds(600.0)
        builds = bench.index.builds
        return asyncio.run(load(4 * bench.seconds, lambda: bench.index.rebuild(bl.SPACE), lambda: bench.index.builds > builds))

    done: list[int] = []

    def merging() -> list[float]:
        bench.index.wait_builds(600.0)
        stop = threading.Event()
        writer = threading.Thread(target=bl.merges, args=(bench, stop, done))
        found = asyncio.run(load(bench.seconds, writer.start))
        stop.set()
        writer.join(60)
        return found

    quiet = calm("quiet", lambda: asyncio.run(load(bench.seconds)))
    rebuild = calm("rebuild", rebuilding, tries=2)  # a build of 200,000 entries takes a minute
    bench.index.wait_builds(600.0)
    quiet += calm("quiet", lambda: asyncio.run(load(bench.seconds)))
    merge = calm("merge", merging)
    bench.index.wait_builds(600.0)
    found: dict[str, Any] = {"asked_per_s": round(rate), "merges": len(done)}
    base = percentiles(quiet)
    for name, times in (("quiet", quiet), ("rebuild", rebuild), ("merge", merge)):
        row = percentiles(times)
        found[name] = row | {f"{p}_ratio": round(row[f"{p}_ms"] / base[f"{p}_ms"], 3) for p in ("p50", "p99")}
    return found


def measure(n: int, args: argparse.Namespace) -> dict[str, Any]:
    """Everything at one size."""
    vectors, queries = bl.clustered(n, seed=0)
    index = ScannIndex(bl.DIM)
    started = time.perf_counter()
    index.add([f"x{row}" for row in range(n)], vectors, namespace=bl.SPACE)
    index.wait_builds(600.0)
    build_s = time.perf_counter() - started
    bench = bl.Bench(index, vectors, queries, args.workers, args.seconds)
    searcher = index.searcher(bl.SPACE)
    assert searcher is not None
    calm = Calm(args.tries)
    rates = throughput(bench, args.rounds, calm)
    bare_rate = rates["bare_per_s"]
    found: dict[str, Any] = {"throughput": rates, "latency": calm("latency", lambda: latency(bench, bare_rate))}
    found |= {"beside": beside(bench, bare_rate, calm), "other_load": calm.other_load}
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", type=int, nargs="+", default=[20_000, 200_000])
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=3, help="of the throughput, in turns with bare")
    parser.add_argument(
        "--tries", type=int, default=1, help="times a measurement is taken at most while other processes use over 3 %% of the CPU"
    )
    parser.add_argument("--out", type=pathlib.Path, default=None)
    args = parser.parse_args()
    args.workers = worker_count(0)
    found = {n: measure(n, args) for n in args.entries}
    goals = goals_of(found)
    details = {
        "goals": goals,
        "entries": found,
        "clients": bl.CLIENTS,
        "k": bl.K,
        "dim": bl.DIM,
        "workers": args.workers,
        "rounds": args.rounds,
    }
    value = min(row["throughput"]["service_ratio"] for row in found.values())
    unit = "x (answers per second of 1,024 clients / bare batched ScaNN, lowest of the sizes)"
    passed = all(row["pass"] for row in goals.values())
    emit(Result("bench_bank", value, unit, f">= {RATIO_GOAL}, and every goal in details", passed, details=details), args.out)


if __name__ == "__main__":
    main()
