"""What stays with the trainer on a host: real processes, with a few lines of Python as the trainer."""

import importlib.util
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

WORKER = pathlib.Path(__file__).resolve().parents[2] / "launch" / "worker.py"
STALE = {
    **{"JAX_COORDINATOR_ADDRESS": "10.9.9.9:8476", "JAX_PROCESS_ID": "7", "JAX_NUM_PROCESSES": "9", "CRL_COORDINATOR": "10.9.9.9:1"},
    **{"CRL_PROCESS_ID": "7", "MEGASCALE_COORDINATOR_ADDRESS": "10.9.9.9", "MEGASCALE_SLICE_ID": "1", "TPU_WORKER_HOSTNAMES": "10.9.9.9"},
}
STEP = "print('step 1/9  guided 0.5', flush=True)\n"
UPDATE = "print('update    1  at step 3/12 of the run  reward +0.50', flush=True)\n"  # of the extractor's job


def words(verb: str, folder: pathlib.Path, trainer: str = "", *more: str, processes: int = 2) -> list[str]:
    topology = ["--process-id", "1", "--processes", str(processes), "--coordinator", "10.0.0.7:8476"] if trainer else []
    command = ["--", sys.executable, "-IS", "-c", trainer] if trainer else []
    return [sys.executable, "-IS", str(WORKER), verb, "--folder", str(folder), *topology, *more, *command]


def work(*given: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(given, env={**os.environ, **environment}, capture_output=True, text=True, timeout=60)


def status(folder: pathlib.Path) -> str:
    return work(*words("status", folder)).stdout.strip()


def until(true: object, limit_s: float = 20.0) -> None:
    end = time.monotonic() + limit_s
    while not true():  # type: ignore[operator]
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.02)


def gone(pid: int) -> bool:
    """It runs no more; where nobody collects its exit code it stays listed."""
    try:
        return ") Z " in pathlib.Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_T02_the_trainer_is_told_who_is_who_now_and_sees_nothing_of_earlier_starts(tmp_path: pathlib.Path) -> None:
    trainer = "import json, os, sys; print(json.dumps([sys.argv[1:], dict(os.environ)]))"
    done = work(*words("run", tmp_path, trainer, "--echo"), **STALE)
    assert done.returncode == 0
    argv, environment = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("[")))
    assert argv == ["--coordinator", "10.0.0.7:8476", "--process-id", "1", "--processes", "2"]
    assert not set(STALE) & set(environment)
    assert "10.9.9.9" not in str(environment)


def test_T02_a_container_keeps_what_was_made_for_it_and_one_process_is_told_nothing(tmp_path: pathlib.Path) -> None:
    trainer = "import os, sys; print('seen', sys.argv[1:], sorted(k for k in os.environ if k[:8] in ('TPU_WORK', 'MEGASCAL')))"
    done = work(*words("run", tmp_path, trainer, "--echo", "--in-container", processes=1), **STALE)
    assert "seen [] ['TPU_WORKER_HOSTNAMES']" in done.stdout


@pytest.mark.parametrize(("trainer", "code"), [("raise SystemExit(3)", 3), ("import os; os.kill(os.getpid(), 15)", 143), ("", 127)])
def test_exit_codes_come_back(tmp_path: pathlib.Path, trainer: str, code: int) -> None:
    given = words("run", tmp_path, trainer or "pass")
    if not trainer:
        given[given.index("--") + 1] = str(tmp_path / "no-such-program")
    assert work(*given).returncode == code
    assert status(tmp_path) == f"crl-worker 1 exited {code}"


@pytest.mark.parametrize("done", [STEP, UPDATE])
def test_T08_a_step_that_hangs_leaves_its_stacks_and_ends(tmp_path: pathlib.Path, done: str) -> None:
    trainer = done + "import time\ndef hung_step(): time.sleep(60)\nhung_step()"
    # without -I and -S, which keep Python from reading PYTHONFAULTHANDLER
    given = words("run", tmp_path, trainer, "--stall-s", "0.5")
    del given[given.index("--") + 2]
    started = time.monotonic()
    assert work(*given).returncode == 124
    assert time.monotonic() - started < 5 + 10  # the limit of 5 s, and a loaded machine
    log = (tmp_path / "log").read_text()
    assert "no output for 0.5 s after a step" in log
    assert "Fatal Python error: Aborted" in log
    assert "in hung_step" in log


def test_T08_the_compilation_before_the_first_step_may_take_longer(tmp_path: pathlib.Path) -> None:
    trainer = "import time\nprint('compiling', flush=True)\ntime.sleep(1.2)\n" + STEP
    assert work(*words("run", tmp_path, trainer, "--stall-s", "0.4")).returncode == 0


def test_T03_a_failure_is_held_back_until_a_siblings_preemption_was_seen(tmp_path: pathlib.Path) -> None:
    given = words("run", tmp_path, "raise SystemExit(1)", "--hold-failure-s", "60")
    with subprocess.Popen(given, stdout=subprocess.DEVNULL) as held:
        until(lambda: "exited 1" in status(tmp_path))
        assert held.poll() is None
        held.send_signal(signal.SIGTERM)  # the sibling has decided: the pod ends
        assert held.wait(10) == 1
    started = time.monotonic()
    assert work(*words("run", tmp_path, "raise SystemExit(75)", "--hold-failure-s", "60")).returncode == 75
    assert time.monotonic() - started < 30


def test_a_trainer_runs_on_without_who_started_it_and_only_once(tmp_path: pathlib.Path) -> None:
    trainer = STEP + "import signal, sys, time\nsignal.signal(15, lambda *_: sys.exit(75))\nprint('ready', flush=True)\ntime.sleep(60)"
    assert status(tmp_path) == "crl-worker 0 absent"
    assert work(*words("start", tmp_path, trainer)).stdout.strip() == "crl-worker 1 running"
    until(lambda: "ready" in (tmp_path / "log").read_text())
    first = json.loads((tmp_path / "state.json").read_text())
    assert work(*words("start", tmp_path, trainer)).stdout.strip() == "crl-worker 1 running"
    assert work(*words("run", tmp_path, trainer)).returncode == 1
    assert json.loads((tmp_path / "state.json").read_text()) == first
    assert work(*words("stop", tmp_path, "", "--grace-s", "20")).stdout.strip() == "crl-worker 1 stopped 75"
    assert gone(first["pid"])
    assert gone(first["child"])
    assert work(*words("stop", tmp_path)).stdout.strip() == "crl-worker 1 stopped 75"


def test_a_trainer_that_ignores_the_request_is_killed_with_all_it_started(tmp_path: pathlib.Path) -> None:
    trainer = (
        "import os, signal, sys, time\nsignal.signal(15, signal.SIG_IGN)\npid = os.fork()\n"
        "open(sys.argv[1] if pid else os.devnull, 'w').write(str(pid))\nprint('ready', flush=True)\ntime.sleep(60)"
    )
    given = [*words("start", tmp_path, trainer, processes=1), str(tmp_path / "grandchild")]
    assert work(*given).returncode == 0
    until(lambda: "ready" in (tmp_path / "log").read_text())
    until(lambda: (tmp_path / "grandchild").exists() and (tmp_path / "grandchild").read_text() != "")
    assert work(*words("stop", tmp_path, "", "--grace-s", "0.3")).stdout.strip() == "crl-worker 1 stopped 137"
    until(lambda: gone(int((tmp_path / "grandchild").read_text())))


def test_a_watcher_that_was_killed_is_seen(tmp_path: pathlib.Path) -> None:
    (tmp_path / "state.json").write_text(json.dumps({"state": "running", "id": 4, "pid": 1, "child": 1}))
    assert status(tmp_path) == "crl-worker 4 exited 137"


def test_runs_go_to_the_bucket_arrays_before_manifests_and_come_back_before_a_start(tmp_path: pathlib.Path) -> None:
    gcloud = tmp_path / "bin" / "gcloud"
    gcloud.parent.mkdir()
    gcloud.write_text(
        f'#!/bin/sh\necho "$*" >> {tmp_path}/calls\ncase "$*" in *"/runs {tmp_path}"*) [ -e {tmp_path}/broken ] && exit 1; esac; exit 0\n'
    )
    gcloud.chmod(0o755)
    path = {"PATH": f"{gcloud.parent}:{os.environ['PATH']}"}
    bucket = ("--bucket", "gs://lab/x", "--runs", str(tmp_path / "runs"))
    given = words("run", tmp_path / "f", "pass", *bucket)
    given[given.index("--process-id") + 1] = "0"
    assert work(*given, **path).returncode == 0
    down, log, arrays, everything = (tmp_path / "calls").read_text().splitlines()
    assert down == f"storage rsync --recursive gs://lab/x/runs {tmp_path}/runs"
    assert log == f"storage cp {tmp_path}/f/log gs://lab/x/logs/worker-0.log"
    assert "manifest" in arrays
    assert "manifest" not in everything
    assert "sqlite" not in everything  # the trainer has ended: the bank's file is whole
    (tmp_path / "broken").touch()
    assert work(*given, **path).returncode == 1
    assert "could not be fetched: not started" in (tmp_path / "f" / "log").read_text()


def test_a_stop_while_the_runs_are_fetched_starts_no_trainer(tmp_path: pathlib.Path) -> None:
    gcloud = tmp_path / "bin" / "gcloud"
    gcloud.parent.mkdir()
    gcloud.write_text('#!/bin/sh\ncase "$*" in *rsync*) sleep 1 ;; esac\n')
    gcloud.chmod(0o755)
    path = {"PATH": f"{gcloud.parent}:{os.environ['PATH']}"}
    given = words("start", tmp_path / "f", "pass", "--bucket", "gs://lab/x", "--runs", str(tmp_path / "runs"))
    assert work(*given, **path).stdout.strip() == "crl-worker 1 running"
    assert work(*words("stop", tmp_path / "f")).stdout.strip() == "crl-worker 1 stopped 75"
    assert "start:" not in (tmp_path / "f" / "log").read_text()


def test_while_the_trainer_runs_the_banks_file_stays_here() -> None:
    spec = importlib.util.spec_from_file_location("crl_worker", WORKER)
    assert spec is not None
    assert spec.loader is not None
    worker = importlib.util.module_from_spec(spec)
    sys.modules["crl_worker"] = worker  # dataclasses look their module up
    spec.loader.exec_module(worker)
    copies = worker.mirror_commands("gs://lab/x", pathlib.Path("f"), "runs", 0, "up", last=False)
    assert all("sqlite" in " ".join(words) for words in copies[1:])
    assert worker.mirror_commands("gs://lab/x", pathlib.Path("f"), "runs", 3, "up", last=True) == copies_of_one_log(3)


def copies_of_one_log(process_id: int) -> list[list[str]]:
    return [["gcloud", "storage", "cp", "f/log", f"gs://lab/x/logs/worker-{process_id}.log"]]


def test_T03_a_worker_that_is_told_to_leave_many_times_at_once_passes_it_on(tmp_path: pathlib.Path) -> None:
    trainer = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(75)); print('ready', flush=True); time.sleep(60)"
    with subprocess.Popen(words("run", tmp_path, trainer, "--echo"), stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        assert any(line == "ready\n" for line in worker.stdout)
        for _ in range(2000):  # a second signal within the handler of the first once kept it waiting for ever
            worker.send_signal(signal.SIGTERM)
        try:
            assert worker.wait(20) == 75
        finally:
            worker.kill()
