"""Where the time of a run went, what waited for what, and goodput.

Owns: the sums and their words. Promises: made from the rows of ``metrics.jsonl`` and ``processes.jsonl`` alone; the parts of the wall time
add up to it; what a run did not measure is left out. Does not: read files (``report``).

Wall time runs from the first process's beginning to the last one's end, pauses between processes included. Goodput is the share of it spent
on steps that count: those whose row was not made again by a later process, without opening, restoring and beginning or writing profiler
traces (phases ``start``, ``restore``, ``profile``).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

Row = dict[str, Any]

_APART = ("start", "restore", "profile")
_MEANS = {
    "collect": "waited for episodes",
    "bank": "waited for the bank: usage and credit (sync: and for its lessons)",
    "actor_step": "trained the actor and published it",
    "extractor_step": "looked at the extractor (sync, and before a checkpoint: waited for it)",
    "evaluate": "evaluated",
    "checkpoint": "copied a checkpoint, or waited for the one before",
    "start": "opened the run",
    "restore": "restored a checkpoint",
    "profile": "began or wrote a profiler trace",
    "other": "the rest: measuring, writing metrics",
}


@dataclasses.dataclass(frozen=True)
class Wall:
    """The wall time of all processes of a run, seconds. ``apart``: opening, restoring, profiling; ``twice``: steps that were taken again
    after a resume; ``rest``: between processes, ending, and what was cut off in the middle of a step."""

    processes: int
    killed: int  # processes that left no word of their end; the last one may still be running
    total_s: float
    counted_s: float
    apart_s: float
    twice_s: float
    twice_steps: int
    rest_s: float
    goodput: float  # counted_s / total_s


@dataclasses.dataclass(frozen=True)
class Part:
    """Seconds of something beside the learner's thread. ``share`` of the counted steps' time, None where that says nothing; ``note``: who
    waited for it."""

    name: str
    seconds: float
    share: float | None
    note: str = ""


@dataclasses.dataclass(frozen=True)
class WallTime:
    """``phases``: the learner's thread, seconds by phase of the steps that count; ``beside``: the others."""

    wall: Wall | None  # None: no file of processes
    phases: dict[str, float]
    beside: tuple[Part, ...]


def wall_time(rows: Sequence[Row], events: Sequence[Row]) -> WallTime:
    """``rows``: one of metrics per step that counts, in order; ``events``: those of ``processes.jsonl``, in order."""
    phases = _phases(rows)
    apart_s = sum(phases.get(name, 0.0) for name in _APART)
    return WallTime(_wall(events, apart_s), phases, tuple(_beside(rows, sum(phases.values()))))


def show(found: WallTime) -> list[str]:
    """The tables as lines of text."""
    lines: list[str] = []
    if found.wall is not None:
        w = found.wall
        restarts = f"{w.processes - 1} restart{'' if w.processes == 2 else 's'}"
        killed = f" ({w.killed} without a word of the end: killed, or still running)" if w.killed else ""
        lines += [f"  wall time {w.total_s:.0f} s, {restarts}{killed}; goodput {100 * w.goodput:.1f} %"]
        lines += [
            _line(name, seconds, seconds / w.total_s if w.total_s > 0 else None, note)
            for name, seconds, note in (
                ("steps that count", w.counted_s, ""),
                ("opening, profiling", w.apart_s, "in steps that count: opened, restored, wrote profiler traces"),
                ("done twice", w.twice_s, f"{w.twice_steps} steps were taken again"),
                ("rest", w.rest_s, "between processes, imports, ending, steps cut off"),
            )
        ]
    total = sum(found.phases.values())
    lines += ["", f"  the learner's thread, {total:.0f} s in steps that count"] if lines else [f"  the learner's thread, {total:.0f} s"]
    lines += [_line(name, s, s / total if total else None, _MEANS.get(name, "")) for name, s in found.phases.items()]
    if found.beside:
        lines += ["", "  beside it"]
        lines += [_line(part.name, part.seconds, part.share, part.note) for part in found.beside]
    return lines


def _line(name: str, seconds: float, share: float | None, note: str) -> str:
    shown = "       " if share is None else f"{100 * share:>5.1f} %"
    return f"  {name:<22}{seconds:>9.1f} s  {shown}  {note}".rstrip()


def _phases(rows: Iterable[Row]) -> dict[str, float]:
    """Seconds by phase over all rows, the longest first."""
    total: dict[str, float] = {}
    for row in rows:
        for key, value in row.items():
            if key.startswith("phase_s/"):
                total[key.removeprefix("phase_s/")] = total.get(key.removeprefix("phase_s/"), 0.0) + float(value)
    return {name: round(seconds, 2) for name, seconds in sorted(total.items(), key=lambda item: -item[1])}


def _wall(events: Sequence[Row], apart_s: float) -> Wall | None:
    if not events:
        return None
    taken: dict[int, float] = {}  # step -> its seconds, as it was taken last
    twice_s, twice_steps = 0.0, 0
    for event in events:
        if event["event"] == "resume":
            again = [step for step in taken if step > event["step"]]
            twice_s, twice_steps = twice_s + sum(taken.pop(step) for step in again), twice_steps + len(again)
        elif event["event"] == "step":
            taken[int(event["step"])] = float(event["step_s"])
    kinds = [event["event"] for event in events]
    total = max(event["at_s"] for event in events) - min(event["at_s"] for event in events)
    stepped, processes = sum(taken.values()), kinds.count("begin")
    return Wall(
        processes=processes,
        killed=processes - kinds.count("end"),
        total_s=round(total, 2),
        counted_s=round(stepped - apart_s, 2),
        apart_s=round(apart_s, 2),
        twice_s=round(twice_s, 2),
        twice_steps=twice_steps,
        rest_s=round(total - stepped - twice_s, 2),
        goodput=round((stepped - apart_s) / total, 4) if total > 0 else 0.0,
    )


def _beside(rows: Sequence[Row], total: float) -> Iterable[Part]:
    def sums(key: str) -> float | None:
        return sum(float(row[key]) for row in rows if key in row) if any(key in row for row in rows) else None

    def part(name: str, seconds: float | None, note: str = "") -> Iterable[Part]:
        if seconds is not None:
            yield Part(name, round(seconds, 2), round(seconds / total, 4) if total else None, note)

    yield from part("rollouts under way", sums("rollout/collect_s"), "more than 100 %: several at a time")
    for role in ("actor", "extractor"):
        waited = _grown(rows, f"serve/{role}/queue_wait_s")
        note = "" if waited is None else f"its requests waited {waited:.1f} s for a slot (sum over requests)"
        yield from part(f"{role}'s sampler busy", _grown(rows, f"serve/{role}/busy_s"), note)
    yield from part("extractor's updates", sums("extractor/busy_s"))
    yield from part("environments busy", _grown(rows, "env/busy_s"), "sum over their workers")
    searched = _grown(rows, "bank/search_latency_s")
    yield from part("searches of the bank", searched, "waits of all queries together")
    for role in ("actor", "extractor"):
        yield from part(f"publishing the {role}", _published(rows, role))
    waits = [
        f"{word} {seconds:.1f} s"
        for word, key in (("waited", "wait_s"), ("copied", "copy_s"))
        if (seconds := _grown(rows, f"checkpoint/{key}"))
    ]
    yield from part("writing checkpoints", _grown(rows, "checkpoint/write_s"), f"the learner {' and '.join(waits)}" if waits else "")


def _grown(rows: Sequence[Row], key: str) -> float | None:
    """By how much a counter grew over the rows; one that is smaller than in the row before began again at 0, with another process."""
    values = [float(row[key]) for row in rows if key in row]
    if not values:
        return None
    return values[0] + sum(new - old if new >= old else new for old, new in itertools.pairwise(values))


def _published(rows: Sequence[Row], role: str) -> float | None:
    """Seconds of all publishes; a row has those of the newest one."""
    newest = {row[f"publish/{role}/version"]: float(row[f"publish/{role}/seconds"]) for row in rows if f"publish/{role}/seconds" in row}
    return sum(newest.values()) if newest else None
