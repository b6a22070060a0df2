"""The comparison of a study: areas, intervals, and reading curves from metrics files."""

import json
import os
import signal
import sys

import numpy as np
import pytest

from crl_jax import cli, study
from crl_jax.study import Curve, StudyError, compare, interval, plot, read_curve, run_missing


def test_area_is_the_mean_of_a_constant_and_half_of_a_ramp():
    assert Curve(np.array([0.0, 10.0]), np.array([0.4, 0.4])).area(10) == pytest.approx(0.4)
    assert Curve(np.array([0.0, 10.0]), np.array([0.0, 1.0])).area(10) == pytest.approx(0.5)
    assert Curve(np.array([0.0, 10.0]), np.array([0.0, 1.0])).area(5) == pytest.approx(0.25)


def test_interval_is_student_t():
    mean, half = interval([1.0, 2.0, 3.0])
    assert mean == 2
    assert half == pytest.approx(4.303 / np.sqrt(3), rel=1e-3)
    assert np.isnan(interval([1.0])[1])


def _write(folder, final):
    folder.mkdir(parents=True)
    rows = [{"step": 0, "eval/known/without/sampled": 0.2, "eval/known/with/sampled": 0.2}]
    for step in (1, 2):
        rows.append({"step": step, "eval/known/without/sampled": final * step / 2, "eval/known/with/sampled": final * step / 2})
        rows.append({"step": step, "env_steps": 100 * step})
    (folder / "metrics.jsonl").write_text("\n".join(json.dumps({"kind": "metrics"} | row) for row in rows) + "\n")


def test_methods_are_compared_at_equal_environment_steps(tmp_path):
    for seed in (0, 1):
        _write(tmp_path / f"baseline-s{seed}", 0.4)
        _write(tmp_path / f"complementary-s{seed}", 0.8)
    table = compare(tmp_path, ["baseline", "complementary"], [0, 1])
    assert table["env_steps"] == 200
    assert set(table["lines"]) == {"baseline", "complementary, with experience", "complementary, without"}
    assert table["lines"]["baseline"]["final"] == (0.4, 0.0)
    assert table["lines"]["complementary, with experience"]["area"][0] > table["lines"]["baseline"]["area"][0]
    plot(table, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000


def test_a_run_without_evaluations_is_refused(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"kind": "metrics", "step": 1, "env_steps": 5}) + "\n")
    with pytest.raises(ValueError, match="eval_every"):
        read_curve(tmp_path / "metrics.jsonl", "eval/known/with/sampled")


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "study.yaml"
    path.write_text(f"env: {{family: dungeon}}\nrun: {{dir: {tmp_path}, name: s, steps: 2}}\n")
    return path


@pytest.mark.parametrize(
    ("words", "message"),
    [
        pytest.param(["--methods", "nope"], "methods of complementary, baseline, static, exp_only", id="method"),
        pytest.param(["--methods", "baseline,baseline"], "name each once", id="method-twice"),
        pytest.param(["--seeds", "0,0"], "name each once", id="seed-twice"),
        pytest.param(["--seeds", "-1"], "`run.seed`: must be 0 or more", id="seed"),
        pytest.param(["--jobs", "0"], "use 1 or more", id="jobs"),
        pytest.param(["run.eval_modes=[greedy]"], "add sampled to run.eval_modes", id="modes"),
        pytest.param(["bank.top_k=0"], "`bank.top_k`", id="recipe"),
    ],
)
def test_what_cannot_end_well_is_refused_before_a_run_starts(words, message, recipe, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/no/such/program")
    assert cli.main(["study", str(recipe), *words]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [recipe]


def test_a_failed_run_stops_no_other_and_is_named_with_its_log(recipe, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    _write(tmp_path / "s" / "baseline-s1", 0.4)
    with pytest.raises(StudyError, match=r"(?s)complementary-s0 ended with exit code 1: see .*complementary-s1.*start the study again"):
        run_missing(recipe, [], ["complementary", "baseline"], [0, 1], jobs=1)
    assert "baseline-s1: already finished" in capsys.readouterr().out
    assert (tmp_path / "s" / "complementary-s1" / "log.txt").exists()


def test_an_interrupted_study_ends_its_runs_and_starts_no_more(recipe, tmp_path, monkeypatch):
    program = tmp_path / "train"
    program.write_text("#!/bin/sh\nexec sleep 20\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    started = []
    popen = study.subprocess.Popen

    def start(*args, **kwargs):
        started.append(popen(*args, **kwargs))
        os.kill(os.getpid(), signal.SIGTERM)  # to the process, so that it wakes the main thread
        return started[-1]

    monkeypatch.setattr(study.subprocess, "Popen", start)
    with pytest.raises(SystemExit) as stop:
        run_missing(recipe, [], ["baseline"], [0, 1, 2], jobs=1)
    assert stop.value.code == 128 + signal.SIGTERM
    assert [process.wait(10) for process in started] == [-signal.SIGTERM]


def test_a_study_without_the_two_main_methods_has_no_gain(recipe, tmp_path, capsys, monkeypatch):
    _write(tmp_path / "s" / "baseline-s0", 0.4)
    monkeypatch.setattr(study.registry, "tasks", lambda family, split: ())
    assert cli.main(["study", str(recipe), "--methods", "baseline", "--seeds", "0", "--out", str(tmp_path / "out.json")]) == 0
    assert json.loads((tmp_path / "out.json").read_text())["value"] is None
