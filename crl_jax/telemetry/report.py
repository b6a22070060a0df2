"""The table at the end of a run, made from its JSONL files alone.

Owns: which metrics are summarised and how. Promises: it can be made again later from the files (``crl report``), also for a run that was
killed; of a step that was run twice (resume) the later row counts. Does not: read checkpoints or the bank.

Metric names it reads: ``success/guided``, ``success/free``, ``bank/size``, ``extractor/version`` (its number of updates), ``step_s``,
``eval/<set>/<with|without>/<greedy|sampled>``, and those of time (``wall_time``) and memory. All but the first two may be missing.
"""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
import re
import sys
from collections.abc import Sequence
from typing import Any

import yaml

from crl_jax.telemetry.processes import PROCESSES
from crl_jax.telemetry.result import Result, emit
from crl_jax.telemetry.tracker import MetricsError, read_jsonl
from crl_jax.telemetry.wall_time import WallTime, show, wall_time

Row = dict[str, Any]
_EVAL = re.compile(r"eval/(?P<tasks>[^/]+)/(?P<kind>with|without)/(?P<mode>[^/]+)")


@dataclasses.dataclass(frozen=True)
class Bucket:
    """A stretch of training: steps [first, last], and what was typical in it (None: nothing logged)."""

    first: int
    last: int
    guided: float | None  # mean over the steps' success rates
    free: float | None
    bank_size: float | None  # at the end of the stretch
    extractor_updates: float | None  # so far
    step_s: float | None  # mean


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """One task set evaluated one way after ``step`` steps: success rates with and without experience (None: not evaluated)."""

    tasks: str  # name of the task set
    mode: str  # greedy or sampled
    step: int
    with_exp: float | None
    without_exp: float | None


@dataclasses.dataclass(frozen=True)
class Report:
    """A run in numbers."""

    name: str
    seed: int | None
    steps: int
    buckets: tuple[Bucket, ...]
    evaluations: tuple[Evaluation, ...]  # by task set and mode, then by step
    time: WallTime | None = None  # where the wall time went
    peak_rss_gib: float | None = None  # largest resident memory of the main process
    peak_device_gib: float | None = None  # largest memory in use on a device, where devices report it

    def to_json(self) -> dict[str, Any]:
        """As a plain object."""
        return dataclasses.asdict(self)


def make_report(metrics_file: pathlib.Path, *, name: str, seed: int | None = None, buckets: int = 6) -> Report:
    """Summarises a metrics file. Raises FileNotFoundError, or MetricsError when no step was logged."""
    by_step: dict[int, Row] = {}
    for row in read_jsonl(metrics_file):
        if row.get("kind") == "metrics" and "step" in row:
            by_step.setdefault(int(row["step"]), {}).update(row)
    if not by_step:
        raise MetricsError(f"{metrics_file} holds no step yet: wait for the first one, or see what the run printed")
    rows = [by_step[step] for step in sorted(by_step)]
    training = [r for r in rows if "success/guided" in r or "success/free" in r]
    parts = tuple(_bucket(part) for part in _split(training, buckets))
    events = metrics_file.with_name(PROCESSES)
    time = wall_time(rows, read_jsonl(events) if events.exists() else ())
    memory = (_last(rows, "host/peak_rss_gib"), _last(rows, "device/peak_gib"))
    return Report(name, seed, len(training), parts, _evaluations(rows), time, *memory)


def show_report(report: Report) -> str:
    """The table as text."""
    lines = [f"run {report.name}" + (f"  seed {report.seed}" if report.seed is not None else "") + f"  {report.steps} steps", ""]
    lines.append("  steps       guided   free   bank   extractor updates   s/step")
    for b in report.buckets:
        lines.append(
            f"  {f'{b.first}-{b.last}':<9} {_n(b.guided, '.3f', 8)} {_n(b.free, '.3f', 6)} {_n(b.bank_size, '.0f', 6)}"
            f" {_n(b.extractor_updates, '.0f', 19)} {_n(b.step_s, '.2f', 8)}"
        )
    if report.time is not None and report.time.phases:
        lines += ["", *show(report.time)]
    peaks = {"of the process": report.peak_rss_gib, "of a device": report.peak_device_gib}
    if known := [f"{peak:.1f} GiB {whose}" for whose, peak in peaks.items() if peak is not None]:
        lines += ["", f"  peak memory {', '.join(known)}"]
    for (tasks, mode), group in itertools.groupby(report.evaluations, key=lambda e: (e.tasks, e.mode)):
        rows = list(group)
        start = rows[0]
        lines += [
            "",
            f"  evaluation {tasks}, {mode}",
            f"                 with exp.         without exp.   (change against step {start.step})",
        ]
        for e in rows:
            shown = f"{_n(e.with_exp, '.3f', 6)} {_change(e.with_exp, start.with_exp)}"
            lines.append(f"  step {e.step:<6} {shown}   {_n(e.without_exp, '.3f', 6)} {_change(e.without_exp, start.without_exp)}".rstrip())
    return "\n".join(lines)


def _evaluations(rows: Sequence[Row]) -> tuple[Evaluation, ...]:
    found: dict[tuple[str, str, int], dict[str, float]] = {}
    for row in rows:
        for key, value in row.items():
            if match := _EVAL.fullmatch(key):
                found.setdefault((match["tasks"], match["mode"], int(row["step"])), {})[match["kind"]] = float(value)
    return tuple(Evaluation(*key, kinds.get("with"), kinds.get("without")) for key, kinds in sorted(found.items()))


def _split(rows: Sequence[Row], parts: int) -> list[Sequence[Row]]:
    """Consecutive parts whose sizes differ by at most one; fewer parts when there are fewer rows."""
    parts = min(parts, len(rows))
    edges = [len(rows) * i // parts for i in range(parts + 1)] if parts else [0]
    return [rows[a:b] for a, b in itertools.pairwise(edges)]


def _bucket(rows: Sequence[Row]) -> Bucket:
    return Bucket(
        first=int(rows[0]["step"]),
        last=int(rows[-1]["step"]),
        guided=_mean(rows, "success/guided"),
        free=_mean(rows, "success/free"),
        bank_size=_last(rows, "bank/size"),
        extractor_updates=_last(rows, "extractor/version"),
        step_s=_mean(rows, "step_s"),
    )


def _mean(rows: Sequence[Row], key: str) -> float | None:
    values = [float(r[key]) for r in rows if key in r]
    return sum(values) / len(values) if values else None


def _last(rows: Sequence[Row], key: str) -> float | None:
    values = [float(r[key]) for r in rows if key in r]
    return values[-1] if values else None


def _n(value: float | None, form: str, width: int) -> str:
    return ("-" if value is None else format(value, form)).rjust(width)


def _change(value: float | None, start: float | None) -> str:
    return " " * 8 if value is None or start is None else f"({value - start:+.3f})"


def print_report(folder: pathlib.Path, *, json_path: pathlib.Path | None = None) -> int:
    """Prints the table and, last, the result object of the run in ``folder``; returns an exit code (1: there is nothing to report).

    The seed is read from ``folder/config.yaml``, if any.
    """
    metrics = folder / "metrics.jsonl"
    if not metrics.exists():
        print(f"{metrics} does not exist: give the folder of a run, e.g. runs/quickstart", file=sys.stderr)
        return 1
    report = make_report(metrics, name=folder.name, seed=_seed(folder / "config.yaml"))
    print(show_report(report))
    emit(_result(report), json_path)
    return 0


def _result(report: Report) -> Result:
    """The gain over step 0 in success (known tasks, with experience, sampled) if it was evaluated; else the success of the last stretch."""
    curve = [e.with_exp for e in report.evaluations if (e.tasks, e.mode) == ("known", "sampled") and e.with_exp is not None]
    if len(curve) >= 2:
        gain = curve[-1] - curve[0]
        return Result("success_gain_known_with_experience", gain, "success rate", "> 0.1", gain > 0.1, details=report.to_json())
    value = report.buckets[-1].guided if report.buckets else None
    return Result("success_guided_last_bucket", value, "share", details=report.to_json())


def _seed(config_file: pathlib.Path) -> int | None:
    try:
        return int(yaml.safe_load(config_file.read_text(encoding="utf-8"))["run"]["seed"])
    except (OSError, yaml.YAMLError, KeyError, TypeError, ValueError):  # a report needs the metrics alone
        return None
