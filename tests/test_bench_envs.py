"""The environments' benchmarks: intervals, what passes, the share of a run, and a small real measurement."""

import json
import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent / "bench"))

import bench_envs
import envs_success
from envs_speed import Speed, share_of_run
from envs_success import Row, wilson


@pytest.mark.parametrize(
    ("won", "played", "low", "high"),
    [(0, 10, 0.0, 0.27753), (10, 10, 0.72247, 1.0), (1, 10, 0.01788, 0.40415), (81, 263, 0.25529, 0.36624)],
)
def test_wilson_s_interval_is_the_published_one(won, played, low, high):
    assert wilson(won, played) == pytest.approx((low, high), abs=1e-4)


def test_an_expert_must_reach_its_bound_and_beat_chance():
    def row(expert, random, bound=0.95):
        return Row("toy/x", {"expert": [expert, 100, 5.0], "random": [random, 100, 9.0]}, bound, "real")

    assert row(95, 94).passed
    assert not row(94, 0).passed
    assert row(80, 5, bound=0.8).passed
    assert not row(97, 97).passed
    assert row(97, 97).expert == 0.97
    assert Row("toy/x", {"random": [5, 100, 9.0]}, 0.95, "real").expert is None


def test_the_share_of_a_run_survives_a_resume(tmp_path):
    rows = [(1, 1.0, 10.0), (2, 2.0, 10.0), (2, 3.0, 20.0), (3, 0.5, 20.0)]  # step 2 was run twice, then the process was another
    lines = [json.dumps({"step": step, "env/busy_s": busy, "rollout/collect_s": collect}) for step, busy, collect in rows]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    assert share_of_run(tmp_path)["share"] == pytest.approx(3.5 / 50)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    assert "hold no step" in share_of_run(tmp_path)["unknown"]
    assert "metrics.jsonl" in share_of_run(tmp_path / "none")["unknown"]


def test_both_print_one_object_last(monkeypatch, tmp_path, capsys):
    speed = Speed("dungeon/x", 2000.0, 1800.0, 300.0, 0.01, 3.0, 170.0, 64, 2, 3000.0, 0.9, 340.0, 0)
    row = Row("dungeon/x", {"random": [1, 20, 8.0], "expert": [20, 20, 4.0]}, 0.95, "real")
    answers = {"speed": vars(speed), "success": {"rows": [vars(row)]}}
    monkeypatch.setattr(bench_envs, "_child", lambda family, args: {"unavailable": "no"} if family == "minihack" else answers[args.what])
    for what, value in (("speed", None), ("success", 1.0)):
        out = tmp_path / f"{what}.json"
        assert bench_envs.main([what, "dungeon", "minihack", "--run", str(tmp_path), "--out", str(out)]) == 0
        printed = capsys.readouterr().out.splitlines()
        assert "not installed: minihack (no)" in printed
        assert json.loads(printed[-1]) == json.loads(out.read_text())
        assert json.loads(printed[-1])["value"] == value
        assert {"name", "value", "unit", "goal", "pass", "commit", "command", "machine"} <= set(json.loads(printed[-1]))


def test_success_of_the_dungeons_players():
    pytest.importorskip("nle")
    pytest.importorskip("minihack")
    (row,) = [Row(**found) for found in envs_success.measure_success("dungeon", 20, 60.0)]
    assert set(row.players) == {"random", "explore", "expert", "follow right", "follow wrong"}
    assert row.players["expert"][:2] == [20, 20]
    assert row.passed
    assert "follow wrong" in row.shown()
