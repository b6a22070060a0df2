"""Where the time went, against sums by hand; and the log of processes it is made from."""

import json
import pathlib

import pytest

from crl_jax.telemetry.processes import PROCESSES, ProcessLog, process_age_s
from crl_jax.telemetry.report import make_report, show_report
from crl_jax.telemetry.tracker import JsonlTracker, open_trackers, read_jsonl
from crl_jax.telemetry.wall_time import Part, show, wall_time


def event(kind: str, at_s: float, **more: float) -> dict[str, object]:
    return {"event": kind, "at_s": at_s, **more}


KILLED = [
    event("begin", 100.0),
    event("step", 120.0, step=1, step_s=15.0),
    event("step", 130.0, step=2, step_s=10.0),
    event("step", 140.0, step=3, step_s=10.0),  # killed some time after this
    event("begin", 160.0),
    event("resume", 170.0, step=1),  # steps 2 and 3 come again
    event("step", 182.0, step=2, step_s=18.0),
    event("step", 190.0, step=3, step_s=8.0),
    event("end", 200.0),
]


def test_goodput_counts_every_step_once_over_all_processes() -> None:
    rows = [{"phase_s/start": 3.0, "phase_s/collect": 12.0}, {"phase_s/start": 4.0, "phase_s/restore": 2.0, "phase_s/collect": 20.0}]
    wall = wall_time(rows, KILLED).wall
    assert wall is not None
    assert (wall.processes, wall.killed, wall.total_s) == (2, 1, 100.0)
    assert (wall.twice_s, wall.twice_steps) == (20.0, 2)
    assert wall.apart_s == 9.0
    assert wall.counted_s == 15 + 18 + 8 - 9
    assert wall.rest_s == 100 - 41 - 20
    assert wall.goodput == pytest.approx(0.32)
    assert wall.counted_s + wall.apart_s + wall.twice_s + wall.rest_s == wall.total_s


def test_a_run_that_was_killed_twice_before_the_same_step_loses_it_twice() -> None:
    events = [*KILLED[:3], event("begin", 160.0), event("resume", 161.0, step=1), event("step", 170.0, step=2, step_s=9.0)]
    events += [event("begin", 200.0), event("resume", 201.0, step=1), event("step", 220.0, step=2, step_s=10.0)]
    wall = wall_time([], events).wall
    assert wall is not None
    assert (wall.processes, wall.killed) == (3, 3)
    assert (wall.counted_s, wall.twice_s, wall.total_s) == (25.0, 19.0, 120.0)


ROWS = [
    {"phase_s/collect": 6.0, "phase_s/actor_step": 4.0, "serve/actor/busy_s": 5.0, "serve/actor/queue_wait_s": 1.0, "extractor/busy_s": 0.0}
    | {"checkpoint/wait_s": 1.0, "checkpoint/copy_s": 0.5, "checkpoint/write_s": 2.0, "rollout/collect_s": 9.0, "env/busy_s": 2.0}
    | {"publish/actor/version": 1, "publish/actor/seconds": 0.25},
    {"phase_s/collect": 2.0, "phase_s/actor_step": 8.0, "serve/actor/busy_s": 9.0, "serve/actor/queue_wait_s": 1.5, "extractor/busy_s": 3.0}
    | {"checkpoint/wait_s": 0.5, "checkpoint/copy_s": 0.25, "checkpoint/write_s": 1.0, "rollout/collect_s": 8.0, "env/busy_s": 3.0}
    | {"publish/actor/version": 1, "publish/actor/seconds": 0.25},  # nothing was trained, so nothing was published
    {"phase_s/other": 20.0, "publish/actor/version": 2, "publish/actor/seconds": 0.5},
]


def test_what_was_done_beside_and_what_waited() -> None:
    found = wall_time(ROWS, [])
    assert found.wall is None
    assert found.phases == {"other": 20.0, "actor_step": 12.0, "collect": 8.0}
    parts = {part.name: part for part in found.beside}
    assert parts["rollouts under way"].seconds == 17.0
    assert parts["actor's sampler busy"] == Part(
        "actor's sampler busy", 9.0, 9 / 40, "its requests waited 1.5 s for a slot (sum over requests)"
    )
    assert parts["extractor's updates"].seconds == 3.0
    assert parts["environments busy"].share == 3 / 40
    assert parts["publishing the actor"].seconds == 0.75
    assert parts["writing checkpoints"].seconds == 3.0, "the counter began again with the second process"
    assert parts["writing checkpoints"].note == "the learner waited 1.5 s and copied 0.8 s"
    assert "extractor's sampler busy" not in parts, "not measured, so not shown"


def test_the_table_says_what_each_phase_waited_for() -> None:
    text = "\n".join(show(wall_time(ROWS, KILLED)))
    assert "wall time 100 s, 1 restart (1 without a word of the end: killed, or still running); goodput 41.0 %" in text
    assert "done twice                 20.0 s   20.0 %  2 steps were taken again" in text
    assert "collect                     8.0 s   20.0 %  waited for episodes" in text
    assert "actor's sampler busy        9.0 s   22.5 %" in text


def test_the_log_keeps_the_steps_that_the_metrics_drop(tmp_path: pathlib.Path) -> None:
    clock = iter(float(n) for n in range(100, 200))
    path = tmp_path / PROCESSES
    for resumed in (False, True):
        log = ProcessLog(path, now=lambda: next(clock), age_s=lambda: 2.5)
        if resumed:
            log.rewind(1)
        log.log(0, {"eval/known": 0.5})  # no step
        for step in (2, 3) if resumed else (1, 2):
            log.log(step, {"step_s": 1.5})
            log.text(step, "episode", "north")
        if resumed:
            log.close()
            log.close()
        else:
            path.open("a").write('{"event": "st')  # torn by a kill
    rows = read_jsonl(path)
    assert [(row["event"], row.get("step")) for row in rows] == [
        *(("begin", None), ("step", 1), ("step", 2), ("begin", None)),
        *(("resume", 1), ("step", 2), ("step", 3), ("end", None)),
    ]
    assert rows[0]["at_s"] == 97.5
    wall = wall_time([], rows).wall
    assert wall is not None
    assert (wall.counted_s, wall.twice_s) == (4.5, 1.5)


def test_a_process_knows_its_age() -> None:
    assert 0 < process_age_s() < 7 * 24 * 3600


def test_the_report_of_a_resumed_run_has_both_tables_and_one_of_an_older_run_the_second(tmp_path: pathlib.Path) -> None:
    trackers = open_trackers(tmp_path, tensorboard=False)
    for step in (1, 2):
        trackers.log(step, {"success/free": 0.5, "step_s": 2.0, "phase_s/collect": 2.0, "host/peak_rss_gib": 1.5, "device/peak_gib": 30.0})
    trackers.close()
    text = show_report(make_report(tmp_path / "metrics.jsonl", name="r"))
    assert "0 restarts; goodput" in text
    assert "peak memory 1.5 GiB of the process, 30.0 GiB of a device" in text
    assert json.dumps(make_report(tmp_path / "metrics.jsonl", name="r").to_json())
    (tmp_path / PROCESSES).unlink()
    text = show_report(make_report(tmp_path / "metrics.jsonl", name="r"))
    assert "goodput" not in text
    assert "the learner's thread, 4 s" in text


def test_metrics_without_time_make_no_table(tmp_path: pathlib.Path) -> None:
    tracker = JsonlTracker(tmp_path / "metrics.jsonl")
    tracker.log(1, {"success/free": 0.5})
    tracker.close()
    assert "thread" not in show_report(make_report(tmp_path / "metrics.jsonl", name="r"))
