"""The benchmark of the bank's search on a small load: what it reports, and what it calls reached."""

import json
import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent / "bench"))

import bank_load
import bench_bank


def test_a_small_run_reports_every_goal(monkeypatch, tmp_path, capsys):
    for name in ("CLIENTS", "DIM"):
        monkeypatch.setattr(bank_load, name, 32)
    monkeypatch.setattr(
        sys, "argv", ["bench_bank.py", "--entries", "2100", "--seconds", "0.8", "--rounds", "1", "--out", str(tmp_path / "r.json")]
    )
    bench_bank.main()
    row = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert row == json.loads((tmp_path / "r.json").read_text())
    assert row["name"] == "bench_bank"
    goals = row["details"]["goals"]
    assert set(goals) == {
        "throughput_ratio_2100",
        "added_p99_ms_2100",
        "rebuild_p50_ratio_2100",
        "rebuild_p99_ratio_2100",
        "merge_p50_ratio_2100",
        "merge_p99_ratio_2100",
    }
    assert row["pass"] is all(goal["pass"] for goal in goals.values())
    found = row["details"]["entries"]["2100"]
    assert found["index"]["builds"] >= 2
    assert found["index"]["recall"] >= 0.98
    assert found["beside"]["merges"] > 10
    assert found["throughput"]["service_per_s"] > 0
    assert found["latency"]["added"]["queries"] > 0


@pytest.mark.parametrize(
    ("ratio", "p99", "beside", "good"), [(0.8, 10.0, 1.5, True), (0.79, 10.0, 1.5, False), (0.8, 10.1, 1.5, False), (0.8, 1.0, 1.6, False)]
)
def test_goals(ratio, p99, beside, good):
    row = {"p50_ratio": beside, "p99_ratio": 1.0}
    found = {"throughput": {"service_ratio": ratio}, "latency": {"added": {"p99_ms": p99}}, "beside": {"rebuild": row, "merge": row}}
    goals = bench_bank.goals_of({20_000: found})
    assert all(goal["pass"] for goal in goals.values()) is good
    large = bench_bank.goals_of({200_000: found})
    assert "added_p99_ms_200000" not in large
