"""Eight-turn conversations by our engine and the peers, interleaved on one core; the last line is one JSON object.

Usage:  python tests/bench/bench_serve_multiturn.py --peers FOLDER [--rounds 1] [--only crl_jax ...] [--out result.json]

32 conversations at once with a random Llama of 4 layers: in each of 8 turns everyone reads 64 new tokens and samples 64, so the last turn
ends at 1,024 tokens. Temperature 1, with log-probs. Ours keeps a session per conversation and is handed the new tokens only; google-tunix
reads the whole history in every turn; transformers does so (``episode``) or is handed its cache of the turn before (``episode_reuse``);
llama.cpp keeps its sequences' caches. With ``--sized`` another way of tunix is timed too, a sampler for every turn whose cache just fits
(``episode_sized``); the goal is about ``episode``, one sampler with one cache size, which is what its rollout settings give.

FOLDER holds the peers' environments (``python tests/bench/peers/interleave.py`` says how they are made). Each round runs each program
once in a new process pinned to ``--core``: timed episodes, after one that compiles where a program compiles. A round takes some ten
minutes, most of it tunix. The value is tunix's episode over ours, best CPU seconds. Ours also counts: prefilled tokens per conversation
are its new tokens exactly, and nothing is computed again.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE / "peers")]

import interleave  # noqa: E402  (imports no framework, as the next)
import serve_workload as sl  # noqa: E402

RATIO_GOAL = 6.0
SIZED = "episode_sized"
WAYS = {
    "crl_jax": ("episode",),
    "tunix": ("episode",),
    "transformers": ("episode", "episode_reuse"),
    "llama": ("episode",),
}


def summary(reports: dict[str, list[interleave.Report]]) -> dict[str, Any]:
    """Best and median of every way of each program, and what ours counted."""
    found: dict[str, Any] = {}
    for program, rows in reports.items():
        found[program] = {way: interleave.phase(rows, way) for way in rows[0]["phases"]} | interleave.conditions(rows)
    if "crl_jax" in reports:
        found["crl_jax"]["per_episode"] = reports["crl_jax"][-1]["per_episode"]
    return found


def measured(found: dict[str, Any]) -> dict[str, tuple[float | None, str, float]]:
    """What the goals are about; None where it was not measured."""
    if "crl_jax" not in found:
        return {}
    ours, counts = found["crl_jax"]["episode"]["best_cpu_s"], found["crl_jax"]["per_episode"]
    tunix = round(found["tunix"]["episode"]["best_cpu_s"] / ours, 3) if "tunix" in found else None
    return {
        "tunix_over_ours": (tunix, ">=", RATIO_GOAL),
        "prefilled_tokens_per_episode": (counts["prefilled_tokens"], "==", sl.TURNS * sl.CONTEXT),
        "recomputed_tokens_per_episode": (counts["recomputed_tokens"], "==", 0),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=pathlib.Path, help="folder of the peers' environments")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--sized", action="store_true", help="also time tunix with a cache that just fits in every turn (minutes)")
    parser.add_argument("--reps", type=int, default=1, help="timed episodes in one process")
    parser.add_argument("--only", nargs="+", choices=tuple(WAYS), default=tuple(WAYS), help="programs to run (all)")
    parser.add_argument("--core", type=int, default=0)
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("runs/serve"), help="reports and logs of every process")
    parser.add_argument("--out", type=pathlib.Path, default=None)
    args = parser.parse_args()
    from crl_jax.telemetry.result import Result, emit

    args.folder.mkdir(parents=True, exist_ok=True)
    reports: dict[str, list[interleave.Report]] = {program: [] for program in WAYS if program in args.only}
    for program in reports:
        interleave.python(program, args.peers)  # says what is missing before anything is measured
    for number in range(args.rounds):
        for program, rows in reports.items():
            where = {"peers": args.peers, "folder": args.folder, "core": args.core, "name": f"multiturn-{program}-{number}"}
            ways = [*WAYS[program], *([SIZED] if args.sized and program == "tunix" else ())]
            rows.append(interleave.run(program, ["multiturn", "--reps", str(args.reps), "--ways", *ways], **where))
    found = summary(reports)
    goals = interleave.goals(measured(found))
    ours = found.get("crl_jax", {}).get("episode", {}).get("best_cpu_s")
    ratios = {
        f"{program}_{way}_over_ours": round(rows[way]["best_cpu_s"] / ours, 3)
        for program, rows in found.items()
        for way in (*WAYS[program], SIZED)
        if ours and program != "crl_jax" and way in rows
    }
    workload = {"turns": sl.TURNS, "context": sl.CONTEXT, "new": sl.NEW, "conversations": 32, "max_length": sl.EPISODE}
    details = {"goals": goals, "ratios": ratios, "programs": found, "workload": workload, "rounds": args.rounds, "reps": args.reps}
    value = goals.get("tunix_over_ours", {}).get("value")
    good = None if value is None else all(row["pass"] for row in goals.values())
    unit = "x (an episode of google-tunix / ours, best CPU s)"
    emit(Result("bench_serve_multiturn", value, unit, f">= {RATIO_GOAL}, and every goal in details", good, details=details), args.out)


if __name__ == "__main__":
    main()
