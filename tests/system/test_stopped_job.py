"""A whole run of two processes: one of them is told to stop, both save and leave, and the same two commands go on."""

import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import time

import pytest
from smoke_runs import DEADLINE_S, children_of_session, command, start

from crl_jax.checkpoint import store

pytestmark = pytest.mark.system

SETTINGS = (
    "run.method=baseline",
    "ask.enabled=false",
    "run.sync=false",
    "run.max_lag=1",
    "run.save_every=1",
    "run.eval_modes=[greedy]",
    "actor.mesh.data=2",
    "actor.serve_tensor=1",
)


def started(folder: pathlib.Path, name: str, *more: str) -> tuple[list[subprocess.Popen[bytes]], list[pathlib.Path]]:
    """Both processes and their logs."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        meet = ["--coordinator", f"127.0.0.1:{free.getsockname()[1]}", "--processes", "2"]
    logs = [folder / f"{name}_{i}.txt" for i in range(2)]
    return [start([*command(folder, *SETTINGS, *more), *meet, "--process-id", str(i)], log) for i, log in enumerate(logs)], logs


def ended(running: list[subprocess.Popen[bytes]]) -> list[int]:
    try:
        codes = [process.wait(DEADLINE_S) for process in running]
    finally:
        for process in running:
            process.kill()
    assert [children_of_session(process.pid, wait_s=15) for process in running] == [[], []]
    return codes


def test_sigterm_to_one_process_stops_all_at_the_same_step_and_the_job_goes_on(tmp_path: pathlib.Path) -> None:
    root = tmp_path / "smoke" / "checkpoints"
    running, logs = started(tmp_path, "first", "run.steps=500")
    end = time.monotonic() + DEADLINE_S
    while not (root / "step_00000001" / "manifest.json").exists():
        assert time.monotonic() < end, "not in time"
        assert [process.poll() for process in running] == [None, None], [log.read_text() for log in logs]
        time.sleep(0.05)
    os.kill(running[1].pid, signal.SIGTERM)
    codes = ended(running)
    texts = [log.read_text() for log in logs]
    assert codes == [75, 75], texts
    steps = [re.findall(r"checkpoint of step (\d+) is saved", text) for text in texts]
    assert steps[0] == steps[1]
    last = int(steps[0][-1])
    assert store.latest(root) == last
    assert re.search(r"stopping \((process 1 was told to stop: SIGTERM|another process of the job)\)", texts[0])
    assert "stopping (SIGTERM)" in texts[1]

    running, logs = started(tmp_path, "second", f"run.steps={last + 1}", "--resume")
    codes = ended(running)
    texts = [log.read_text() for log in logs]
    assert codes == [0, 0], texts
    assert f"from step {last} of {last + 1}" in texts[0]
    assert "step" not in re.sub(r"(?m)^\[Gloo\].*$|^crl: .*$", "", texts[1]), "only the first process speaks"
    rows = map(json.loads, (tmp_path / "smoke" / "metrics.jsonl").read_text().splitlines())
    assert [row["step"] for row in rows if row["kind"] == "metrics" and "env_steps" in row] == list(range(1, last + 2))
