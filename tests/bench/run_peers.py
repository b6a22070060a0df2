"""Our step and the peers', interleaved in one run on one core; the last line is one JSON object (``crl_jax.telemetry.result``).

Usage:  python tests/bench/run_peers.py --peers FOLDER [--rounds 3] [--steps 6] [--beta 0] [--out result.json]

FOLDER holds the peers' environments, made once:
    python3.12 -m venv venv-tunix && venv-tunix/bin/pip install google-tunix==0.1.7
    python3.11 -m venv venv-trl && venv-trl/bin/pip install torch==2.13.0 && venv-trl/bin/pip install trl==1.16.0 transformers==5.24.0

Each round runs each program once in a new process pinned to ``--core``. Other load only ever adds CPU seconds, so the best repetition over
all rounds is compared; medians are reported too. Ours starts with an empty compile cache in the first round and finds it filled later. The
value is TRL's best whole step over ours; the details hold every goal and whether it was met.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE)]

import bench_step  # noqa: E402  (its goals; imports no framework)

RATIO_GOALS = {"trl": 1.6, "tunix": 2.0}


def commands(args: argparse.Namespace) -> dict[str, list[str]]:
    """Name -> command. Raises SystemExit naming the missing environment."""
    ours = [sys.executable, str(HERE / "bench_step.py"), "--measure", "--steps", str(args.steps), "--batching"]
    found = {"crl_jax": [*ours, "prefix"], "crl_jax_padded": [*ours, "padded"]}
    for peer in RATIO_GOALS:
        python = args.peers / f"venv-{peer}" / "bin" / "python"
        if not python.exists():
            raise SystemExit(f"{python} is missing: make it with the lines in this file's docstring (python {__file__} --help)")
        found[peer] = [str(python), str(HERE / "peers" / f"bench_{peer}.py"), "--steps", str(args.steps), "--beta", str(args.beta)]
    return found


def run(name: str, command: list[str], args: argparse.Namespace, folder: pathlib.Path, number: int) -> dict[str, Any]:
    """The report of one process pinned to one core."""
    out = folder / f"{name}-{number}.json"
    env = os.environ | {"PEER_OUT": str(out), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu"}
    if name.startswith("crl_jax"):
        env |= bench_step.compile_cache(folder / f"cache-{name}")
    log = folder / f"{name}-{number}.log"
    with log.open("w") as sink:
        done = subprocess.run(["taskset", "-c", str(args.core), *command], env=env, stdout=sink, stderr=sink, timeout=3600)
    if done.returncode:
        raise SystemExit(f"{name} failed: see {log}")
    print(f"round {number} {name}: update {json.loads(out.read_text())['phases']['update']['min_cpu_s']} CPU s", flush=True)
    return json.loads(out.read_text())


def summary(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """Best and median over rounds of what is compared."""
    row: dict[str, Any] = {"peak_rss_mb": max(r["peak_rss_mb"] for r in reports), "versions": reports[0]["versions"]}
    for phase in ("update", "step_total", "rollout_total"):
        best = min(r["phases"][phase]["min_cpu_s"] for r in reports)
        row[phase] = {"best_cpu_s": best, "median_cpu_s": statistics.median(r["phases"][phase]["median_cpu_s"] for r in reports)}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=pathlib.Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--beta", type=float, default=0.0)
    parser.add_argument("--core", type=int, default=0)
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("runs/peers"), help="reports and logs of every process")
    parser.add_argument("--out", type=pathlib.Path, default=None)
    args = parser.parse_args()
    from crl_jax.telemetry.result import Result, emit

    args.folder.mkdir(parents=True, exist_ok=True)
    reports: dict[str, list[dict[str, Any]]] = {}
    for number in range(args.rounds):
        for name, command in commands(args).items():
            reports.setdefault(name, []).append(run(name, command, args, args.folder, number))
    found = {name: summary(rows) for name, rows in reports.items()}
    ratios = {
        f"{peer}_over_{ours}": {
            phase: {kind: round(found[peer][phase][kind] / found[ours][phase][kind], 3) for kind in found[ours][phase]}
            for phase in ("update", "step_total")
        }
        for peer in RATIO_GOALS
        for ours in ("crl_jax", "crl_jax_padded")
    }
    ours, first = found["crl_jax"], [r["first_step_cpu_s"] for r in reports["crl_jax"]]
    measured = {
        "trl_over_ours_step": (ratios["trl_over_crl_jax"]["step_total"]["best_cpu_s"], ">=", RATIO_GOALS["trl"]),
        "tunix_over_ours_step": (ratios["tunix_over_crl_jax"]["step_total"]["best_cpu_s"], ">=", RATIO_GOALS["tunix"]),
        "trl_over_ours_update": (ratios["trl_over_crl_jax"]["update"]["best_cpu_s"], ">=", RATIO_GOALS["trl"]),
        "tunix_over_ours_update": (ratios["tunix_over_crl_jax"]["update"]["best_cpu_s"], ">=", RATIO_GOALS["tunix"]),
        "update_cpu_s": (ours["update"]["best_cpu_s"], "<=", bench_step.UPDATE_GOAL_S),
        "step_cpu_s": (ours["step_total"]["best_cpu_s"], "<=", bench_step.STEP_GOAL_S),
        "first_step_cold_cpu_s": (first[0], "<=", bench_step.COLD_GOAL_S),
        "first_step_cached_cpu_s": (min(first[1:], default=first[0]), "<=", bench_step.WARM_GOAL_S),
        "peak_rss_mb": (ours["peak_rss_mb"], "<=", bench_step.RSS_GOAL_MB),
    }
    goals = {
        name: {"value": value, "goal": f"{sign} {goal}", "pass": value >= goal if sign == ">=" else value <= goal}
        for name, (value, sign, goal) in measured.items()
    }
    good = goals["trl_over_ours_step"]["pass"] and goals["tunix_over_ours_step"]["pass"]
    goal = ", ".join(f"{peer} >= {goal}" for peer, goal in RATIO_GOALS.items())
    details = {"goals": goals, "ratios": ratios, "programs": found, "rounds": args.rounds, "steps": args.steps, "beta": args.beta}
    value = goals["trl_over_ours_step"]["value"]
    emit(Result("bench_step_peers", value, "x (TRL's GRPO step / ours, best CPU s)", goal, good, details=details), args.out)


if __name__ == "__main__":
    main()
