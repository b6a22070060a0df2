"""What the serving benchmarks measure, the same for every program. Imports no framework.

Owns: the three cases (single turn, eight turns, SmolLM2-135M), their prompts, how often each is timed, and the report of one process.
Promises: every program gets the same token ids, and no prompt twice; what compiles or touches weights for the first time is run before
anything is timed. Does not: know a program. Each gives ``generate`` callables, and a round of one process is timed here.

A decode step is the difference between two rollouts that differ in nothing but their length, divided by the difference of the lengths:
what prefill, Python and copies cost once drops out.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import peer_common as pc

CASES = ("single", "multiturn", "smollm2")
SHORT, LONG = 8, 64  # new tokens of the two rollouts
TURNS, CONTEXT, NEW = 8, 64, 64  # of an episode: turns, new context ids per turn (the first turn's are its prompt), sampled ids per turn
EPISODE = TURNS * (CONTEXT + NEW)
SMOLLM2_BATCHES = (1, 8, 32)
SMOLLM2_PROMPT = 64
SMOLLM2_REPS = {1: 3, 8: 2, 32: 1}
SMOLLM2_ROWS = max(batch * (1 + 2 * reps) for batch, reps in SMOLLM2_REPS.items())  # prompts, so that none is read twice

Ids = list[int]
Sampled = tuple[list[Ids], list[list[float]]]  # ids and log-probs of each row; no log-probs where the case asks for none
Generate = Callable[[list[Ids], int, int], Sampled]  # (prompts, new tokens each, seed)
Talk = Callable[[int], list[list[Ids]]]  # seed -> for every turn the sampled ids of every conversation


def arguments(program: str) -> argparse.Namespace:
    """The command line that all programs share."""
    parser = argparse.ArgumentParser(description=program)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--reps", type=int, default=5, help="timed repetitions (smollm2: fewer for large batches)")
    parser.add_argument("--ways", nargs="+", default=["episode"], help="multiturn: which of the program's ways to time")
    parser.add_argument("--batches", type=int, nargs="+", default=list(SMOLLM2_BATCHES), help="smollm2: rows at once")
    parser.add_argument("--model", type=pathlib.Path, help="smollm2: weights, in the form the program reads")
    parser.add_argument("--prompts", type=pathlib.Path, help="smollm2: JSON list of token ids")
    return parser.parse_args()


def prompts(w: pc.Workload, seed: int) -> list[Ids]:
    """The rollout's rows: ``num_prompts`` prompts, each ``num_generations`` times."""
    rows = [[int(word[1:]) for word in pc.prompt_words(w, seed * w.num_prompts + i).split()] for i in range(w.num_prompts)]
    return [row for row in rows for _ in range(w.num_generations)]


def context(w: pc.Workload, seed: int, turn: int) -> list[Ids]:
    """What every conversation reads in one turn; no two conversations or turns read the same."""
    first = (seed * TURNS + turn) * w.batch
    return [[8 + (row * 131 + j * 17) % (w.vocab_size - 8) for j in range(CONTEXT)] for row in range(first, first + w.batch)]


def check(sampled: Sampled, rows: int, length: int, logps: bool = True) -> None:
    """Raises AssertionError unless every row has ``length`` ids, and as many finite log-probs where they were asked for."""
    ids, found = sampled
    assert [len(row) for row in ids] == [length] * rows, [len(row) for row in ids]
    if logps:
        assert [len(row) for row in found] == [length] * rows, [len(row) for row in found]
        assert all(-100 < p <= 0 for row in found for p in row), "a log-prob is positive or not finite"


def single(sw: pc.Stopwatch, w: pc.Workload, generate: Generate, reps: int) -> dict[str, int]:
    """Times ``reps`` rollouts of both lengths; returns the phases and their tokens."""
    phases = {"rollout": LONG, "rollout_short": SHORT}
    for length in phases.values():
        check(generate(prompts(w, 0), length, 0), w.batch, length)  # compiles
    for i in range(1, reps + 1):
        sw.mark_box()
        for seed, (phase, length) in enumerate(phases.items(), 2 * i):  # never the same prompts: a program may keep what it has read
            rows = prompts(w, seed)
            with sw.time(phase):
                sampled = generate(rows, length, seed)
            check(sampled, w.batch, length)
    return {phase: w.batch * length for phase, length in phases.items()}


def episodes(sw: pc.Stopwatch, w: pc.Workload, ways: dict[str, Talk], args: argparse.Namespace, *, compiles: bool) -> dict[str, int]:
    """Times ``args.reps`` episodes of all conversations in every way asked for, after one if the program ``compiles`` what it runs."""
    for seed in range(0 if compiles else 1, args.reps + 1):
        for way in args.ways:
            talk = ways[way]
            sw.mark_box()
            with sw.time(way if seed else f"first_{way}"):
                turns = talk(seed)
            assert len(turns) == TURNS
            for ids in turns:
                check((ids, []), w.batch, NEW, logps=False)
    return dict.fromkeys(args.ways, w.batch * TURNS * NEW)


def smollm2(sw: pc.Stopwatch, generate: Generate, rows: list[Ids], batch: int, reps: int) -> tuple[dict[str, int], list[Ids]]:
    """Times greedy rollouts of ``batch`` of ``rows`` in both lengths, other rows every time; returns the phases and the ids of the first
    long one."""
    phases, ids = {f"batch{batch}": LONG, f"batch{batch}_short": SHORT}, list[Ids]()
    groups = iter([rows[at : at + batch] for at in range(0, len(rows) - batch + 1, batch)])
    generate(next(groups), SHORT, 0)
    for _ in range(min(reps, SMOLLM2_REPS.get(batch, reps))):
        sw.mark_box()
        for phase, length in phases.items():
            group = next(groups)
            with sw.time(phase):
                sampled = generate(group, length, 0)
            check(sampled, batch, length, logps=False)
            ids = ids or sampled[0]
    return {phase: batch * length for phase, length in phases.items()}, ids


def smollm2_batches(
    sw: pc.Stopwatch, args: argparse.Namespace, make: Callable[[int], Generate]
) -> tuple[dict[str, int], dict[str, dict[str, list[Ids]]]]:
    """``smollm2`` for every batch of ``args``; ``make(batch)`` gives its generate. Also the greedy ids by batch, for the report."""
    rows: list[Ids] = json.loads(args.prompts.read_text())
    phases, greedy = dict[str, int](), dict[str, list[Ids]]()
    for batch in args.batches:
        found, greedy[str(batch)] = smollm2(sw, make(batch), rows, batch, args.reps)
        phases |= found
    return phases, {"greedy": greedy}


@dataclasses.dataclass(frozen=True)
class Llama:
    """Sizes that decide what a decode step costs."""

    weights: int  # entries of all matrices a token passes through, the output head included
    layers: int
    heads: int
    kv_heads: int
    head_dim: int

    def decode_flops(self, batch: int, cached: float) -> float:
        """Multiplications and additions of one step of ``batch`` rows that each look at ``cached`` tokens."""
        return batch * (2 * self.weights + 4 * self.layers * self.heads * self.head_dim * cached)

    def decode_bytes(self, batch: int, cached: float, width: int = 4) -> float:
        """Bytes read by one step: every weight once, and the keys and values of the tokens looked at."""
        return width * (self.weights + batch * cached * self.layers * 2 * self.kv_heads * self.head_dim)

    def decode_floor_s(self, batch: int, cached: float, flops_per_s: float, bytes_per_s: float) -> float:
        """The least seconds of a step: arithmetic or memory, whichever takes longer."""
        return max(self.decode_flops(batch, cached) / flops_per_s, self.decode_bytes(batch, cached) / bytes_per_s)


SMOLLM2 = Llama(weights=30 * (2 * 576 * 576 + 2 * 576 * 192 + 3 * 576 * 1536) + 49_152 * 576, layers=30, heads=9, kv_heads=3, head_dim=64)
SMOLLM2_CACHED = SMOLLM2_PROMPT + (SHORT + LONG) / 2  # tokens looked at by the mean step between the two lengths


def report(program: str, versions: dict[str, str], w: pc.Workload, sw: pc.Stopwatch, phases: dict[str, int], extra: dict[str, Any]) -> None:
    """Prints the report of this process and writes it to $PEER_OUT."""
    pc.report(program, versions, w, sw, phases, extra, skip=0)


def history(previous: Sequence[Ids], *more: Sequence[Ids]) -> list[Ids]:
    """Every conversation with what it read or said next."""
    return [[*old, *(i for part in parts for i in part)] for old, *parts in zip(previous, *more, strict=True)]


def one_thread() -> int:
    """Cores this process may use; the programs are pinned to one."""
    return len(os.sched_getaffinity(0))
