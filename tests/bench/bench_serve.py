"""Rollouts of our engine and of the peers' samplers, interleaved on one core; the last line is one JSON object.

Usage:  python tests/bench/bench_serve.py --peers FOLDER [--rounds 3] [--cases single smollm2] [--only crl_jax ...] [--out result.json]

single   the workload shared with the other benchmarks: a random Llama of 4 layers, 8 prompts x 4 completions, 64 + 64 tokens,
         temperature 1, the log-prob of every token. CPU seconds of a rollout, and of one decode step at 32 rows (the difference of two
         rollouts of different length).
smollm2  SmolLM2-135M with its real weights in float32, greedy, 64 + 64 tokens, 1, 8 and 32 rows: tokens per CPU second, and which share
         of the decode roofline a step reaches. The roofline is the larger of bytes over memory bandwidth and FLOPs over the best rate of
         plain products, both measured in the same process. Greedy ids are compared with those of the peers.

FOLDER holds the peers' environments (``python tests/bench/peers/interleave.py`` says how they are made). Each round runs each program
once in a new process pinned to ``--core``; the best repetition over all rounds is compared, medians are reported. llama.cpp runs in
float32 as the others, its rows in one batch and shared prompts read once; it takes no part in the goals. SmolLM2 needs the packages of
requirements-weights.txt. The value is the rollout of the better peer (google-tunix or transformers) over ours; a goal whose numbers were
not measured is left out.
"""

from __future__ import annotations

import argparse
import pathlib
import subprocess
import sys
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE / "peers")]

import interleave  # noqa: E402  (imports no framework, as the next)
import serve_workload as sl  # noqa: E402

ROLLOUT_GOAL_S, RATIO_GOAL, STEP_GOAL_MS, ROOFLINE_GOAL = 0.70, 2.2, 9.0, 0.60
STEPS = sl.LONG - sl.SHORT
PROGRAMS = {"single": ("crl_jax", "tunix", "transformers", "llama"), "smollm2": ("crl_jax", "transformers", "llama")}
Reports = dict[str, list[interleave.Report]]


def smollm2_arguments(program: str, args: argparse.Namespace) -> list[str]:
    """The files a program needs for SmolLM2, made when they are not there."""
    folder = args.folder / "smollm2"
    if not all((folder / made).exists() for made in ("prompts.json", "hf")):
        maker = [sys.executable, str(HERE / "peers" / "smollm2_files.py"), str(folder), str(HERE.parents[1] / "README.md")]
        subprocess.run(maker, check=True, timeout=600)
    found = ["--prompts", str(folder / "prompts.json")]
    if program == "transformers":
        return [*found, "--model", str(folder / "hf")]
    if program == "llama":
        target = folder / f"{args.llama_type}.gguf"
        if not target.exists():
            maker = [str(HERE / "peers" / "gguf_files.py"), (folder / "source").read_text(), str(target), args.llama_type]
            subprocess.run([interleave.python(program, args.peers), *maker], check=True, timeout=600)
        return [*found, "--model", str(target)]
    return found


def measure(case: str, args: argparse.Namespace) -> Reports:
    """The reports of every program of a case by program, one for each round."""
    programs = [p for p in PROGRAMS[case] if p in (args.only or PROGRAMS[case])]
    rounds = args.rounds if case == "single" else args.smollm2_rounds
    reports: Reports = {program: [] for program in programs}
    for program in programs:
        interleave.python(program, args.peers)  # says what is missing before anything is measured
    for number in range(rounds):
        for program in programs:
            arguments = [case, "--reps", str(args.reps), *(smollm2_arguments(program, args) if case == "smollm2" else ())]
            where = {"peers": args.peers, "folder": args.folder, "core": args.core, "name": f"{case}-{program}-{number}"}
            reports[program].append(interleave.run(program, arguments, **where))
    return reports


def single_summary(reports: Reports) -> dict[str, Any]:
    """Rollout and decode step of each program."""
    found: dict[str, Any] = {}
    for program, rows in reports.items():
        step = interleave.step_ms(rows, "rollout", "rollout_short", STEPS)
        found[program] = {"rollout": interleave.phase(rows, "rollout"), "decode_step_ms": step, **interleave.conditions(rows)}
        if "rates" in rows[0]:
            found[program]["rates"] = best_rates(rows)
    return found


def best_rates(rows: list[interleave.Report]) -> dict[str, float]:
    """What the core could do at best."""
    return {name: round(max(report["rates"][name] for report in rows), 2) for name in rows[0]["rates"]}


def smollm2_summary(reports: Reports) -> dict[str, Any]:
    """Tokens per CPU second and decode step of each program by batch; ours also as a share of the roofline."""
    found: dict[str, Any] = {}
    for program, rows in reports.items():
        found[program] = {f"batch{batch}": batch_summary(rows, batch) for batch in sl.SMOLLM2_BATCHES} | interleave.conditions(rows)
    if "crl_jax" in found:
        rates = best_rates(reports["crl_jax"])
        flops, read = (1e9 * max(rate for name, rate in rates.items() if name.startswith(unit)) for unit in ("gflops", "gbytes"))
        found["crl_jax"]["rates"] = rates
        for batch in sl.SMOLLM2_BATCHES:
            row = found["crl_jax"][f"batch{batch}"]
            floor_ms = 1e3 * sl.SMOLLM2.decode_floor_s(batch, sl.SMOLLM2_CACHED, flops, read)
            row |= {"roofline_ms": round(floor_ms, 2), "roofline_share": round(floor_ms / row["decode_step_ms"]["best"], 3)}
        for other in [name for name in ("transformers", "llama") if name in reports]:
            found["crl_jax"][f"greedy_as_{other}"] = agreement(reports["crl_jax"][0]["greedy"], reports[other][0]["greedy"])
    return found


def batch_summary(rows: list[interleave.Report], batch: int) -> dict[str, Any]:
    """One batch of one program."""
    step = interleave.step_ms(rows, f"batch{batch}", f"batch{batch}_short", STEPS)
    rollout = interleave.phase(rows, f"batch{batch}")
    return {"rollout": rollout, "decode_step_ms": step, "decoded_per_cpu_s": round(1e3 * batch / step["best"], 1)}


def agreement(ours: dict[str, list[sl.Ids]], theirs: dict[str, list[sl.Ids]]) -> dict[str, Any]:
    """By batch: rows whose greedy ids are all the same, rows, and the mean number of ids before the first that differs."""
    found: dict[str, Any] = {}
    for batch, rows in ours.items():
        same = [
            next((i for i, pair in enumerate(zip(a, b, strict=True)) if pair[0] != pair[1]), len(a))
            for a, b in zip(rows, theirs[batch], strict=True)
        ]
        found[f"batch{batch}"] = {
            "rows": len(rows),
            "identical": sum(n == sl.LONG for n in same),
            "mean_agreeing": round(sum(same) / len(same), 1),
        }
    return found


def measured(single: dict[str, Any], smollm2: dict[str, Any]) -> dict[str, tuple[float | None, str, float]]:
    """What the goals are about; None where it was not measured."""
    ours, theirs = single.get("crl_jax"), [single[peer]["rollout"]["best_cpu_s"] for peer in ("tunix", "transformers") if peer in single]
    rollout = ours and ours["rollout"]["best_cpu_s"]
    found: dict[str, tuple[float | None, str, float]] = {
        "rollout_cpu_s": (rollout, "<=", ROLLOUT_GOAL_S),
        "better_peer_over_ours": (round(min(theirs) / rollout, 3) if rollout and theirs else None, ">=", RATIO_GOAL),
        "decode_step_ms": (ours and ours["decode_step_ms"]["best"], "<=", STEP_GOAL_MS),
    }
    for batch in sl.SMOLLM2_BATCHES if "crl_jax" in smollm2 else ():
        row = smollm2["crl_jax"][f"batch{batch}"]
        found[f"smollm2_batch{batch}_roofline_share"] = (row["roofline_share"], ">=", ROOFLINE_GOAL)
        if "transformers" in smollm2:
            peer = smollm2["transformers"][f"batch{batch}"]["rollout"]["tokens_per_cpu_s"]
            found[f"smollm2_batch{batch}_over_transformers"] = (round(row["rollout"]["tokens_per_cpu_s"] / peer, 3), ">=", 1.0)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=pathlib.Path, help="folder of the peers' environments")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--smollm2-rounds", type=int, default=1, help="rounds of the SmolLM2 case (minutes each)")
    parser.add_argument("--reps", type=int, default=3, help="timed repetitions in one process")
    parser.add_argument("--cases", nargs="+", choices=tuple(PROGRAMS), default=tuple(PROGRAMS))
    parser.add_argument("--only", nargs="+", choices=tuple(interleave.PROGRAMS), help="programs to run (all)")
    parser.add_argument("--llama-type", choices=("f32", "f16"), default="f32", help="type of llama.cpp's SmolLM2 matrices")
    parser.add_argument("--core", type=int, default=0)
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("runs/serve"), help="reports, logs and files of every process")
    parser.add_argument("--out", type=pathlib.Path, default=None)
    args = parser.parse_args()
    from crl_jax.telemetry.result import Result, emit

    args.folder.mkdir(parents=True, exist_ok=True)
    single = single_summary(measure("single", args)) if "single" in args.cases else {}
    smollm2 = smollm2_summary(measure("smollm2", args)) if "smollm2" in args.cases else {}
    goals = interleave.goals(measured(single, smollm2))
    details = {
        "goals": goals,
        "single": single,
        "smollm2": smollm2,
        "rounds": args.rounds,
        "smollm2_rounds": args.smollm2_rounds,
        "reps": args.reps,
    }
    value = goals.get("better_peer_over_ours", {}).get("value")
    good = None if value is None else all(row["pass"] for row in goals.values())
    unit = "x (rollout of the better of google-tunix and transformers / ours, best CPU s)"
    emit(Result("bench_serve", value, unit, f">= {RATIO_GOAL}, and every goal in details", good, details=details), args.out)


if __name__ == "__main__":
    main()
