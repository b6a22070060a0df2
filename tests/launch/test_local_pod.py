"""The commands of a pod on this machine; the processes themselves are run by ``crl bench local-pod``."""

import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest

from launch import local_pod
from launch.cloud.commands import Commands


def commands(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    assert local_pod.main(["--dry-run", *words]) == 0
    return [line for line in capsys.readouterr().out.splitlines() if not line.startswith("#")]


def test_a_bank_and_each_process_of_both_jobs(capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path) -> None:
    bank, *trainers = commands(capsys, "configs/local_pod.yaml", "run.steps=2", "--folder", str(tmp_path), "--processes", "3")
    assert len(trainers) == 6
    port = re.search(r"--port (\d+)", bank)
    assert port is not None
    assert all(f"bank.server.url=grpc://127.0.0.1:{port[1]}" in line for line in trainers)
    for role, lines in (("actor", trainers[:3]), ("extractor", trainers[3:])):
        assert [re.findall(r"--process-id (\d) --processes 3", line) for line in lines] == [["0"], ["1"], ["2"]]
        assert len({re.findall(r"--coordinator (\S+)", line)[0] for line in lines}) == 1
        assert all(f"--role {role}" in line and "run.steps=2" in line and "bank.server.run=pod" in line for line in lines)
        assert not any("--resume" in line for line in lines)
    listens = [re.findall(r"extractor.listen.port=(\d+)", line)[0] for line in trainers[3:]]
    assert "extractor.server.url=" + ",".join(f"http://127.0.0.1:{port}" for port in listens) in bank


def test_resume_goes_to_every_trainer(capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path) -> None:
    assert all(line.endswith("--resume") for line in commands(capsys, "--folder", str(tmp_path), "--resume")[1:])


@pytest.mark.parametrize(
    "words",
    [
        ["configs/local_pod.yaml; touch x"],
        ["configs/local_pod.yaml", "run.steps"],
        ["--processes", "0"],
        ["configs/none.yaml"],
        ["--grace-s", "-1"],
    ],
)
def test_T05_what_is_no_recipe_or_setting_is_refused(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    assert local_pod.main(["--dry-run", *words]) == 2
    assert "local_pod:" in capsys.readouterr().err


def test_T03_a_trainer_that_hangs_is_killed_by_its_watcher_before_the_watcher_is_killed(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[float] = []
    monkeypatch.setattr(local_pod.Job, "stop", lambda job, limit_s: limits.append(limit_s))
    pod = local_pod.Pod("r.yaml", (), tmp_path, 1, 1, {"actor": 2}, (3,), grace_s=60.0, stall_s=0.0)
    assert local_pod.Job(pod, "actor", {}, Commands()).settle(0.0) == []
    assert limits[0] > pod.grace_s  # sooner, and the trainer is left running with the lock of its folder


@pytest.mark.parametrize("used", ["by another pod", "by a file"])
def test_a_folder_that_cannot_be_used_is_refused_before_anything_starts(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], used: str
) -> None:
    monkeypatch.setattr(local_pod, "_started", lambda *_: pytest.fail("something was started"))
    folder = tmp_path / "pod"
    with local_pod._claimed(folder):
        where = folder if used == "by another pod" else folder / "lock"
        assert local_pod.main(["--folder", str(where)]) == 2
    said = capsys.readouterr().err
    assert ("another local_pod runs in" if used == "by another pod" else "cannot write in") in said
    assert "--folder" in said
    with local_pod._claimed(folder):
        pass  # free again


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent was killed")
def test_T03_what_a_killed_pod_had_started_is_told_to_stop() -> None:
    child = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: (print('told', flush=True), sys.exit())); "
    child += "print('ready', flush=True); time.sleep(60)"
    pod = f"""
import os, sys, time
from launch import local_pod
from launch.cloud.commands import Commands
local_pod._started([sys.executable, "-c", {child!r}], dict(os.environ), 1, Commands())
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", pod], cwd=local_pod.ROOT, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert any(line == "ready\n" for line in parent.stdout)
        began = time.monotonic()
        parent.send_signal(signal.SIGKILL)
        assert parent.stdout.read() == "told\n"  # and no longer open
        assert time.monotonic() - began < 30


def test_settings_that_nobody_knows_start_nothing(capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path) -> None:
    assert local_pod.main(["configs/local_pod.yaml", "run.stepz=2", "--folder", str(tmp_path / "pod")]) == 2
    assert "run.steps" in capsys.readouterr().err
    assert not (tmp_path / "pod").exists()
