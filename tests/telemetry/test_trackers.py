"""Trackers: combinations, Sums, kills."""

import json
import pathlib

import pytest

from crl_jax.records import Sum
from crl_jax.telemetry.histogram import Histogram
from crl_jax.telemetry.joined import join_rows, pack_row
from crl_jax.telemetry.tracker import JsonlTracker, open_trackers, read_jsonl


@pytest.mark.parametrize("tensorboard", [False, True])
@pytest.mark.parametrize("jsonl", [False, True])
def test_M08_every_combination_of_trackers_runs(tmp_path: pathlib.Path, jsonl: bool, tensorboard: bool) -> None:
    tracker = open_trackers(tmp_path, jsonl=jsonl, tensorboard=tensorboard)
    for step in range(3):
        tracker.log(step, {"success/free": Sum(1, 2), "loss": 0.5})
        tracker.text(step, "episode", "north\nsouth")
    tracker.close()
    tracker.close()
    assert (tmp_path / "metrics.jsonl").exists() == jsonl
    assert any((tmp_path / "tensorboard").glob("events*")) == tensorboard if tensorboard else not (tmp_path / "tensorboard").exists()


def test_sums_become_means_only_here_and_empty_sums_are_left_out(tmp_path: pathlib.Path) -> None:
    tracker = JsonlTracker(tmp_path / "m.jsonl")
    tracker.log(1, {"a": Sum(3, 1) + Sum(3, 3), "b": Sum(0, 0), "c": 2})
    tracker.close()
    assert read_jsonl(tmp_path / "m.jsonl") == [{"step": 1, "kind": "metrics", "a": 1.5, "c": 2.0}]


def test_each_step_is_on_disk_before_the_next_begins(tmp_path: pathlib.Path) -> None:
    tracker = JsonlTracker(tmp_path / "m.jsonl")
    tracker.log(1, {"a": 1})
    assert len(read_jsonl(tmp_path / "m.jsonl")) == 1, "not flushed"
    tracker.close()


def test_a_torn_line_is_dropped_and_a_resumed_run_goes_on_below_it(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1, "kind": "metrics", "a": 1}\n{"step": 2, "ki')
    assert [r["step"] for r in read_jsonl(path)] == [1]
    tracker = JsonlTracker(path)
    tracker.log(2, {"a": 2})
    tracker.close()
    assert [r["step"] for r in read_jsonl(path)] == [1, 2]


def test_a_line_that_is_no_torn_metrics_line_is_an_error(tmp_path: pathlib.Path) -> None:
    (tmp_path / "m.jsonl").write_text("hello\n")
    with pytest.raises(ValueError, match=r"m\.jsonl:1"):
        read_jsonl(tmp_path / "m.jsonl")


def test_nan_survives_as_valid_json(tmp_path: pathlib.Path) -> None:
    tracker = JsonlTracker(tmp_path / "m.jsonl")
    tracker.log(1, {"loss": float("nan"), "x": float("-inf")})
    tracker.close()
    json.loads((tmp_path / "m.jsonl").read_text(), parse_constant=lambda c: pytest.fail(f"{c} is not JSON"))
    (row,) = read_jsonl(tmp_path / "m.jsonl")
    assert row["loss"] != row["loss"]
    assert row["x"] == float("-inf")


def test_a_histogram_is_shown_by_ranges_in_both_trackers(tmp_path: pathlib.Path) -> None:
    lags = Histogram.of([0, 0, 1, 5]) + Histogram.of([5, 7, 40])
    assert lags == Histogram({0: 2, 1: 1, 5: 2, 7: 1, 40: 1})
    tracker = open_trackers(tmp_path)
    tracker.log(1, {"lag/episodes": lags, "lag/none": Histogram.of([])})
    tracker.close()
    (row,) = read_jsonl(tmp_path / "metrics.jsonl")
    expected = {"0": 2, "1": 1, "2": 0, "3": 0, "4_7": 3, "8_15": 0, "16_up": 1}
    assert row == {"step": 1, "kind": "metrics"} | {f"lag/episodes/{name}": count for name, count in expected.items()}

    loader = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader", reason="TensorBoard reads what was written")
    (events,) = (tmp_path / "tensorboard").glob("events*")
    values = [v for event in loader.LegacyEventFileLoader(str(events)).Load() for v in event.summary.value]
    assert {v.tag: v.simple_value for v in values if v.HasField("simple_value")} == {f"lag/episodes/{n}": c for n, c in expected.items()}
    (histo,) = (v.histo for v in values if v.HasField("histo"))
    assert (histo.num, histo.sum, histo.min, histo.max) == (7, 58, 0, 40)
    assert {limit - 0.5: n for limit, n in zip(histo.bucket_limit, histo.bucket, strict=True) if n} == {0: 2, 1: 1, 5: 2, 7: 1, 40: 1}


def test_histograms_of_several_processes_are_one() -> None:
    rows = [{"lag/episodes": Histogram.of([0, 1])}, {"lag/episodes": Histogram.of([1, 9])}, {"lag/episodes": Histogram.of([])}]
    packed = [json.loads(json.dumps(pack_row(row))) for row in rows]
    assert join_rows(packed) == {"lag/episodes": Histogram({0: 1, 1: 2, 9: 1})}
