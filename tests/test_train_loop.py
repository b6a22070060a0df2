"""The loop of a run on parts that only note what was asked of them: where it stops, where it goes on, and what it saves."""

import asyncio
import os
import pathlib
import signal
import types

import numpy as np
import pytest

from crl_jax import build, run_state, train
from crl_jax.checkpoint import store
from crl_jax.checkpoint.background import Saver
from crl_jax.checkpoint.retention import Keep
from crl_jax.config.load import parse_text
from crl_jax.job import Job
from crl_jax.preemption import Preempted
from crl_jax.rollout.shell import Shell
from crl_jax.run_state import RunCounters
from crl_jax.telemetry.totals import Totals
from crl_jax.telemetry.tracker import FanOut


class Toy:
    """A run whose steps are numbers: ``played`` are the task positions in the order they were collected."""

    def __init__(self, folder: pathlib.Path, shell: Shell, *overrides: str) -> None:
        self.config = parse_text("env: {family: dungeon}\nrun: {steps: 3, save_every: 0, max_lag: 1, eval_every: 0}\n", [*overrides])
        self.folder, self.shell = folder, shell
        self.actor, self.extractor, self.manager = types.SimpleNamespace(name="actor", state={"w": np.zeros(2)}, version=0), None, None
        self.actor.restore = lambda state, version: setattr(self.actor, "state", state)
        self.saver = Saver(folder / "checkpoints", Keep(5))
        self.trackers, self.totals, self.profiler = FanOut(()), Totals(), types.SimpleNamespace(before=lambda step: None)
        self.counters, self.extractor_updates, self.scores = RunCounters(), 0, {}
        self.job, self.roles, self.saved_bank = Job(), {"actor": self.actor}, None
        self.collect_deadline_s = 30.0
        self.played: list[int] = []
        self.fed: list[int] = []
        self.error: Preempted | None = None

    clock = staticmethod(lambda: 0.0)

    def carried(self) -> None:
        return None

    def go_on(self, carried: object) -> None:
        assert carried is None

    def joined(self, row: dict[str, float], what: str) -> dict[str, float]:
        return row

    def describe(self, first: int) -> str:
        return f"from {first}"

    def counted(self) -> dict[str, float]:
        return {"env/steps": len(self.fed)}

    def metrics(self) -> dict[str, float]:
        return self.totals.of(self.counted())

    def feed_bank(self, episodes: object, step: int) -> None:
        self.fed.append(step)
        self.actor.state = {"w": self.actor.state["w"] + step}


@pytest.fixture
def toy(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    """``toy(overrides..., at={step: what happens while it is collected}, resume=...)`` runs one and returns it."""
    shell = Shell()
    monkeypatch.setattr(train, "evaluate", lambda run, step, around=None: {"eval/known/with/sampled": step / 10})
    monkeypatch.setattr(train, "show_text", lambda *_: None)
    monkeypatch.setattr(train, "progress_line", lambda *_: "")
    for name in ("_rollout_metrics", "_learn_actor"):
        monkeypatch.setattr(train, name, lambda *_: {"rollout/env_steps": 0})

    def run(*overrides: str, at=None, resume: bool = False) -> Toy:
        made = Toy(tmp_path, shell, *overrides)

        async def collect(run: Toy, step: int) -> train.Batch:
            run.played.append(step)
            if at and step in at:
                at[step]()
                await asyncio.sleep(20)
            return train.Batch(step, [], 0.0)

        class Opened:
            def __enter__(self) -> Toy:
                return made

            def __exit__(self, *_: object) -> None:
                made.saver.wait()

        monkeypatch.setattr(train, "_collect", collect)
        monkeypatch.setattr(build, "open_run", lambda config, resume, job: Opened())
        try:
            train.train(made.config, resume=resume, out=lambda text: None)
        except Preempted as error:
            made.error = error
        return made

    yield run
    shell.close()


def sigterm() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_sigterm_while_collecting_gives_up_the_collection_and_saves_the_steps_before(toy, tmp_path: pathlib.Path) -> None:
    first = toy("run.max_lag=0", at={2: sigterm})
    assert first.error.exit_code == 75
    assert f"checkpoint of step 2 is saved in {tmp_path}" in str(first.error)
    assert first.fed == [0, 1]
    saved = store.read_records(tmp_path / "checkpoints", 2)["run"]
    assert saved["totals"] == {"env/steps": 2}, "as of the last finished step"
    second = toy(resume=True)
    assert (second.played, second.fed, second.counters.step) == ([2], [2], 3)
    assert second.metrics()["env/steps"] == 3
    assert second.actor.state["w"].tolist() == [3.0, 3.0]


def test_sigterm_before_anything_is_finished_saves_nothing_and_says_so(toy, tmp_path: pathlib.Path) -> None:
    first = toy(at={0: sigterm})
    assert "holds no finished step" in str(first.error)
    assert not (tmp_path / "checkpoints").exists()
    assert toy(resume=True).fed == [0, 1, 2]


def test_a_checkpoint_that_is_there_is_not_written_again_when_the_run_is_stopped(toy, tmp_path: pathlib.Path) -> None:
    toy("run.save_every=1", "run.max_lag=0", at={2: sigterm})
    before = (tmp_path / "checkpoints" / "step_00000002" / "manifest.json").stat().st_mtime_ns
    assert toy("run.max_lag=0", at={2: sigterm}, resume=True).error.exit_code == 75
    assert (tmp_path / "checkpoints" / "step_00000002" / "manifest.json").stat().st_mtime_ns == before


def test_K02_K10_K15_positions_go_on_over_two_resumes_across_the_end_of_an_epoch(toy) -> None:
    played = [toy(f"run.steps={end}", "run.max_lag=0", resume=end > 3).played for end in (3, 6, 9)]
    assert played == [[0, 1, 2], [3, 4, 5], [6, 7, 8]], "each once, in order; the task stream follows from the position"


def test_K04_a_checkpoint_that_cannot_be_written_ends_the_run_at_the_next_step(toy, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store, "write_tree", full)
    monkeypatch.setattr(run_state, "save_run", save := run_state.save_run)
    monkeypatch.setattr(train, "save_run", lambda run: (save(run), run.saver._running and wait_for(run.saver._running)))
    with pytest.raises(OSError, match="No space left"):
        toy("run.save_every=1", "run.steps=9", "run.max_lag=0")


def wait_for(future) -> None:
    future.exception(20)


def test_the_evaluation_of_its_step_is_in_a_checkpoint_and_the_best_is_kept(toy, tmp_path: pathlib.Path) -> None:
    toy("run.save_every=1", "run.eval_every=2", "run.steps=4", "run.keep_best.metric=eval/known/with/sampled")
    metrics = {step: store.read_records(tmp_path / "checkpoints", step)["run"]["metrics"] for step in (1, 2, 3, 4)}
    assert metrics == {1: {}, 2: {"eval/known/with/sampled": 0.2}, 3: {}, 4: {"eval/known/with/sampled": 0.4}}
