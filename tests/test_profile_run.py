"""`crl profile FOLDER`: the signal reaches the run that trains there, and only one that listens."""

import os
import pathlib
import socket
from collections.abc import Iterator

import pytest

from crl_jax import cli, run_folder
from crl_jax.config.load import parse_text
from crl_jax.telemetry.capture import Capture
from crl_jax.telemetry.profiler import ProfilerWindow


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> Iterator[pathlib.Path]:
    """The folder of a run that this process trains in, or says so."""
    config = parse_text(f"env: {{family: dungeon}}\nrun: {{dir: {tmp_path}, name: r}}\ntelemetry: {{profile_signal_steps: 3}}\n")
    with run_folder.claim(config, resume=False) as claimed:
        run_folder.write_config(claimed, config)
        yield claimed


def test_a_run_is_asked_and_told_apart_by_its_lock(folder: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    calls: list[str] = []
    said: list[str] = []
    capture = Capture(folder / "tensorboard", start=lambda _: calls.append("start"), stop=lambda: calls.append("stop"))
    with ProfilerWindow(capture, signal_steps=3, say=said.append) as profiler:
        profiler.before(0)
        assert cli.main(["profile", str(folder)]) == 0
        told = capsys.readouterr().out
        assert f"asked process {os.getpid()} for a trace of 3 steps from the next one on" in told
        assert str(folder / "tensorboard" / "plugins" / "profile") in told
        assert "profiling the next 3 steps (SIGUSR1)" in said[0]
        for step in range(1, 5):
            profiler.before(step)
    assert calls == ["start", "stop"]


def test_a_run_that_does_not_listen_is_left_alone(folder: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["profile", str(folder)]) == 1  # the signal would have ended this process
    assert "does not listen to SIGUSR1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("written", "told"),
    [
        pytest.param("17 elsewhere\n", "is 17 on elsewhere: give the same command there", id="another-machine"),
        pytest.param("", "is only starting: try again", id="starting"),
        pytest.param(f"4194304 {socket.gethostname()}\n", "process 4194304 is not there", id="gone"),
    ],
)
def test_a_run_that_cannot_be_asked_is_an_error(folder: pathlib.Path, capsys, written: str, told: str) -> None:
    (folder / "lock").write_text(written)
    assert cli.main(["profile", str(folder)]) == 1
    assert told in capsys.readouterr().err


def test_a_folder_in_which_nothing_runs_is_named(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["profile", str(tmp_path / "none")]) == 1
    assert "is no folder of a run that runs" in capsys.readouterr().err
    (tmp_path / "lock").write_text(f"{os.getpid()} {socket.gethostname()}\n")  # of a run that has ended
    assert cli.main(["profile", str(tmp_path)]) == 1
    assert "no process trains in" in capsys.readouterr().err
