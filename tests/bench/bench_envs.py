"""Environments: how fast they are, and how often scripted players succeed in them; the last line is one JSON object.

Usage:  crl envs bench speed   [FAMILY ...] [--seconds 3] [--at-once 64] [--workers 2] [--run runs/quickstart] [--out FILE.json]
        crl envs bench success [FAMILY ...] [--episodes 200] [--seconds 120] [--out FILE.json]

Each family is measured in processes of its own; one that is not installed is named and left out.

speed    steps and resets per CPU second of one environment (the first of its family, a random player, children's time included), memory for
         each further environment, and steps per second of wall time with many environments at once through the pool. The value is the
         share of a run's rollout time that its environments took: the workers' busy time over the time batches were collected, in steps
         without an evaluation. Goal: at most 0.1.
success  the success rate of every player in every environment with its 95 % Wilson interval; families of more than 40 environments in one
         row. The value is the rate of the weakest expert. Goal: 0.95 or more, or what the family's players give as ``expert_bound(task)``
         for tasks that cannot always be won, and the random player below the expert, wherever there is an expert.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from envs_speed import Speed, measure_speed, share_of_run
from envs_success import Row, measure_success

from crl_jax.telemetry.result import Result, emit
from envs import registry
from envs.api import EnvUnavailable

ROOT = pathlib.Path(__file__).resolve().parents[2]
SHARE_GOAL, FAMILY_TIMEOUT_S = 0.1, 3 * 3600.0


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("speed", "success"))
    parser.add_argument("families", nargs="*", metavar="FAMILY", help="default: all")
    parser.add_argument(
        "--seconds", type=float, default=None, help="speed: of each measurement; success: the most for one player in one row"
    )
    parser.add_argument("--at-once", type=int, default=64)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--run", type=pathlib.Path, default=ROOT / "runs" / "quickstart", help="the run whose environments' share is told")
    parser.add_argument("--episodes", type=int, default=200, help="of one player in one row")
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if unknown := set(args.families) - set(registry.families()):
        parser.error(f"no family {', '.join(sorted(unknown))}: use one of {', '.join(registry.families())}")
    args.seconds = args.seconds or (3.0 if args.what == "speed" else 120.0)
    if args.one:
        print(json.dumps(_one(args)))
        return 0
    found, missing = {}, {}
    for family in args.families or registry.families():
        answer = _child(family, args)
        (missing if "unavailable" in answer else found)[family] = answer.get("unavailable", answer)
        print(_shown(args.what, family, answer), flush=True)
    (_tell_speed if args.what == "speed" else _tell_success)(found, missing, args)
    return 0


def _one(args: argparse.Namespace) -> dict[str, Any]:
    """In a process of its own: one family."""
    (family,) = args.families
    try:
        if args.what == "speed":
            return measure_speed(family, args.seconds, args.at_once, args.workers)
        return {"rows": measure_success(family, args.episodes, args.seconds)}
    except EnvUnavailable as missing:
        return {"unavailable": str(missing)}


def _child(family: str, args: argparse.Namespace) -> dict[str, Any]:
    words = ["--seconds", args.seconds, "--at-once", args.at_once, "--workers", args.workers, "--episodes", args.episodes]
    command = [sys.executable, __file__, args.what, family, "--one", *map(str, words)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=FAMILY_TIMEOUT_S)
    if done.returncode:
        raise SystemExit(f"measuring {family} failed, see above")
    return json.loads(done.stdout.splitlines()[-1])


def _shown(what: str, family: str, answer: dict[str, Any]) -> str:
    if "unavailable" in answer:
        return f"not installed: {family} ({answer['unavailable']})"
    return Speed(**answer).shown() if what == "speed" else "\n".join(Row(**row).shown() for row in answer["rows"])


def _tell_speed(found: dict[str, Any], missing: dict[str, str], args: argparse.Namespace) -> None:
    run = share_of_run(args.run)
    share = run.get("share")
    if share is None:
        print(f"the share of a run's time is unknown: {run['unknown']}; train one (crl train configs/quickstart.yaml) or give --run")
    else:
        print(f"environments took {share:.1%} of the rollout time of {args.run.name}")
    details = {"families": found, "not_installed": missing, "run": run}
    unit, goal = "share of the run's rollout time that environments took", f"<= {SHARE_GOAL}"
    emit(Result("envs_speed", share, unit, goal, None if share is None else share <= SHARE_GOAL, details=details), args.out)


def _tell_success(found: dict[str, Any], missing: dict[str, str], args: argparse.Namespace) -> None:
    rows = [Row(**row) for answer in found.values() for row in answer["rows"]]
    judged = [row for row in rows if row.expert is not None]
    worst = min((row.expert for row in judged if row.expert is not None), default=None)
    failed = [row.env for row in judged if not row.passed]
    if failed:
        print(f"below the goal: {', '.join(failed)}")
    details = {"rows": [row.to_json() for row in rows], "not_installed": missing, "below_goal": failed}
    goal = ">= 0.95 (or the family's documented bound) for every expert, and random below it"
    emit(
        Result("envs_success", worst, "success rate of the weakest expert", goal, not failed if judged else None, details=details), args.out
    )


if __name__ == "__main__":
    sys.exit(main())
