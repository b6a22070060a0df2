"""Whole runs in their own process: they finish, they survive kill -9, they end when something breaks."""

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time

import pytest
from smoke_runs import DEADLINE_S, children_of_session, command, environment, start

pytestmark = pytest.mark.system


def rows(folder):
    lines = (folder / "smoke" / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["kind"] == "metrics" and "env_steps" in row]


def wait_until(condition, deadline_s, process=None):
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, "not in time"
        assert process is None or process.poll() is None, "the run ended early"
        time.sleep(0.05)


def test_smoke_run_finishes_and_reports(finished):
    folder, pid, text = finished
    assert [row["step"] for row in rows(folder)] == [1, 2, 3]
    assert json.loads(text.strip().splitlines()[-1])["name"] == "success_guided_last_bucket"
    assert (folder / "smoke" / "checkpoints" / "step_00000003" / "manifest.json").exists()
    assert children_of_session(pid) == []


def test_phases_add_up_to_wall_time(finished):
    for row in rows(finished[0]):
        phases = sum(value for key, value in row.items() if key.startswith("phase_s/"))
        assert phases == pytest.approx(row["step_s"], abs=1e-6)


def test_bank_grows_from_episodes_and_both_models_are_trained(finished):
    folder, _, _ = finished
    last = rows(folder)[-1]
    assert last["bank/submitted"] == 24
    assert last["actor/version"] == 3
    assert last["extractor/version"] == last["extractor/updates"] > 0
    bank = sqlite3.connect(folder / "smoke" / "bank.sqlite")
    assert bank.execute("SELECT count(*) FROM generations").fetchone()[0] >= 24


def test_a_second_run_does_not_overwrite_the_first(finished):
    done = subprocess.run(command(finished[0]), capture_output=True, text=True, env=environment(), timeout=DEADLINE_S)
    assert done.returncode != 0
    assert "--resume" in done.stderr


def test_K02_killed_run_resumes_and_nothing_acknowledged_is_lost(tmp_path):
    log = tmp_path / "log.txt"
    process = start(command(tmp_path, "run.steps=4", "run.sync=false"), log)
    checkpoints = tmp_path / "smoke" / "checkpoints"
    wait_until(lambda: (checkpoints / "step_00000002" / "manifest.json").exists(), DEADLINE_S, process)
    os.kill(process.pid, signal.SIGKILL)
    process.wait(30)
    wait_until(lambda: children_of_session(process.pid) == [], 15)
    bank = sqlite3.connect(tmp_path / "smoke" / "bank.sqlite")
    acknowledged = {row[0] for row in bank.execute("SELECT id FROM generations")}
    entries = {row[0] for row in bank.execute("SELECT id FROM entries")}
    bank.close()

    resumed = subprocess.run(
        [*command(tmp_path, "run.steps=4", "run.sync=false"), "--resume"],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=DEADLINE_S,
    )
    assert resumed.returncode == 0, resumed.stderr
    first = int(resumed.stdout.split("from step ")[1].split()[0])
    assert first >= 2
    by_step = {row["step"]: row for row in rows(tmp_path)}
    assert sorted(by_step) == [1, 2, 3, 4]
    assert by_step[4]["actor/version"] == 4
    bank = sqlite3.connect(tmp_path / "smoke" / "bank.sqlite")
    assert acknowledged <= {row[0] for row in bank.execute("SELECT id FROM generations")}
    assert entries <= {row[0] for row in bank.execute("SELECT id FROM entries")}
    assert bank.execute("SELECT count(*) FROM ops WHERE abandoned != 0").fetchone()[0] == 0


def test_A13_error_in_a_step_ends_the_run_and_its_processes(tmp_path):
    program = (
        "import sys, time, crl_jax.train as t\n"
        "def broken(run, batch):\n    print('breaking', time.monotonic(), flush=True)\n    raise ValueError('x')\n"
        "t._learn_actor = broken\n"
        "from crl_jax.cli import main\n"
        f"sys.exit(main({command(tmp_path)[3:]!r}))\n"
    )
    log = tmp_path / "log.txt"
    process = start([sys.executable, "-c", program], log)
    wait_until(lambda: "breaking" in log.read_text(), DEADLINE_S, process)
    assert process.wait(15) != 0
    assert "ValueError: x" in log.read_text()
    assert children_of_session(process.pid) == []
