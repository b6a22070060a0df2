"""Counters and files of metrics that go on in another process."""

import pathlib

import pytest

from crl_jax.telemetry.exact import exact
from crl_jax.telemetry.totals import Totals
from crl_jax.telemetry.tracker import JsonlTracker, open_trackers, read_jsonl


def test_counters_go_on_and_gauges_do_not() -> None:
    before, after = Totals(), Totals()
    before.of({"bank/searches": 3, "bank/entries": 5, "env/steps": 10, "success/free": 0.5})
    row = before.of({"bank/searches": 7, "bank/entries": 6, "env/steps": 20, "serve/actor/swaps": 2, "bank/buffer_credits": 4})
    assert row == {"bank/searches": 7, "bank/entries": 6, "env/steps": 20, "serve/actor/swaps": 2, "bank/buffer_credits": 4}
    assert before.newest == {"bank/searches": 7, "env/steps": 20, "serve/actor/swaps": 2}
    after.go_on(before.newest, {"serve/actor/swaps": 1, "bank/entries": 6, "bank/embed_calls": 2})  # what the start itself counted
    row = after.of({"bank/searches": 1, "bank/entries": 7, "serve/actor/swaps": 2, "bank/embed_calls": 2, "bank/buffer_credits": 5})
    assert row == {
        "bank/searches": 8,
        "bank/entries": 7,
        "env/steps": 20,
        "serve/actor/swaps": 3,
        "bank/buffer_credits": 5,
    }


def test_a_counter_that_only_the_start_moved_is_not_in_the_totals() -> None:
    totals = Totals()
    totals.go_on({"bank/a": 0}, {"bank/a": 4, "bank/b": 4})
    totals.of({"bank/a": 4, "bank/b": 4, "bank/c": 0})
    assert totals.newest == {"bank/a": 0, "bank/c": 0}


def test_what_a_seed_fixes_is_told_from_time_and_from_how_work_was_batched() -> None:
    fixed = {
        "actor/loss": 1,
        "bank/searches": 2,
        "serve/actor/decoded_tokens": 3,
        "success/guided": 4,
        "env_steps": 5,
        "rollout_x/turns": 6,
    }
    other = ("step_s", "phase_s/collect", "rollout/collect_s", "host/peak_rss_gib", "bank/search_sizes_to_4", "serve/actor/busy_s")
    other += ("serve/extractor/extend_dispatches", "publish/actor/seconds", "checkpoint/waits", "env/made", "env/memory_mib")
    assert exact(fixed | dict.fromkeys(other, 0)) == fixed


@pytest.mark.parametrize(
    ("steps", "left"),
    [
        pytest.param(1, [("metrics", 0), ("text", 0), ("metrics", 1)], id="one-step"),
        pytest.param(0, [], id="from-the-start"),
        pytest.param(2, [("metrics", 0), ("text", 0), ("metrics", 1), ("text", 1), ("metrics", 2)], id="nothing-to-drop"),
    ],
)
def test_rows_of_steps_that_come_again_leave_the_file(steps: int, left: list[tuple[str, int]], tmp_path: pathlib.Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tracker = JsonlTracker(path)
    tracker.log(0, {"eval/known": 0.5})
    for step in (0, 1):
        tracker.text(step, "episode", "north")
        tracker.log(step + 1, {"loss": step})
    tracker.close()
    with path.open("a") as file:
        file.write('{"step": 3, "ki')  # torn by the kill
    tracker = JsonlTracker(path)
    tracker.rewind(steps)
    tracker.log(9, {"loss": 9})
    tracker.close()
    assert [(row["kind"], row["step"]) for row in read_jsonl(path)] == [*left, ("metrics", 9)]


def test_tensorboard_is_told_to_forget_what_comes_again(tmp_path: pathlib.Path) -> None:
    first = open_trackers(tmp_path)
    first.log(1, {"a": 1.0})
    first.log(2, {"a": 2.0})
    first.close()
    again = open_trackers(tmp_path)
    again.rewind(1)
    again.log(2, {"a": 3.0})
    again.close()
    assert [row["a"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == [1.0, 3.0]
    assert len(list((tmp_path / "tensorboard").glob("events*"))) >= 1
