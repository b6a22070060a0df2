"""The simulated schedule against two real runs at small size; the last line is one JSON object.

Usage:  crl bench schedule [--steps 30] [--runs FOLDER] [--environments 8,64,512,4096] [--out docs/results/schedule.json]

Trains the smoke recipe for ``--steps`` steps in turn (run.sync) and beside each other (max_lag 1), or takes the runs ``sync`` and ``async``
that ``--runs`` holds. The first third of the steps, which compiles, is left out. From the second third come the durations (of the run in
turn) and how many parts compute at full speed at once on this machine (of the other run); the last third is predicted from them: seconds
per step of both runs. The value is the larger relative error of the two. The asynchronous run's lags are predicted without being fitted.

The details have the same prediction for parts that share one device and for parts with a device each, and the simulation of the built-in
workload, which is of no particular machine, at each number of environments: utilisation, who waited for what, lags.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from crl_jax.simulate.fit import Row, config_of, fit, fit_capacity, rows_of, seconds_per_step
from crl_jax.simulate.outcome import Outcome, table
from crl_jax.simulate.schedule import simulate
from crl_jax.simulate.workload import Workload
from crl_jax.telemetry.result import Result, emit

ROOT = pathlib.Path(__file__).resolve().parents[2]
GOAL = 0.25
STEPS = 48  # simulated, so that the first ones weigh little
TRAIN_TIMEOUT_S = 1800.0


def main(argv: Sequence[str] | None = None) -> int:
    """Train, fit, predict, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--runs", type=pathlib.Path, help="a folder with the runs `sync` and `async`, instead of training them")
    parser.add_argument("--environments", default="8,64,512,4096", help="comma-separated")
    parser.add_argument("--out", type=pathlib.Path)
    args = parser.parse_args(argv)
    if args.runs is not None:
        details = compare(args.runs)
    else:
        with tempfile.TemporaryDirectory() as folder:
            for name, settings in (("sync", ["run.sync=true", "run.max_lag=0"]), ("async", ["run.sync=false", "run.max_lag=1"])):
                _train(pathlib.Path(folder), name, settings, args.steps)
            details = compare(pathlib.Path(folder))
    for mode in ("sync", "async"):
        print(f"{mode:<5} predicted {details[mode]['predicted_s']:.3f} s a step, measured {details[mode]['measured_s']:.3f}")
    built_in = [simulate(Workload().at(int(n), sync=sync)) for n in args.environments.split(",") for sync in (True, False)]
    print(table(built_in))
    details["built_in_workload"] = [_short(outcome) for outcome in built_in]
    value = max(details[mode]["error"] for mode in ("sync", "async"))
    emit(Result("schedule", value, "relative error of seconds per step", f"<= {GOAL}", value <= GOAL, details=details), args.out)
    return 0


def compare(folder: pathlib.Path) -> dict[str, Any]:
    """Predictions and measurements of the runs ``sync`` and ``async`` in ``folder``."""
    rows = {mode: rows_of(folder / mode) for mode in ("sync", "async")}
    third = {mode: len(found) // 3 for mode, found in rows.items()}
    last = {mode: found[2 * third[mode] :] for mode, found in rows.items()}
    in_turn = dataclasses.replace(fit(rows["sync"][: 2 * third["sync"]], config_of(folder / "sync"), skip=third["sync"]), steps=STEPS)
    beside = dataclasses.replace(in_turn, sync=False, max_lag=config_of(folder / "async").run.max_lag)
    middle = rows["async"][third["async"] : 2 * third["async"]]
    fitted = dataclasses.replace(beside, capacity=fit_capacity(beside, _mean_step(middle)))
    found: dict[str, Any] = {"sync": _against(in_turn, last["sync"]), "async": _against(fitted, last["async"])}
    found["async"] |= {
        "if_parts_share_one_device_s": seconds_per_step(dataclasses.replace(beside, capacity=1.0)),
        "if_each_part_has_a_device_s": seconds_per_step(beside),
    }
    ratio = found["async"]["predicted_s"] / found["sync"]["predicted_s"]
    found["async_over_sync"] = {"predicted": ratio, "measured": found["async"]["measured_s"] / found["sync"]["measured_s"]}
    found["lag"] = {"predicted": _predicted_lag(simulate(fitted)), "measured": _measured_lag(rows["async"][third["async"] :])}
    return found | {"workload": dataclasses.asdict(fitted), "steps": {mode: len(r) for mode, r in rows.items()}}


def _train(folder: pathlib.Path, name: str, settings: list[str], steps: int) -> None:
    words = [f"run.dir={folder}", f"run.name={name}", f"run.steps={steps}", "run.save_every=0", "telemetry.tensorboard=false", *settings]
    command = [sys.executable, "-m", "crl_jax.cli", "train", str(ROOT / "configs" / "smoke.yaml"), *words]
    subprocess.run(
        command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL, timeout=TRAIN_TIMEOUT_S, env=os.environ | {"JAX_PLATFORMS": "cpu"}
    )


def _against(workload: Workload, rows: Sequence[Row]) -> dict[str, float]:
    predicted, measured = seconds_per_step(workload), _mean_step(rows)
    return {"predicted_s": predicted, "measured_s": measured, "error": abs(predicted / measured - 1), "capacity": workload.capacity}


def _mean_step(rows: Sequence[Row]) -> float:
    """Seconds of a step without its evaluation."""
    return sum(float(row["step_s"]) - float(row.get("phase_s/evaluate", 0.0)) for row in rows) / len(rows)


def _predicted_lag(o: Outcome) -> dict[str, Any]:
    episodes, tokens, generations = (lags.counts for lags in (o.lags, o.token_lags, o.generation_lags))
    return {
        "episodes_mean": _mean(episodes),
        "episodes_max": max(episodes),
        "tokens_not_newest": 1 - tokens.get(0, 0) / sum(tokens.values()),
        "generations_mean": _mean(generations),
    }


def _measured_lag(rows: Sequence[Row]) -> dict[str, Any]:
    tokens = sum(float(value) for row in rows for name, value in row.items() if name.startswith("lag/tokens/"))
    updates = [float(row["extractor/lag"]) for row in rows if "extractor/lag" in row]
    return {
        "episodes_mean": sum(float(row["lag/mean"]) for row in rows) / len(rows),
        "episodes_max": max(float(row["lag/max"]) for row in rows),
        "tokens_not_newest": 1 - sum(float(row["lag/tokens/0"]) for row in rows) / tokens,
        "generations_mean": sum(updates) / len(updates) if updates else None,
    }


def _mean(counts: Any) -> float | None:
    return sum(value * n for value, n in counts.items()) / sum(counts.values()) if counts else None


def _short(outcome: Outcome) -> dict[str, Any]:
    return {name: value for name, value in outcome.to_json().items() if name not in ("batch_lags", "step_s")}


if __name__ == "__main__":
    sys.exit(main())
