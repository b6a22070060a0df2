"""The same training asynchronously and synchronously, on the same box; the last line is one JSON object.

Usage:  python tests/bench/async_vs_sync.py [--minutes 12] [--measured 6] [--wait-s 0.233] [--out docs/results/async_vs_sync.json]

One recipe (the quickstart's, with fewer steps) is trained in pairs, once with ``run.sync=true`` and once with ``run.sync=false
run.max_lag=1``: the same tasks, seeds and number of steps, each in a process of its own, one after the other, the order within a pair
changing from pair to pair. As many pairs are run as fit the minutes, each with a seed of its own. Two workloads take turns:

    waiting  every reset and step of an environment takes ``--wait-s`` longer (log-normal, sd = mean, see ``waiting_envs``): a game on this
             box answers in 0.4 ms, a web page or a test run does not. The mean is what a step of this project's repair tasks takes
             (docs/results/envs_speed.json, swe: 4.3 steps per second), whose steps also spread as widely as their mean.
    as_is    the recipe as it is: everything computes, on the same cores, so little can overlap.

What is claimed of asynchrony (no blocking latency; 30 % less wall time) is about time spent waiting: for environments, the slowest episode
of a batch, distillations, the extractor's update. So ``value`` is the ratio of the workload ``waiting``; that of ``as_is`` is beside it.

Compared are the seconds of the measured steps. The first ``SKIP`` steps are not measured (programs are traced and loaded there, from a
cache that a run before has filled), nor the last, during which nothing is collected. An asynchronous run may leave distillations behind, so
each episode by which its queue grew in the measured steps is charged with what an episode's distillation takes in the synchronous run.
Whole processes, from start to end, are reported too. Intervals: Student-t over pairs, 95 %, of the logarithm for ratios.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from async_rows import Pair, Trained, read_run, workload_summary
from timed_process import run_timed
from waiting_envs import VARIABLE

from crl_jax.telemetry.result import Result, emit

HERE = pathlib.Path(__file__).resolve().parent
GOAL = 0.7
SKIP = 5
MODES = {"sync": ("run.sync=true", "run.max_lag=0"), "async": ("run.sync=false", "run.max_lag=1")}
TURNS = ("waiting", "as_is", "waiting", "waiting")  # again and again
RECIPE = HERE.parents[1] / "configs" / "quickstart.yaml"


def train(mode: str, seed: int, wait_s: float, args: argparse.Namespace, folder: pathlib.Path, *, steps: int) -> Trained:
    """One run in a process of its own. Raises SystemExit naming its log when it fails."""
    name = f"{'waiting' if wait_s else 'as_is'}-{mode}-s{seed}-{steps}"
    settings = [f"run.dir={folder}", f"run.name={name}", f"run.seed={seed}", f"run.steps={steps}", "run.save_every=0", *MODES[mode]]
    settings += ["run.eval_every=0", "run.eval_modes=[sampled]", f"run.eval_episodes={args.episodes}", "telemetry.text_every=0"]
    command = [sys.executable, str(HERE / "waiting_envs.py"), str(RECIPE), *settings, *args.set]
    metrics, log = folder / name / "metrics.jsonl", folder / f"{name}.log"
    timed = run_timed(command, {VARIABLE: str(wait_s), "JAX_PLATFORMS": "cpu"}, log=log, rows=metrics)
    if timed.code:
        raise SystemExit(f"{name} ended with exit code {timed.code}: see {log}")
    timing: dict[str, Any] = {"process_s": timed.wall_s, "cpu_s": timed.cpu_s, "evaluated": args.episodes}
    return read_run(metrics, mode, seed, first=SKIP + 1, last=steps - 1, **timing)


def pairs(args: argparse.Namespace, folder: pathlib.Path) -> Iterator[tuple[str, Pair]]:
    """Pairs of both workloads in turn, until another like the longest so far would not end in time."""
    end = time.monotonic() + 60 * args.minutes
    steps, longest_s, seeds = SKIP + args.measured + 1, 0.0, dict.fromkeys(TURNS, 0)
    train("async", 0, 0.0, args, folder, steps=SKIP + 3)  # fills the compile cache
    number = 0
    while number < len(set(TURNS)) or time.monotonic() + longest_s < end:  # both at least once
        started, workload = time.monotonic(), TURNS[number % len(TURNS)]
        seed, seeds[workload] = seeds[workload], seeds[workload] + 1
        found: dict[str, Trained] = {}
        for mode in ("sync", "async") if number % 2 == 0 else ("async", "sync"):
            wait_s = args.wait_s if workload == "waiting" else 0.0
            found[mode] = train(mode, seed, wait_s, args, folder, steps=steps)
        pair = Pair(found["sync"], found["async"])
        both = f"sync {pair.sync.step_s:.2f} s, async {pair.other.step_s:.2f} s a step"
        print(f"{workload} seed {seed}: {both}, ratio {pair.ratio:.3f}", flush=True)
        yield workload, pair
        longest_s, number = max(longest_s, time.monotonic() - started), number + 1


def result(found: dict[str, list[Pair]], args: argparse.Namespace) -> Result:
    """The object that is printed: the value is of the workload ``waiting``."""
    tables = {workload: workload_summary(of, GOAL) for workload, of in found.items() if of}
    main = tables["waiting"]
    details: dict[str, Any] = {
        "value_is_of": "waiting",
        "wait_s": {"mean": args.wait_s, "sd": args.wait_s, "law": "log-normal", "mean_of": "a step of swe in docs/results/envs_speed.json"},
        "steps": {"not_measured": SKIP, "measured": args.measured, "after": 1},
        "max_lag": 1,
        "recipe": f"configs/{RECIPE.name}",
        **tables,
    }
    passed = main["ratio"] <= GOAL and main["same_success"]
    return Result("async_vs_sync.wall_time", main["ratio"], "x", f"<= {GOAL}, same final success", passed, details=details)


def main() -> int:
    """Train, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=12.0)
    parser.add_argument("--measured", type=int, default=6, help="steps")
    parser.add_argument("--wait-s", type=float, default=0.233, help="mean wait of a reset or step")
    parser.add_argument("--episodes", type=int, default=36, help="of each set of the evaluation")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of both sides")
    parser.add_argument("--keep", type=pathlib.Path, help="folder for runs and logs, which is kept")
    parser.add_argument("--out", type=pathlib.Path)
    args = parser.parse_args()
    found: dict[str, list[Pair]] = {workload: [] for workload in TURNS}
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.keep or pathlib.Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        for workload, pair in pairs(args, folder):
            found[workload].append(pair)
            (folder / "pairs.jsonl").open("a").write(json.dumps({"workload": workload, **pair.to_json()}) + "\n")
    emit(result(found, args), args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
