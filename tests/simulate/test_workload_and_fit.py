"""Workloads: from files and words, refused when senseless, and read off a run's metrics."""

import dataclasses
import json
import pathlib

import pytest

from crl_jax import cli
from crl_jax.config.load import parse_text
from crl_jax.config.parse import ConfigError
from crl_jax.simulate.fit import CannotFit, fit, fit_capacity, rows_of, seconds_per_step
from crl_jax.simulate.schedule import simulate
from crl_jax.simulate.workload import Engine, Spread, Workload, load_workload

RECIPE = """
env: {family: dungeon, workers: 1}
run: {steps: 9, groups_per_step: 1, group_size: 4, guided_fraction: 0.5, sync: true, max_lag: 0}
bank: {merge_every: 2, capacity: 50}
extractor: {batch_size: 2, buffer_capacity: 8, slots: 8, concurrency: 8}
actor: {slots: 8}
"""


def row(step: int, **changed: float) -> dict:
    """A step of 4 episodes: rollout 1 s, lessons 0.6 s (1.0 s with a merge), update 0.5 s, an extractor's update of 0.2 s."""
    return {
        "step": step,
        "kind": "metrics",
        "step_s": 9.0,
        "rollout/collect_s": 1.0,
        "rollout/turns": 2.0,
        "rollout/sampled_tokens": 40.0,
        "env/busy_s": 0.12 * step,
        "env/steps": 8.0 * step,
        "env/resets": 4.0 * step,
        "bank/submitted": 4.0 * step,
        "bank/entries_written": 3.0 * step,
        "serve/extractor/decoded_tokens": 80.0 * step,
        "extractor/updates": 1.0 * step,
        "extractor/busy_s": 0.2,
        "phase_s/collect": 1.0,
        "phase_s/bank": 1.0 if step > 1 and (step - 1) % 2 == 0 else 0.6,
        "phase_s/actor_step": 0.5,
        "phase_s/other": 0.1,
    } | changed


ROWS = [row(1, **{"phase_s/actor_step": 30.0}), row(2), *(row(step) for step in range(3, 9))]


def test_a_synchronous_run_is_fitted_and_simulated_as_long_as_it_took() -> None:
    w = fit(ROWS, parse_text(RECIPE), skip=2)
    assert (w.environments, w.turns, w.reply_tokens, w.lesson_tokens) == (4, Spread(mean=2.0), Spread(mean=5.0), Spread(mean=20.0))
    assert (w.env_s.mean, w.learner_s, w.other_s) == (pytest.approx(0.01), 0.5, pytest.approx(0.1)), "without the first, which compiled"
    assert (w.extractor_update_s, w.written, w.merge_s) == (pytest.approx(0.2), 0.75, pytest.approx(0.4))
    once = simulate(dataclasses.replace(w, steps=1))
    assert once.phases_s["collect"] == pytest.approx(1.0, rel=1e-3)
    assert once.phases_s["bank"] == pytest.approx(0.6, rel=1e-3)
    assert seconds_per_step(dataclasses.replace(w, merge_every=0, extractor_update_s=0.0)) == pytest.approx(2.2, rel=1e-3)
    beside = dataclasses.replace(w, sync=False, max_lag=1, merge_every=0)
    measured = seconds_per_step(dataclasses.replace(beside, capacity=1.3))
    assert seconds_per_step(dataclasses.replace(beside, capacity=fit_capacity(beside, measured))) == pytest.approx(measured, rel=0.01)


def test_what_cannot_be_fitted_says_why(tmp_path: pathlib.Path) -> None:
    with pytest.raises(CannotFit, match=r"run\.sync=true"):
        fit(ROWS, parse_text(RECIPE, ["run.sync=false"]))
    with pytest.raises(CannotFit, match="too few"):
        fit(ROWS[:2], parse_text(RECIPE))
    with pytest.raises(CannotFit, match=r"metrics\.jsonl is missing"):
        rows_of(tmp_path)
    text = "\n".join(json.dumps(r) for r in [row(2, **{"phase_s/other": 7.0}), row(1), {"step": 2, "kind": "text"}, row(2)])
    (tmp_path / "metrics.jsonl").write_text(text)
    assert [(r["step"], r["phase_s/other"]) for r in rows_of(tmp_path)] == [(1, 0.1), (2, 0.1)], "in order, the later of two"


def test_files_words_and_a_start_are_put_together(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "pod.yaml"
    file.write_text("environments: 512\nactor: {slots: 128}\nenv_s: {mean: 1e-2}\n")
    start = Workload(learner_s=7.0, actor=Engine(prefill_s=0.3))
    w = load_workload(file, ["actor.decode_s=0.5", "max_lag=2"], start=start)
    assert (w.environments, w.max_lag, w.learner_s, w.env_s.mean) == (512, 2, 7.0, 0.01)
    assert w.actor == Engine(slots=128, prefill_s=0.3, decode_s=0.5)
    assert load_workload(None) == Workload()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["slots=3"], "unknown key"),
        (["steps=0"], "steps: give 1 or more"),
        (["actor.slots=0"], r"actor\.slots"),
        (["learner_s=-1"], "learner_s is -1"),
        (["env_s.mean=-1"], r"env_s\.mean is -1"),
        (["actor.decode_s=-1"], r"actor\.decode_s is -1"),
        (["sync=true"], "max_lag=0"),
        (["extractor_batch=999"], "buffer_capacity 512"),
    ],
)
def test_senseless_workloads_are_refused(words: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_workload(None, words)


def test_the_command_prints_both_modes_and_writes_json(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "o.json"
    assert cli.main(["simulate", "--environments", "2,4", "steps=3", "--json", str(out)]) == 0
    printed = capsys.readouterr().out
    assert [line.split()[0] for line in printed.splitlines()[1:5]] == ["2", "2", "4", "4"]
    assert "learner for the rollout" in printed
    found = json.loads(out.read_text())
    assert [(o["environments"], o["sync"]) for o in found] == [(2, True), (2, False), (4, True), (4, False)]
    assert sum(found[3]["lags"]["episodes"].values()) == 12
    assert cli.main(["simulate", "--environments", "2", "stepz=3"]) == 2
    capsys.readouterr()
    assert cli.main(["simulate", "--json", str(tmp_path / "no" / "o.json")]) == 2
    said = capsys.readouterr()
    assert "make it first" in said.err
    assert not said.out
    with pytest.raises(SystemExit):
        cli.main(["simulate", "--environments", "two"])
