"""A pod's processes on this machine, undisturbed and with one process of each job killed; the last line is one JSON object.

Usage:  python tests/bench/local_pod.py [--steps 12] [--no-kills] [--out docs/results/local_pod.json]

Starts ``launch/local_pod.sh configs/local_pod.yaml``: the actor's job and the extractor's, two processes each, and a bank. In the second
run one process of the actor's job gets SIGKILL after its first checkpoint, and later one of the extractor's: the jobs are started again and
resume. Each run must end with code 0 at its last step, have trained both models, and leave no process behind. The value is the number of
faults.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from crl_jax.telemetry.result import Result, emit
from crl_jax.telemetry.tracker import read_jsonl

ROOT = pathlib.Path(__file__).resolve().parents[2]
LIMIT_S = 1500.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--no-kills", action="store_true", help="only the undisturbed run")
    parser.add_argument("--out", type=pathlib.Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs = {"undisturbed": run(pathlib.Path(folder) / "undisturbed", args.steps, kills=False)}
        if not args.no_kills:
            runs["killed"] = run(pathlib.Path(folder) / "killed", args.steps, kills=True)
    faults = [f"{name}: {fault}" for name, found in runs.items() for fault in found["faults"]]
    details = {"steps": args.steps, "runs": runs, "faults": faults}
    emit(Result("local_pod_faults", len(faults), "faults", goal="0", passed=not faults, details=details), args.out)
    return 1 if faults else 0


def run(folder: pathlib.Path, steps: int, *, kills: bool) -> dict[str, Any]:
    """One run of the pod: what it did, and what is wrong with that."""
    command = ["bash", "launch/local_pod.sh", "configs/local_pod.yaml", f"run.steps={steps}", "--folder", str(folder)]
    began, killed, lines = time.monotonic(), list[str](), list[str]()
    print("start", *command[1:4], "with kills" if kills else "", flush=True)
    log = folder.with_suffix(".log")
    with log.open("wb") as out, subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=out, start_new_session=True) as pod:
        while pod.poll() is None and time.monotonic() - began < LIMIT_S:
            if kills and len(killed) < 2:
                killed += kill_one(folder, "actor" if not killed else "extractor", after=4 if not killed else 8)
            time.sleep(0.2)
        if pod.poll() is None:
            pod.send_signal(signal.SIGTERM)
            lines.append(f"not over after {LIMIT_S:g} s")
    seconds = time.monotonic() - began
    lines += [] if pod.returncode == 0 else [f"exit code {pod.returncode}: {log.read_text(errors='replace')[-800:]}"]
    lines += [] if len(killed) == 2 * kills else [f"killed {killed}, and not one of each job"]
    left = processes_of(folder)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    lines += [f"{len(left)} processes were left"] if left else []
    actor, extractor = rows(folder / "actor"), rows(folder / "extractor")
    lines += [] if actor and actor[-1]["step"] == steps else ["the actor's job did not come to its last step"]
    lines += [] if extractor else ["the extractor never learned"]
    last = {**(actor[-1] if actor else {})}
    kept = ("actor/version", "bank/entries", "success/guided", "success/free", "lag/max", "env_steps")
    return {
        "faults": lines,
        "seconds": round(seconds, 1),
        "exit_code": pod.returncode,
        "killed": killed,
        "processes_left": len(left),
        "actor_steps": len(actor),
        "extractor_updates": len(extractor),
        "extractor_version": extractor[-1].get("extractor/version") if extractor else None,
        "last_step": {name: last[name] for name in kept if name in last},
        "step_s": [round(row["step_s"], 2) for row in actor],
    }


def kill_one(folder: pathlib.Path, role: str, *, after: int) -> list[str]:
    """SIGKILL to the trainer of process 1 of a job, once the actor's run has a row of step ``after``; what was killed."""
    if not any(row["step"] >= after for row in rows(folder / "actor")):
        return []
    try:
        child = json.loads((folder / "hosts" / f"{role}-1" / "state.json").read_text()).get("child")
        os.kill(child, signal.SIGKILL)
    except (FileNotFoundError, ProcessLookupError, json.JSONDecodeError, TypeError):
        return []
    return [f"{role} process 1 after step {after}"]


def rows(folder: pathlib.Path) -> list[dict[str, Any]]:
    """The training rows of a run so far, the newest of each step."""
    path = folder / "metrics.jsonl"
    if not path.exists():
        return []
    return list({row["step"]: row for row in read_jsonl(path) if "step_s" in row}.values())


def processes_of(folder: pathlib.Path) -> list[int]:
    """Processes whose command line names ``folder``."""
    found: list[int] = []
    for entry in pathlib.Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if str(folder).encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except OSError:  # it has just ended
                continue
    return found


if __name__ == "__main__":
    sys.exit(main())
