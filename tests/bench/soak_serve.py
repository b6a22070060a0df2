"""Soak of one sampler: 10,000 requests of every kind at once; the last line is one JSON object.

Usage:  python tests/bench/soak_serve.py [--requests 10000] [--seed 0] [--out docs/results/soak_serve.json]

More clients than slots hold conversations with a tiny model: prompts of their own and shared ones, greedy and sampled, several turns.
Meanwhile requests are cancelled (by ``cancel`` and by cancelling the task that waits), sessions are closed under a running request, unknown
sessions are cancelled, closed and asked, requests are bad in every way there is, and two sets of weights are published in turn. The load
comes in waves. After each one every session is closed and this must hold:

- every request ended exactly once, in the way it should, within its deadline;
- every slot is free and no session is open;
- greedy completions that no swap fell into (a sample of them) equal those of a sampler that has nothing else to do;
- resident memory is flat: its mean over the second half of the waves is at most 5 MB above that of the first half, warm-up left out.

What is asked for follows from the seed; what meets what in time does not. The value is requests per second.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import dataclasses
import gc
import os
import pathlib
import random
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

import jax

from crl_jax.models import transformer
from crl_jax.records import Completion, Finish, SamplingParams
from crl_jax.serving.engine import SlotEngine
from crl_jax.serving.sampler import EngineSampler, PromptTooLong
from crl_jax.telemetry.result import Result, emit

CONFIG = transformer.ModelConfig("soak", 48, 32, 2, 4, 2, 8, 64, tie_embeddings=False)
SLOTS, CLIENTS, LENGTH, NEW = 6, 16, 64, 8
SHAPES: dict[str, Any] = {"max_length": LENGTH, "row_buckets": (2,), "chunk_buckets": (4, 16), "max_steps": 4}
DEADLINE_S, SETTLE_S, COMPILING_S = 60.0, 20.0, 600.0
FIRST = 600  # requests before the first wave: they compile, and count for nothing but faults
WAVES, WARM_WAVES = 40, 6
SAMPLE = 0.2  # of the greedy completions are checked
GROWTH_GOAL_MB = 5.0
KINDS = {"plain": 66, "cancel": 8, "task_cancel": 8, "close": 4, "busy": 2, "unknown": 4, "bad": 8}  # of 100 requests
STOP = 7
COMMON = (tuple(range(10, 20)), tuple(range(20, 31)), tuple(range(30, 34)))  # prompts that conversations share


def weights(seed: int) -> Any:
    """Random weights whose likeliest token leads clearly, so that rounding decides nothing."""
    params = transformer.init(CONFIG, jax.random.key(seed))
    params["head"]["kernel"] = params["head"]["kernel"] * 60
    return params


@dataclasses.dataclass
class Wave:
    """One wave of requests, and what became of them. ``ended[i]`` counts how often request ``i`` ended."""

    left: int
    rng: random.Random
    deadline_s: float = DEADLINE_S
    ended: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)
    counts: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    faults: list[str] = dataclasses.field(default_factory=list)
    greedy: list[tuple[list[int], SamplingParams, Completion]] = dataclasses.field(default_factory=list)
    asked: int = 0
    gone: str = "s-1"  # a session that was closed

    def ask(self) -> int:
        """The number of the next request."""
        self.left, self.asked = self.left - 1, self.asked + 1
        return self.asked


class Conversation:
    """A session as its client sees it. ``ids`` are those the sampler must hold, None once a cancelled task has made them unknown."""

    def __init__(self, wave: Wave, sampler: EngineSampler, session: str) -> None:
        self.wave, self.sampler, self.session = wave, sampler, session
        self.ids: list[int] | None = []
        self.open = True

    async def turn(self) -> None:
        """One request of a random kind."""
        kind = self.wave.rng.choices(list(KINDS), list(KINDS.values()))[0]
        self.wave.counts[kind] += 1
        await getattr(self, kind)()

    async def plain(self) -> None:
        """Nothing happens to it."""
        await self._generate(*self._request())

    async def cancel(self) -> None:
        """The session's request is cancelled, somewhere between before its first token and after its last."""
        asked = asyncio.ensure_future(self._generate(*self._request()))
        await self._a_moment()
        await self.sampler.cancel(self.session)
        await asked

    async def task_cancel(self) -> None:
        """The task that waits is cancelled, as by a caller's timeout."""
        wave, (new, params) = self.wave, self._request()
        number, task = wave.ask(), asyncio.ensure_future(self.sampler.generate(self.session, new, params))
        await self._a_moment()
        task.cancel()
        try:
            async with asyncio.timeout(self.wave.deadline_s):
                await task
            wave.counts["task_cancel_too_late"] += 1
        except asyncio.CancelledError:
            wave.counts["task_cancelled"] += 1
        except PromptTooLong:
            wave.counts["conversation_full"] += 1
        except (ValueError, KeyError, TimeoutError) as error:
            wave.faults.append(f"a cancelled task ended with {error!r}")
        wave.ended[number] += 1
        self.ids = None  # the engine may have sampled some of it

    async def close(self) -> None:
        """The session is closed under its running request."""
        asked = asyncio.ensure_future(self._generate(*self._request()))
        await self._a_moment()
        self.open = False
        await self.sampler.close(self.session)
        await asked

    async def busy(self) -> None:
        """A second request of a session with one in flight is refused, or comes after it."""
        asked = asyncio.ensure_future(self._generate(*self._request()))
        await asyncio.sleep(0)
        number = self.wave.ask()
        try:
            async with asyncio.timeout(self.wave.deadline_s):
                await self.sampler.generate(self.session, [1], SamplingParams(1, 0.0))
            self.wave.counts["busy_too_late"] += 1
            self.ids = None  # it came second: which ids it added is not worth following
        except ValueError:
            self.wave.counts["refused"] += 1
        except TimeoutError:
            self.wave.faults.append("a second request never ended")
        self.wave.ended[number] += 1
        await asked

    async def unknown(self) -> None:
        """Sessions that never were, or are no more, can be cancelled and closed; asked, they are a KeyError."""
        name = self.wave.rng.choice(["", "nobody", self.wave.gone])
        await self.sampler.cancel(name)
        await self.sampler.close(name)
        await self._refused(KeyError, self.sampler.generate(name, [1, 2], SamplingParams(2)))

    async def bad(self) -> None:
        """A request that cannot be served is refused for what it is, and leaves the session as it was."""
        token = SamplingParams(2, 0.0)
        kinds: list[tuple[type[Exception], list[int], SamplingParams]] = [
            (PromptTooLong, [3] * (LENGTH + 1), token),
            (ValueError, [CONFIG.vocab_size], token),
            (ValueError, [-1], token),
            (ValueError, [1], dataclasses.replace(token, max_new_tokens=0)),
            (ValueError, [1], dataclasses.replace(token, temperature=-1.0)),
            (ValueError, [1], dataclasses.replace(token, temperature=float("nan"))),
            (ValueError, [1], dataclasses.replace(token, top_p=0.0)),
            (ValueError, [1], dataclasses.replace(token, top_k=-3)),
            (ValueError, [1], dataclasses.replace(token, stop_ids=tuple(range(40)))),
            (ValueError, [1], dataclasses.replace(token, constrained=True)),
        ]
        error, ids, params = self.wave.rng.choice(kinds)
        await self._refused(error, self.sampler.generate(self.session, ids, params))

    def _request(self) -> tuple[list[int], SamplingParams]:
        rng = self.wave.rng
        new = [rng.randrange(CONFIG.vocab_size) for _ in range(rng.randint(1, 12))]
        if self.ids == [] and rng.random() < 0.4:
            new = list(rng.choice(COMMON))
        greedy, stops = rng.random() < 0.5, (STOP,) if rng.random() < 0.3 else ()
        params = SamplingParams(
            rng.randint(1, NEW), 0.0 if greedy else 1.0, stop_ids=stops, seed=rng.randrange(2**31), forbidden_ids=rng.choice(((), (3, 5)))
        )
        if greedy:
            return new, params
        return new, dataclasses.replace(params, top_p=rng.choice((1.0, 0.9)), top_k=rng.choice((0, 8)), min_p=rng.choice((0.0, 0.05)))

    async def _generate(self, new: list[int], params: SamplingParams) -> None:
        wave, before = self.wave, self.ids
        number = wave.ask()
        try:
            async with asyncio.timeout(wave.deadline_s):
                done = await self.sampler.generate(self.session, new, params)
        except PromptTooLong:
            wave.counts["conversation_full"] += 1
        except TimeoutError:
            wave.faults.append(f"no end within {wave.deadline_s} s")
        else:
            wave.counts[f"ended_{done.finish.value}"] += 1
            if done.finish != Finish.CANCELLED and not 1 <= len(done.ids) <= params.max_new_tokens:
                wave.faults.append(f"{len(done.ids)} tokens of {params.max_new_tokens}")
            if before is not None:
                prompt = before + new
                self.ids = prompt + list(done.ids) if self.ids is not None else None
                if (
                    params.temperature == 0
                    and done.finish != Finish.CANCELLED
                    and len(set(done.versions)) == 1
                    and wave.rng.random() < SAMPLE
                ):
                    wave.greedy.append((prompt, params, done))
        wave.ended[number] += 1

    async def _refused(self, expected: type[Exception], asked: Awaitable[Completion]) -> None:
        wave = self.wave
        number = wave.ask()
        try:
            async with asyncio.timeout(self.wave.deadline_s):
                await asked
            wave.faults.append(f"a request that must be refused with {expected.__name__} was served")
        except expected:
            wave.counts["refused"] += 1
        except (ValueError, KeyError, TimeoutError) as error:
            wave.faults.append(f"{error!r} instead of {expected.__name__}")
        wave.ended[number] += 1

    async def _a_moment(self) -> None:
        await asyncio.sleep(self.wave.rng.choice((0.0, 0.001, 0.004, 0.02)) * self.wave.rng.random())


async def client(wave: Wave, sampler: EngineSampler) -> None:
    """Conversations, one after the other, until the wave's requests are used up."""
    while wave.left > 0:
        talk = Conversation(wave, sampler, await sampler.open())
        for _ in range(wave.rng.randint(1, 6)):
            if wave.left > 0 and talk.open and len(talk.ids or ()) < LENGTH - NEW:
                await talk.turn()
        await sampler.close(talk.session)
        wave.gone = talk.session


async def publisher(sampler: EngineSampler, sets: list[Any], rng: random.Random) -> None:
    """Publishes the two sets of weights in turn; version v is set v % 2."""
    while True:
        await asyncio.sleep(rng.uniform(0.03, 0.3))
        version = sampler.version + 1
        sampler.publish(sets[version % 2], version)


async def settled(sampler: EngineSampler) -> dict[str, int | float]:
    """The sampler's counters, as soon as nothing is held any more, or when time is up."""
    until = time.monotonic() + SETTLE_S
    while True:
        stats = sampler.stats()
        if (stats["free_slots"] == SLOTS and stats["open_sessions"] == 0) or time.monotonic() > until:
            return stats
        await asyncio.sleep(0.005)


async def compare(solo: EngineSampler, sets: list[Any], greedy: list[tuple[list[int], SamplingParams, Completion]]) -> list[str]:
    """What the solo sampler says differently."""
    faults = list[str]()
    for parity in (0, 1):
        solo.publish(sets[parity], solo.version + 1)
        for prompt, params, done in greedy:
            if done.versions[0] % 2 == parity:
                alone = await solo.complete(prompt, params)
                if alone.ids != done.ids:
                    faults.append(f"greedy ids {done.ids} of version {done.versions[0]}, alone {alone.ids}")
    return faults


def resident_mb() -> float:
    """Resident memory of this process."""
    gc.collect()
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


async def soak(requests: int, seed: int, say: Callable[[str], None]) -> dict[str, Any]:
    """The whole run; the result's details, with every fault found."""
    sets = [weights(0), weights(1)]
    sampler = EngineSampler(SlotEngine(CONFIG, max_slots=SLOTS, **SHAPES), sets[0])
    solo = EngineSampler(SlotEngine(CONFIG, max_slots=1, **SHAPES), sets[0], gather_s=0)
    counts, faults, rss, spent = collections.Counter[str](), list[str](), list[float](), list[float]()
    asked = 0
    try:
        for number in range(-1, WAVES):
            left, deadline_s = (FIRST, COMPILING_S) if number < 0 else (requests * (number + 1) // WAVES - asked, DEADLINE_S)
            wave = Wave(left, random.Random(f"{seed} {number}"), deadline_s)
            swaps = asyncio.ensure_future(publisher(sampler, sets, random.Random(f"swaps {seed} {number}")))
            began = time.monotonic()
            await asyncio.gather(*(client(wave, sampler) for _ in range(CLIENTS)))
            swaps.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await swaps
            stats = await settled(sampler)
            took = time.monotonic() - began
            if (stats["free_slots"], stats["open_sessions"]) != (SLOTS, 0):
                wave.faults.append(f"{stats['free_slots']} of {SLOTS} slots are free, {stats['open_sessions']} sessions open")
            if wave.ended != collections.Counter(range(1, wave.asked + 1)):
                wave.faults.append("a request did not end exactly once")
            wave.faults += await compare(solo, sets, wave.greedy)
            wave.counts["compared_with_solo"] += len(wave.greedy)
            faults += [f"wave {number}: {fault}" for fault in wave.faults]
            say(
                f"wave {number + 1}/{WAVES}: {wave.asked} requests, {wave.asked / took:.0f}/s, {resident_mb():.1f} MB, {len(faults)} faults"
            )
            if number < 0:
                continue
            asked += wave.asked
            counts += wave.counts
            spent.append(took)
            rss.append(resident_mb())
        stats = sampler.stats()
    finally:
        await sampler.aclose()
        await solo.aclose()
    half = WARM_WAVES + (WAVES - WARM_WAVES) // 2
    return {
        "requests": asked,
        "requests_per_s": asked / sum(spent),
        "faults": faults,
        "counts": dict(sorted(counts.items())),
        "swaps": stats["swaps"],
        "stats": stats,
        "rss_growth_mb": statistics.fmean(rss[half:]) - statistics.fmean(rss[WARM_WAVES:half]),
        "rss_mb": [round(x, 2) for x in rss],
        "load": {"slots": SLOTS, "clients": CLIENTS, "max_length": LENGTH, "waves": WAVES, "warm_waves": WARM_WAVES, "seed": seed},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=pathlib.Path, default=None, help="also write the result here")
    args = parser.parse_args()
    found = asyncio.run(soak(args.requests, args.seed, lambda line: print(line, flush=True)))
    goals = {
        "faults": {"value": len(found["faults"]), "goal": "== 0", "pass": not found["faults"]},
        "rss_growth_mb": {
            "value": found["rss_growth_mb"],
            "goal": f"<= {GROWTH_GOAL_MB}",
            "pass": found["rss_growth_mb"] <= GROWTH_GOAL_MB,
        },
        "compared_with_solo": {
            "value": found["counts"]["compared_with_solo"],
            "goal": ">= 1",
            "pass": found["counts"]["compared_with_solo"] >= 1,
        },
    }
    good = all(row["pass"] for row in goals.values())
    goal = f"no fault (stuck, lost, leaked, different), memory growth <= {GROWTH_GOAL_MB} MB"
    emit(Result("soak_serve", round(found["requests_per_s"], 1), "requests/s", goal, good, details={"goals": goals, **found}), args.out)


if __name__ == "__main__":
    main()
