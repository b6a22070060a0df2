"""The schedule's benchmark on runs whose metrics were written by hand."""

import json
import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent / "bench"))

import bench_schedule

from crl_jax.config.load import parse_text, to_yaml

RECIPE = """
env: {family: dungeon, workers: 1}
run: {steps: 9, groups_per_step: 1, group_size: 4}
bank: {merge_every: 0}
extractor: {batch_size: 2, buffer_capacity: 8}
"""
LAGS = {"lag/mean": 1.0, "lag/max": 1.0, "lag/tokens/0": 30.0, "lag/tokens/1": 10.0, "extractor/lag": 2.0}


def write_run(folder: pathlib.Path, mode: str, step_s: float, collect_s: float) -> None:
    made = folder / mode
    made.mkdir()
    in_turn = mode == "sync"
    (made / "config.yaml").write_text(to_yaml(parse_text(RECIPE, [f"run.sync={in_turn}".lower(), f"run.max_lag={int(not in_turn)}"])))
    counted = {"env/busy_s": 0.06, "env/steps": 8.0, "env/resets": 4.0, "bank/submitted": 4.0, "bank/entries_written": 3.0}
    row = {"kind": "metrics", "step_s": step_s, "rollout/collect_s": collect_s, "rollout/turns": 2.0, "rollout/sampled_tokens": 40.0}
    row |= {"phase_s/collect": collect_s, "phase_s/bank": 0.5, "phase_s/actor_step": 0.5, "extractor/busy_s": 0.0}
    rows = [row | LAGS | {"step": n} | {name: value * n for name, value in counted.items()} for n in range(1, 10)]
    (made / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))


def test_predictions_stand_beside_what_was_measured(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path, "sync", 2.0, 1.0)  # 1 s of rollout, half a second of lessons, half a second of learning
    write_run(tmp_path, "async", 1.2, 1.1)
    out = tmp_path / "schedule.json"
    assert bench_schedule.main(["--runs", str(tmp_path), "--environments", "2", "--out", str(out)]) == 0
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert printed == json.loads(out.read_text())
    assert {"name", "value", "unit", "goal", "pass", "commit", "command", "machine"} <= set(printed)
    found = printed["details"]
    assert found["sync"]["predicted_s"] == pytest.approx(2.0, rel=0.01)
    assert found["async"]["predicted_s"] == pytest.approx(1.2, rel=0.02), "the capacity is what makes it so"
    assert found["async"]["if_each_part_has_a_device_s"] < 1.2
    assert found["lag"]["measured"] == {"episodes_mean": 1.0, "episodes_max": 1.0, "tokens_not_newest": 0.25, "generations_mean": 2.0}
    assert found["lag"]["predicted"]["episodes_max"] == 1
    assert [o["environments"] for o in found["built_in_workload"]] == [2, 2]
