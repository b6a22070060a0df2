"""The report is made from the file alone; the result object is one JSON line."""

import json
import pathlib
import subprocess

import pytest

from crl_jax.records import Sum
from crl_jax.telemetry.progress import progress_line
from crl_jax.telemetry.report import Evaluation, make_report, show_report
from crl_jax.telemetry.result import Result, command_line, emit, git_commit, machine_facts
from crl_jax.telemetry.tracker import JsonlTracker


@pytest.fixture
def metrics(tmp_path: pathlib.Path) -> pathlib.Path:
    tracker = JsonlTracker(tmp_path / "metrics.jsonl")
    tracker.log(0, {"eval/known/with/greedy": 0.25, "eval/known/without/greedy": 0.25, "eval/known/with/greedy/turns": 7})
    for step in range(1, 13):
        tracker.log(step, {"success/guided": step / 12, "success/free": 0.5, "bank/size": 10 * step, "extractor/version": step // 4})
    tracker.log(12, {"eval/known/with/greedy": 0.75, "eval/known/without/greedy": 0.5, "eval/heldout/without/greedy": 0.125})
    tracker.close()
    return tmp_path / "metrics.jsonl"


def test_buckets_cover_every_step_once(metrics: pathlib.Path) -> None:
    report = make_report(metrics, name="r", seed=7)
    assert report.steps == 12
    assert [(b.first, b.last) for b in report.buckets] == [(1, 2), (3, 4), (5, 6), (7, 8), (9, 10), (11, 12)]
    assert report.buckets[0].guided == pytest.approx(1.5 / 12)
    assert report.buckets[-1].bank_size == 120
    assert report.buckets[-1].extractor_updates == 3
    assert report.evaluations == (
        Evaluation("heldout", "greedy", 12, None, 0.125),
        Evaluation("known", "greedy", 0, 0.25, 0.25),
        Evaluation("known", "greedy", 12, 0.75, 0.5),
    )
    text = show_report(report)
    assert "seed 7" in text
    assert "(+0.500)" in text
    assert "(+0.250)" in text


def test_a_short_run_has_fewer_buckets_and_a_rerun_step_counts_once(tmp_path: pathlib.Path) -> None:
    tracker = JsonlTracker(tmp_path / "m.jsonl")
    for step, value in ((1, 0.0), (2, 0.0), (2, 1.0)):
        tracker.log(step, {"success/free": value})
    tracker.close()
    report = make_report(tmp_path / "m.jsonl", name="r")
    assert [b.free for b in report.buckets] == [0.0, 1.0]
    assert "-" in show_report(report)


def test_a_file_without_steps_is_an_error(tmp_path: pathlib.Path) -> None:
    (tmp_path / "m.jsonl").write_text("")
    with pytest.raises(ValueError, match="no step"):
        make_report(tmp_path / "m.jsonl", name="r")


def test_the_progress_line_shows_missing_numbers_as_dashes() -> None:
    line = progress_line(3, 40, {"success/guided": Sum(1, 2), "bank/size": 12}, {"rollout": 2.0, "learn": 0.9, "tiny": 0.01, "other": 0.09})
    assert line == "step  3/40  guided 0.50 free    -  bank   12  lag   -  tok/s     -  3.0s = rollout 2.0 learn 0.9 other 0.1"


def test_the_result_is_the_last_line_and_the_file(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    print("before")
    emit(Result("speed", float("nan"), "tok/s", goal=">= 1", passed=False, details={"a": (1, float("inf"))}), tmp_path / "out" / "r.json")
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last == json.loads((tmp_path / "out" / "r.json").read_text())
    assert last["value"] is None
    assert last["pass"] is False
    assert last["details"] == {"a": [1, None]}
    assert set(last) == {"name", "value", "unit", "goal", "pass", "command", "commit", "machine", "details"}


def test_machine_facts_and_commit(tmp_path: pathlib.Path) -> None:
    facts = machine_facts()
    assert facts["cores"] >= 1
    assert facts["cpu"]
    assert facts["jax"]
    assert git_commit(tmp_path) == ""


def test_the_command_of_a_result_names_no_folder_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/somewhere/crl_jax/cli.py", "study", "configs/study_micro.yaml"])
    assert command_line() == "crl study configs/study_micro.yaml"
    monkeypatch.setattr("sys.argv", ["/somewhere/bin/pytest", "-q"])
    assert command_line() == "python pytest -q"
    monkeypatch.setattr("sys.argv", [str(pathlib.Path(__file__)), "x"])
    assert command_line() == "python tests/telemetry/test_report_and_result.py x"


def test_results_being_written_do_not_make_the_source_look_changed(tmp_path: pathlib.Path) -> None:
    def git(*args: str) -> None:
        subprocess.run(["git", "-C", str(tmp_path), *args], check=True, capture_output=True)

    git("init", "-q")
    git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "--allow-empty", "-m", "start")
    (tmp_path / "docs" / "results").mkdir(parents=True)
    (tmp_path / "docs" / "results" / "x.json").write_text("{}")
    assert not git_commit(tmp_path).endswith("+")
    (tmp_path / "new.py").write_text("")
    assert git_commit(tmp_path).endswith("+")
