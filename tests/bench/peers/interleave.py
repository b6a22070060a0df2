"""Programs of the serving benchmarks run in turns, each in a new process pinned to one core.

Owns: which environment and script stand for a program, and best and median over the rounds. Promises: one program computes at a time; other
load only ever adds CPU seconds, so the best repetition of all rounds is what is compared. Does not: know goals. Imports no framework.

An environment folder ``FOLDER`` for all peers is made once (llama.cpp is built from source, some 20 minutes of one core):
    cd FOLDER
    python3.12 -m venv venv-tunix && venv-tunix/bin/pip install google-tunix==0.1.7
    python3.11 -m venv venv-trl && venv-trl/bin/pip install torch==2.13.0 && venv-trl/bin/pip install transformers==5.24.0
    python3.11 -m venv venv-llama && venv-llama/bin/pip install llama-cpp-python==0.3.36 gguf==0.19.0
"""

from __future__ import annotations

import json
import os
import pathlib
import statistics
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
PROGRAMS = {
    "crl_jax": ("", "serve_ours.py"),
    "tunix": ("venv-tunix", "serve_tunix.py"),
    "transformers": ("venv-trl", "serve_transformers.py"),
    "llama": ("venv-llama", "serve_llama.py"),
}
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
Report = dict[str, Any]


def python(program: str, peers: pathlib.Path | None) -> str:
    """The interpreter of ``program``. Raises SystemExit naming the missing environment."""
    venv = PROGRAMS[program][0]
    if not venv:
        return sys.executable
    found = (peers or pathlib.Path("FOLDER")) / venv / "bin" / "python"
    if peers is None or not found.exists():
        raise SystemExit(f"{found} is missing: make it and name its folder with --peers, as\n{__doc__}\nor leave it out with --only")
    return str(found)


def run(
    program: str,
    arguments: Sequence[str],
    *,
    peers: pathlib.Path | None,
    folder: pathlib.Path,
    name: str,
    core: int,
    timeout_s: float = 1800,
) -> Report:
    """The report of one process. Its output goes to ``folder/name.log``."""
    out, log = folder / f"{name}.json", folder / f"{name}.log"
    cache = folder / f"compiled-{program}"
    env = (
        os.environ
        | ONE_THREAD
        | {"PEER_OUT": str(out.resolve()), "JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": str(cache.resolve())}
    )
    command = ["taskset", "-c", str(core), python(program, peers), str(HERE / PROGRAMS[program][1]), *arguments]
    with log.open("w") as sink:
        done = subprocess.run(command, env=env, stdout=sink, stderr=sink, timeout=timeout_s)
    if done.returncode:
        raise SystemExit(f"{program} failed: see {log}")
    report: Report = json.loads(out.read_text())
    print(f"{name}: " + ", ".join(f"{phase} {found['min_cpu_s']}" for phase, found in report["phases"].items()) + " CPU s", flush=True)
    return report


def phase(reports: Sequence[Report], name: str) -> dict[str, float]:
    """Best and median CPU seconds of a phase over rounds, and tokens per CPU second at its best."""
    rows = [report["phases"][name] for report in reports]
    best, median = min(row["min_cpu_s"] for row in rows), statistics.median(row["median_cpu_s"] for row in rows)
    return {"best_cpu_s": best, "median_cpu_s": round(median, 4), "tokens_per_cpu_s": max(row["tok_per_cpu_s"] for row in rows)}


def step_ms(reports: Sequence[Report], long: str, short: str, steps: int) -> dict[str, float]:
    """Milliseconds of CPU of one decode step: two rollouts that differ by ``steps`` tokens."""
    one, other = phase(reports, long), phase(reports, short)
    found = {kind: round(1e3 * (one[f"{kind}_cpu_s"] - other[f"{kind}_cpu_s"]) / steps, 3) for kind in ("best", "median")}
    if min(found.values()) <= 0:
        raise SystemExit(f"{long} took no longer than {short}: the machine is too busy to measure, or a program stopped early")
    return found


def conditions(reports: Sequence[Report]) -> dict[str, Any]:
    """What the machine was like: load, and the least seconds of a fixed Python loop; peak memory and versions of the program."""
    boxes = [report["box"] for report in reports]
    return {
        "load1": [min(b["load1_min"] for b in boxes), max(b["load1_max"] for b in boxes)],
        "python_loop_s": min(b["calib_min_s"] for b in boxes),
        "peak_rss_mb": max(report["peak_rss_mb"] for report in reports),
        "versions": reports[0]["versions"],
    }


def goals(measured: dict[str, tuple[float | None, str, float]]) -> dict[str, dict[str, Any]]:
    """name -> (value, ``>=``, ``<=`` or ``==``, goal), judged; a value that was not measured is left out."""
    judge = {">=": lambda value, goal: value >= goal, "<=": lambda value, goal: value <= goal, "==": lambda value, goal: value == goal}
    return {
        name: {"value": value, "goal": f"{sign} {goal}", "pass": judge[sign](value, goal)}
        for name, (value, sign, goal) in measured.items()
        if value is not None
    }


if __name__ == "__main__":
    print(__doc__)
