"""A study: several methods, several seeds, one table and one plot.

Owns: which runs a study is made of, running the missing ones, and the comparison. Promises: a finished run is never run again and a
broken one is resumed; methods are compared at equal numbers of environment steps; the intervals are Student-t over seeds (95 %), and
every number comes from the runs' own metrics files. Does not: choose hyper-parameters.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import math
import pathlib
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from crl_jax.config import ConfigError, load
from crl_jax.config.schema import Config
from crl_jax.errors import UserError
from crl_jax.telemetry.result import Result, emit
from crl_jax.telemetry.tracker import MetricsError, read_jsonl
from envs import registry

METHODS = ("complementary", "baseline", "static", "exp_only")
LINES = {  # line in the plot -> (method, evaluated with or without experience)
    "baseline": ("baseline", "without"),
    "static online, with experience": ("static", "with"),
    "static online, without": ("static", "without"),
    "experience only": ("exp_only", "with"),
    "complementary, with experience": ("complementary", "with"),
    "complementary, without": ("complementary", "without"),
}
T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}  # two-sided Student t for n seeds


class StudyError(UserError, RuntimeError):
    """Runs of the study failed; the message names their logs."""


@dataclasses.dataclass(frozen=True)
class Curve:
    """Evaluations of one run: environment steps taken before each, and the success rate."""

    env_steps: Float[np.ndarray, " n"]
    success: Float[np.ndarray, " n"]

    def area(self, until: float) -> float:
        """Mean success over environment steps 0 to ``until`` (area under the curve by trapezoids, divided by its width)."""
        inside = self.env_steps < until
        x = np.append(self.env_steps[inside], until)
        y = np.append(self.success[inside], np.interp(until, self.env_steps, self.success))
        return float(np.trapezoid(y, x) / until)


def interval(values: Sequence[float]) -> tuple[float, float]:
    """(mean, half width of the 95 % Student-t interval over the values); the half width is nan for a single value."""
    data = np.asarray(values, np.float64)
    if len(data) < 2:
        return float(data.mean()), float("nan")
    return float(data.mean()), float(T_95.get(len(data), 1.96) * data.std(ddof=1) / np.sqrt(len(data)))


def run_dir(config: Config) -> pathlib.Path:
    """Where the runs of a study lie."""
    return pathlib.Path(config.run.dir) / config.run.name


def run_missing(config_file: pathlib.Path, overrides: Sequence[str], methods: Sequence[str], seeds: Sequence[int], jobs: int) -> None:
    """Run or resume every (method, seed) that is not finished, ``jobs`` at a time, each in its own process.

    Raises ConfigError before the first one starts, StudyError at the end when some failed. Interrupted or terminated, it ends its runs.
    """
    config = load(config_file, overrides)
    folder = run_dir(config)
    settings = {(m, s): _settings(folder, overrides, m, s) for m in methods for s in seeds}
    for arguments in settings.values():
        load(config_file, arguments)
    running: set[subprocess.Popen[bytes]] = set()
    stopping = threading.Event()

    def one(method: str, seed: int) -> str:
        own = folder / f"{method}-s{seed}"
        if _finished(own, config.run.steps):
            return f"{own.name}: already finished"
        command = [sys.executable, "-m", "crl_jax.cli", "train", str(config_file), *settings[method, seed]]
        if (own / "metrics.jsonl").exists():
            command.append("--resume")
        own.mkdir(parents=True, exist_ok=True)
        with (own / "log.txt").open("a", encoding="utf-8") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
            running.add(process)
            if stopping.is_set():
                process.terminate()
            code = process.wait()
            running.discard(process)
        if code:
            raise StudyError(f"{own.name} ended with exit code {code}: see {own / 'log.txt'}")
        return f"{own.name}: done"

    failed: list[str] = []
    pool = concurrent.futures.ThreadPoolExecutor(jobs)
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        for done in concurrent.futures.as_completed([pool.submit(one, *run) for run in settings]):
            try:
                print(done.result(), flush=True)
            except StudyError as error:
                failed.append(str(error))
                print(error, flush=True)
    finally:
        signal.signal(signal.SIGTERM, before)
        stopping.set()
        pool.shutdown(wait=False, cancel_futures=True)
        for process in list(running):
            process.terminate()
        pool.shutdown()
    if failed:
        raise StudyError("\n".join([*failed, "mend the cause and start the study again: finished runs are kept, these are resumed"]))


def _settings(folder: pathlib.Path, overrides: Sequence[str], method: str, seed: int) -> list[str]:
    own = [f"run.dir={folder}", f"run.name={method}-s{seed}", f"run.method={method}", f"run.seed={seed}"]
    return [*overrides, *own, *(["ask.enabled=false"] if method == "baseline" else [])]


def read_curve(metrics_file: pathlib.Path, key: str) -> Curve:
    """The evaluations logged under ``key``. Raises MetricsError when there are fewer than two."""
    steps: dict[int, float] = {0: 0.0}
    found: dict[int, float] = {}
    for row in read_jsonl(metrics_file):
        if "env_steps" in row:
            steps[int(row["step"])] = float(row["env_steps"])
        if key in row:
            found[int(row["step"])] = float(row[key])
    at = sorted(step for step in found if step in steps)
    if len(at) < 2:
        raise MetricsError(
            f"{metrics_file} has {len(at)} evaluations of {key}: two or more are needed (run.eval_every, run.eval_modes, run.eval_episodes)"
        )
    return Curve(np.array([steps[s] for s in at]), np.array([found[s] for s in at]))


def compare(
    folder: pathlib.Path, methods: Sequence[str], seeds: Sequence[int], *, tasks: str = "known", mode: str = "sampled"
) -> dict[str, Any]:
    """Areas, final success and curves of every line with its interval, at equal environment steps."""
    curves = {
        line: {seed: read_curve(folder / f"{method}-s{seed}" / "metrics.jsonl", f"eval/{tasks}/{kind}/{mode}") for seed in seeds}
        for line, (method, kind) in LINES.items()
        if method in methods
    }
    until = min(curve.env_steps[-1] for by_seed in curves.values() for curve in by_seed.values())
    grid = np.linspace(0, until, 25)
    table: dict[str, Any] = {}
    for line, by_seed in curves.items():
        areas = {seed: curve.area(until) for seed, curve in by_seed.items()}
        values = np.stack([np.interp(grid, c.env_steps, c.success) for c in by_seed.values()])
        spread = [interval(column.tolist()) for column in values.T]
        table[line] = {
            "area": _mean_pm([*areas.values()]),
            "area_by_seed": areas,
            "final": _mean_pm([float(np.interp(until, c.env_steps, c.success)) for c in by_seed.values()]),
            "start": _mean_pm([float(c.success[0]) for c in by_seed.values()]),
            "curve": {"mean": [round(m, 4) for m, _ in spread], "half_width": [round(h, 4) for _, h in spread]},
        }
    return {"tasks": tasks, "mode": mode, "env_steps": until, "grid": [round(float(g)) for g in grid], "lines": table}


def plot(comparison: dict[str, Any], path: pathlib.Path) -> None:
    """Success over environment steps with 95 % intervals, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(10, 4.8), layout="constrained")
    for line, row in comparison["lines"].items():
        mean, half = np.array(row["curve"]["mean"]), np.array(row["curve"]["half_width"])
        dashed = line.endswith("without") and line != "baseline"
        (drawn,) = axes.plot(comparison["grid"], mean, label=f"{line}  (area {row['area'][0]:.3f})", linestyle="--" if dashed else "-")
        axes.fill_between(comparison["grid"], np.clip(mean - half, 0, 1), np.clip(mean + half, 0, 1), color=drawn.get_color(), alpha=0.12)
    axes.set(
        xlabel="environment steps",
        ylabel="success rate",
        ylim=(0, 1),
        title=f"dungeon family, {comparison['tasks']} dungeons, {comparison['mode']}",
    )
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main(
    config_file: pathlib.Path, overrides: Sequence[str], *, methods: Sequence[str], seeds: Sequence[int], jobs: int, out: pathlib.Path
) -> int:
    """``crl study``: run what is missing, compare, write ``out`` (JSON) and a plot beside it; returns the exit code."""
    config = load(config_file, overrides)
    _check(config, methods, seeds, jobs)
    run_missing(config_file, overrides, methods, seeds, jobs)
    family = config.env.family
    sets = ("known", "heldout") if family and registry.tasks(family, "heldout") else ("known",)
    tables = {tasks: compare(run_dir(config), methods, seeds, tasks=tasks) for tasks in sets}
    for tasks, table in tables.items():
        plot(table, out.with_name(f"{out.stem}_{tasks}.png"))
        print(f"\n{tasks} dungeons, up to {table['env_steps']:.0f} environment steps, seeds {list(seeds)}")
        for line, row in table["lines"].items():
            print(f"  {line:<34} area {_pm(row['area'])}   start {_pm(row['start'])}   final {_pm(row['final'])}")
    lines = tables["known"]["lines"]
    gain, half = math.nan, math.nan
    if "complementary" in methods and "baseline" in methods:
        ours, theirs = lines["complementary, with experience"]["area_by_seed"], lines["baseline"]["area_by_seed"]
        gain, half = interval([ours[s] - theirs[s] for s in seeds])
    details = {"seeds": list(seeds), "gain_half_width_95": half, **tables}
    emit(
        Result("study_micro_area_gain_over_baseline", gain, "success rate", "> 0", None if math.isnan(gain) else gain > 0, details=details),
        out,
    )
    return 0


def _check(config: Config, methods: Sequence[str], seeds: Sequence[int], jobs: int) -> None:
    """Raises ConfigError for what would only be noticed when all runs are done."""
    unknown = [method for method in methods if method not in METHODS]
    if unknown or not methods or not seeds or len({*methods}) < len(methods) or len({*seeds}) < len(seeds):
        raise ConfigError(f"methods {list(methods)}, seeds {list(seeds)}: name each once, methods of {', '.join(METHODS)}")
    if jobs < 1:
        raise ConfigError(f"--jobs {jobs}: use 1 or more")
    if "sampled" not in config.run.eval_modes or not config.run.eval_episodes or not config.telemetry.jsonl:
        raise ConfigError(
            "a study compares sampled evaluations: add sampled to run.eval_modes, set run.eval_episodes above 0 and telemetry.jsonl=true"
        )


def _finished(folder: pathlib.Path, steps: int) -> bool:
    metrics = folder / "metrics.jsonl"
    return metrics.exists() and any(row.get("step") == steps and "env_steps" in row for row in read_jsonl(metrics))


def _mean_pm(values: Sequence[float]) -> tuple[float, float]:
    mean, half = interval(values)
    return round(mean, 4), round(half, 4)


def _pm(pair: tuple[float, float]) -> str:
    return f"{pair[0]:.3f} ± {pair[1]:.3f}"
