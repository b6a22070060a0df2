"""Two processes that train, log and save together."""

import json
import pathlib
import socket
import subprocess
import sys

import pytest
import toy_model

from crl_jax.learner import objective
from crl_jax.learner.batching import to_batch
from crl_jax.learner.optimizer import make_optimizer
from crl_jax.learner.state import init_state
from crl_jax.learner.step import make_train_step

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.mark.system
def test_P02_P09_two_processes_log_and_save_without_a_hang_and_refuse_uneven_rows(tmp_path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    script, env = ROOT / "tests/learner/two_processes.py", {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(script)]
    running = [
        subprocess.Popen([*command, str(i), port, str(tmp_path)], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for i in range(2)
    ]
    try:
        ends = [process.communicate(timeout=300) for process in running]  # finite, generous: the machine may be busy
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0, 0], ends
    first, second = (json.loads(out.splitlines()[-1]) for out, _ in ends)
    assert first == second
    assert "rows: [2, 3]" in first["uneven"]

    optimizer = make_optimizer(0.01, eps=1e-3)
    step = make_train_step(None, optimizer, objective.actor(), temperature=1.0, allowed=None, model=toy_model)
    state, losses = init_state(toy_model.init(), optimizer), []
    for n in range(3):
        state, sums = step(state, to_batch(toy_model.samples(7, n), **toy_model.BUCKETS))
        losses.append(sums["loss"].mean())
    assert first["losses"] == pytest.approx(losses, abs=1e-5)
