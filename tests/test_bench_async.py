"""The benchmark of asynchrony: which seconds count, what is charged, the intervals, the waits, and a process's CPU time."""

import json
import math
import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent / "bench"))

import async_vs_sync
from async_rows import Pair, ratio_interval, read_run, workload_summary
from timed_process import run_timed
from waiting_envs import LONGEST, Waiting, wait_s

from envs.api import Observation, Step

PHASES = {  # a step of a synchronous run and one of an asynchronous run of the quickstart's recipe, s
    "sync": {"collect": 1.2, "bank": 1.28, "actor_step": 0.9, "extractor_step": 0.6, "other": 0.02},
    "async": {"collect": 0.8, "bank": 0.2, "actor_step": 1.5, "extractor_step": 0.0, "other": 0.1},
}


def write_run(path, mode, *, steps=6, pending_grows=0.0, faster=1.0, success=0.5):
    """The rows of a run: an evaluation before and after, a text among them, and numbers that grow evenly."""
    rows = [{"step": 0, "kind": "metrics", "eval/known/with/sampled": 0.1}, {"step": 0, "kind": "text", "tag": "episode/free", "text": "."}]
    for step in range(1, steps + 1):
        phases = {f"phase_s/{name}": seconds * faster for name, seconds in PHASES[mode].items()}
        if step == steps:
            rows.append({"step": step, "kind": "metrics", "eval/known/with/sampled": success, "eval/known/with/sampled/turns": 5.0})
            phases["phase_s/evaluate"] = 30.0
        if step == 4:
            phases["phase_s/checkpoint"] = 100.0
        row = {
            "step": step,
            "kind": "metrics",
            "step_s": sum(phases.values()),
            "rollout/collect_s": 2.0,
            "lag/mean": float(mode == "async"),
        }
        row |= {"success/free": 0.25, "env_steps": 400.0 * step, "extractor/updates": float(step // 2), "bank/submitted": 64.0 * step}
        row |= {"success/guided": 0.5} if step > 1 else {}
        rows.append(row | phases | {"bank/pending": pending_grows * step})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [10.0 * number for number in range(len(rows))]


def trained(tmp_path, mode, seed=0, **rows):
    path = tmp_path / f"{mode}{seed}.jsonl"
    cpu_s = write_run(path, mode, **rows)
    return read_run(path, mode, seed, first=3, last=5, process_s=60.0, evaluated=36, cpu_s=cpu_s)


def test_only_training_in_the_measured_steps_counts(tmp_path):
    run = trained(tmp_path, "sync")
    assert (run.steps, run.step_s) == (3, pytest.approx(4.0))  # neither the evaluation nor the 100 s of a checkpoint
    assert run.phase_s == pytest.approx(PHASES["sync"])
    assert run.work["env_steps"] == 1200
    assert (run.episodes, run.left_behind, run.cpu_s, run.lag) == (192, 0, 30.0, 0)
    assert run.success == {"guided": 0.5, "free": 0.25}
    assert run.evaluation == {"known/with": 0.5}


def test_distillations_left_behind_are_charged(tmp_path):
    sync = trained(tmp_path, "sync")
    assert Pair(sync, trained(tmp_path, "async")).ratio == pytest.approx(2.6 / 4.0)
    late = Pair(sync, trained(tmp_path, "async", pending_grows=16.0))
    assert late.charged_s == pytest.approx(48 * 1.28 / 64)
    assert late.ratio == pytest.approx((3 * 2.6 + 48 * 0.02) / 12)
    assert Pair(sync, trained(tmp_path, "async", pending_grows=-16.0)).charged_s == 0  # what was caught up is no gift


def test_a_run_that_ended_early_is_an_error(tmp_path):
    write_run(tmp_path / "short.jsonl", "sync", steps=4)
    with pytest.raises(ValueError, match=r"no rows of steps \[5\]"):
        read_run(tmp_path / "short.jsonl", "sync", 0, first=3, last=5, process_s=1.0, evaluated=36)


def test_the_interval_of_a_ratio_is_that_of_its_logarithm():
    mean, low, high = ratio_interval([0.5, 0.6, 0.72])
    assert mean == pytest.approx(0.6)
    assert (math.log(high / mean), math.log(mean / low)) == pytest.approx((4.303 * math.log(1.2) / math.sqrt(3),) * 2, rel=1e-3)
    assert math.isnan(ratio_interval([0.5])[1])


def pairs_of(tmp_path, sync_success, async_success):
    def one(seed):
        slower = 1.0 + 0.01 * seed
        sync = trained(tmp_path, "sync", seed, success=sync_success[seed])
        return Pair(sync, trained(tmp_path, "async", seed, success=async_success[seed], faster=slower))

    return [one(seed) for seed in range(len(sync_success))]


def test_the_summary_says_where_time_went_and_whether_success_is_the_same(tmp_path):
    table = workload_summary(pairs_of(tmp_path, [0.5, 0.6, 0.4], [0.6, 0.5, 0.4]), 0.7)
    assert table["goal_met"]
    assert table["same_success"]
    assert table["interval_95"][0] < table["ratio"] < table["interval_95"][1]
    assert table["sync"]["phase_s"]["bank"] == pytest.approx(1.28)
    assert table["sync"]["cores_busy"] == pytest.approx(30 / 12)
    assert table["async"]["charged_s_per_step"] == 0
    worse = workload_summary(pairs_of(tmp_path, [0.5, 0.6, 0.7], [0.1, 0.2, 0.31]), 0.7)
    assert not worse["same_success"]
    assert worse["success"]["final known/with"]["difference"] == pytest.approx(-0.397, abs=1e-3)
    single = workload_summary(pairs_of(tmp_path, [0.5], [0.45]), 0.7)
    assert single["same_success"]  # by the two intervals of one run each


def test_the_result_is_that_of_the_environments_that_wait(tmp_path, monkeypatch, capsys):
    def fake(mode, seed, wait_s, args, folder, *, steps):
        return trained(tmp_path, mode, seed, faster=1.0 if wait_s else 2.0)

    monkeypatch.setattr(async_vs_sync, "train", fake)
    monkeypatch.setattr(sys, "argv", ["async_vs_sync.py", "--minutes", "0", "--out", str(tmp_path / "r.json")])
    assert async_vs_sync.main() == 0
    row = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert row == json.loads((tmp_path / "r.json").read_text())
    assert {"name", "value", "unit", "goal", "pass", "commit", "command", "machine"} <= set(row)
    assert (row["value"], row["pass"]) == (pytest.approx(0.65), True)
    assert row["details"]["waiting"]["pairs"] == 1
    assert row["details"]["as_is"]["pairs"] == 1  # both, however short the time


def test_waits_are_seeded_and_have_the_mean_they_say():
    waits = [wait_s(0.2, seed, number, turn) for seed in range(200) for number in range(8) for turn in range(7)]
    mean = sum(waits) / len(waits)
    assert mean == pytest.approx(0.2, rel=0.03)
    assert math.sqrt(sum((wait - mean) ** 2 for wait in waits) / len(waits)) == pytest.approx(0.2, rel=0.1)
    assert max(waits) <= 0.2 * LONGEST
    assert wait_s(0.2, 5, 1, 2) == wait_s(0.2, 5, 1, 2) != wait_s(0.2, 5, 2, 2)


def test_a_waiting_environment_says_what_it_would_say_anyway():
    class Still:
        def reset(self, seed, task=""):
            return Observation(f"{task} {seed}", ())

        def step(self, text):
            return Step(text, 1.0, False, False, False, True, {})

        def close(self):
            pass

    slept = []
    env = Waiting(Still(), 1.0, slept.append)
    assert env.reset(977, "t").text == "t 977"
    assert env.step("north").observation == "north"
    env.reset(977, "t")
    assert slept == [wait_s(1.0, 977, 0, 0), wait_s(1.0, 977, 0, 1), wait_s(1.0, 977, 1, 0)]


def test_a_process_is_timed_with_its_children_at_every_line(tmp_path):
    child = "x = sum(range(10**7))"
    work = f"import subprocess, sys, time; f = open(sys.argv[1], 'w'); f.write('a\\n'); f.flush(); time.sleep(0.4); {child}; "
    work += f"subprocess.run([sys.executable, '-c', {child!r}]); f.write('b\\n'); f.flush(); time.sleep(0.4); sys.exit(3)"
    timed = run_timed([sys.executable, "-c", work, str(tmp_path / "rows")], {}, log=tmp_path / "log", rows=tmp_path / "rows")
    assert timed.code == 3
    assert timed.wall_s > 0.8
    assert len(timed.cpu_s) == 2
    assert timed.cpu_s[1] - timed.cpu_s[0] > 0.1
