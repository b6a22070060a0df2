"""What ``async_vs_sync`` makes of the rows of metrics of its runs.

Owns: which seconds count, what is charged for distillations left behind, ratios and intervals. Promises: pure. Does not: run anything.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from envs_success import wilson

from crl_jax.study import interval
from crl_jax.telemetry.tracker import read_jsonl

NOT_TRAINING = ("evaluate", "checkpoint")
WORK = ("env_steps", "bank/submitted", "bank/generations_distil", "bank/entries_written", "extractor/updates")
SETS = ("known/with", "known/without", "heldout/with", "heldout/without")


@dataclasses.dataclass(frozen=True)
class Trained:
    """The measured steps of one run."""

    mode: str
    seed: int
    steps: int
    seconds: float  # of training in the measured steps
    phase_s: dict[str, float]  # the same by phase, each step's mean
    collect_s: float  # from a batch's start to its end, mean; it overlaps with the phases in an asynchronous run
    cpu_s: float | None  # of all its processes in the measured steps
    left_behind: float  # episodes by which the queue of distillations grew
    episodes: float  # handed to the bank
    work: dict[str, float]
    lag: float
    success: dict[str, float]  # of the measured steps, by half of the groups
    evaluation: dict[str, float]  # after the last step
    evaluated: int  # episodes of each
    process_s: float

    @property
    def step_s(self) -> float:
        """Seconds of one step."""
        return self.seconds / self.steps


@dataclasses.dataclass(frozen=True)
class Pair:
    """The same work both ways."""

    sync: Trained
    other: Trained

    @property
    def charged_s(self) -> float:
        """Seconds for the distillations that the asynchronous run left behind: what they take where nothing overlaps."""
        each_s = self.sync.phase_s.get("bank", 0.0) * self.sync.steps / max(1.0, self.sync.episodes)
        return max(0.0, self.other.left_behind - self.sync.left_behind) * each_s

    @property
    def ratio(self) -> float:
        """Asynchronous over synchronous seconds, the charge included."""
        return (self.other.seconds + self.charged_s) / self.sync.seconds

    def to_json(self) -> dict[str, Any]:
        """Both sides and what was made of them."""
        return {
            "ratio": self.ratio,
            "ratio_without_charge": self.other.seconds / self.sync.seconds,
            "charged_s": self.charged_s,
            "sync": dataclasses.asdict(self.sync),
            "async": dataclasses.asdict(self.other),
        }


def read_run(
    metrics: pathlib.Path,
    mode: str,
    seed: int,
    *,
    first: int,
    last: int,
    process_s: float,
    evaluated: int,
    cpu_s: Sequence[float] = (),
) -> Trained:
    """The run whose rows are in ``metrics``, measured from step ``first`` to ``last``. ``evaluated`` episodes are in each set of its
    evaluations; ``cpu_s`` has one number for each line of the file. Raises ValueError when rows are missing.
    """
    lines = list(read_jsonl(metrics))
    rows = {int(row["step"]): row for row in lines if "step_s" in row}
    if missing := [step for step in range(first - 1, last + 1) if step not in rows]:
        raise ValueError(f"{metrics} has no rows of steps {missing}: the run was too short, or ended early")
    measured, before, end = [rows[step] for step in range(first, last + 1)], rows[first - 1], rows[last]
    phases = sorted({key for row in measured for key in row if key.startswith("phase_s/")})
    mean = {key.removeprefix("phase_s/"): statistics.fmean(row.get(key, 0.0) for row in measured) for key in phases}
    training = {name: seconds for name, seconds in mean.items() if name not in NOT_TRAINING}
    evaluation = next((row for row in reversed(lines) if any(key.startswith("eval/") for key in row)), {})
    marks = {int(row["step"]): cpu for row, cpu in zip(lines, cpu_s, strict=False) if "step_s" in row}
    return Trained(
        mode=mode,
        seed=seed,
        steps=len(measured),
        seconds=len(measured) * sum(training.values()),
        phase_s=training,
        collect_s=statistics.fmean(row["rollout/collect_s"] for row in measured),
        cpu_s=marks[last] - marks[first - 1] if {last, first - 1} <= marks.keys() else None,
        left_behind=end.get("bank/pending", 0.0) - before.get("bank/pending", 0.0),
        episodes=end.get("bank/submitted", 0.0) - before.get("bank/submitted", 0.0),
        work={key: end.get(key, 0.0) - before.get(key, 0.0) for key in WORK},
        lag=statistics.fmean(row["lag/mean"] for row in measured),
        success={half: statistics.fmean(row[f"success/{half}"] for row in measured) for half in ("guided", "free")},
        evaluation={name: evaluation[f"eval/{name}/sampled"] for name in SETS if f"eval/{name}/sampled" in evaluation},
        evaluated=evaluated,
        process_s=process_s,
    )


def workload_summary(pairs: Sequence[Pair], goal: float) -> dict[str, Any]:
    """Ratios with intervals, where the time went, and success of both ways."""
    ratio, low, high = ratio_interval([pair.ratio for pair in pairs])
    bare = ratio_interval([pair.other.seconds / pair.sync.seconds for pair in pairs])
    whole = ratio_interval([pair.other.process_s / pair.sync.process_s for pair in pairs])
    success = compare_success(pairs)
    return {
        "ratio": ratio,
        "interval_95": [low, high],
        "goal_met": ratio <= goal,
        "ratio_without_charge": bare[0],
        "ratio_of_whole_processes": whole[0],
        "pairs": len(pairs),
        "same_success": all(row["same"] for row in success.values()),
        "success": success,
        "sync": side([pair.sync for pair in pairs]),
        "async": side([pair.other for pair in pairs]) | {"charged_s_per_step": _mean([p.charged_s / p.other.steps for p in pairs])},
        "ratios": [pair.ratio for pair in pairs],
    }


def side(runs: Sequence[Trained]) -> dict[str, Any]:
    """One way of training, the mean over runs."""
    cores = [run.cpu_s / run.seconds for run in runs if run.cpu_s is not None]
    return {
        "step_s": _mean([run.step_s for run in runs]),
        "phase_s": _means([run.phase_s for run in runs]),
        "collect_s": _mean([run.collect_s for run in runs]),
        "cores_busy": _mean(cores) if cores else None,
        "cpu_s_per_step": _mean([run.cpu_s / run.steps for run in runs if run.cpu_s is not None]) if cores else None,
        "left_behind_per_step": _mean([run.left_behind / run.steps for run in runs]),
        "work_per_step": _means([{key: value / run.steps for key, value in run.work.items()} for run in runs]),
        "lag": _mean([run.lag for run in runs]),
        "process_s": _mean([run.process_s for run in runs]),
    }


def ratio_interval(ratios: Sequence[float]) -> tuple[float, float, float]:
    """Geometric mean and its 95 % interval over pairs (nan for a single one)."""
    mean, half = interval([math.log(ratio) for ratio in ratios])
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half)


def compare_success(pairs: Sequence[Pair]) -> dict[str, Any]:
    """Final success of both ways by evaluation set, and success in the measured steps. ``same``: the interval of the paired difference
    holds 0; from a single pair, the two Wilson intervals overlap."""
    table: dict[str, Any] = {}
    for name in pairs[0].sync.evaluation:
        ours, theirs = ([side.evaluation[name] for side in sides] for sides in _sides(pairs))
        counts = [sum(side.evaluated for side in sides) for sides in _sides(pairs)]
        bounds = [wilson(round(_mean(rates) * n), n) for rates, n in zip((ours, theirs), counts, strict=True)]
        table[f"final {name}"] = _difference(ours, theirs) | {"sync_95": bounds[0], "async_95": bounds[1], "episodes": counts[0]}
        if len(pairs) == 1:
            table[f"final {name}"]["same"] = bounds[0][0] <= bounds[1][1] and bounds[1][0] <= bounds[0][1]
    for half in ("guided", "free"):
        ours, theirs = ([side.success[half] for side in sides] for sides in _sides(pairs))
        table[f"training {half}"] = _difference(ours, theirs)
    return table


def _difference(sync: Sequence[float], other: Sequence[float]) -> dict[str, Any]:
    mean, half = interval([b - a for a, b in zip(sync, other, strict=True)])
    return {"sync": _mean(sync), "async": _mean(other), "difference": mean, "half_width_95": half, "same": not abs(mean) > half}


def _sides(pairs: Sequence[Pair]) -> tuple[list[Trained], list[Trained]]:
    return [pair.sync for pair in pairs], [pair.other for pair in pairs]


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values)


def _means(tables: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {key: _mean([table.get(key, 0.0) for table in tables]) for key in sorted({key for table in tables for key in table})}
