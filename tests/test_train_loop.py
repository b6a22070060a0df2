"""The loop of a run on parts that only note what was asked of them: where it stops, where it goes on, and what it saves."""

import asyncio
import contextlib
import os
import pathlib
import signal
import types

import numpy as np
import pytest

from crl_jax import build, run_state, train
from crl_jax.checkpoint import store
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
        self.saver, *_ = build.open_outputs(self.config, folder, Job(), contextlib.ExitStack(), quiet=True)
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
    """``toy(overrides..., at={step: what happens while it is collected}, resume=..., bank=...)`` runs one and returns it."""
    shell = Shell()
    monkeypatch.setattr(train, "evaluate", lambda run, step, around=None: {"eval/known/with/sampled": step / 10})
    monkeypatch.setattr(train, "show_text", lambda *_: None)
    monkeypatch.setattr(train, "progress_line", lambda *_: "")
    for name in ("_rollout_metrics", "_learn_actor"):
        monkeypatch.setattr(train, name, lambda *_: {"rollout/env_steps": 0})

    def run(*overrides: str, at=None, resume: bool = False, bank=None) -> Toy:
        made = Toy(tmp_path, shell, *overrides)
        made.saved_bank = bank

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


class ToyBank:
    """A bank in which 7 episodes wait. ``seen``: what it was asked for, and whether the checkpoint of step 2 was there then."""

    def __init__(self, root: pathlib.Path) -> None:
        self.root, self.seen = root, []

    async def checkpoint(self) -> dict[str, object]:
        return {"revision": 1}

    async def snapshot_made(self) -> None:
        await asyncio.sleep(0.2)
        self.seen.append(("snapshot made", store.is_whole(self.root, 2)))

    async def finish(self, deadline_s: float) -> int:
        self.seen.append(("finish", deadline_s))
        return 7


def test_A16_sigterm_distils_what_is_left_for_half_the_grace_beside_the_checkpoint_and_says_what_is_lost(toy, tmp_path) -> None:
    bank = ToyBank(tmp_path / "checkpoints")
    with pytest.warns(RuntimeWarning, match="stopped before 7 of its episodes were distilled"):
        stopped = toy("run.preempt_grace_s=40", "run.max_lag=0", at={2: sigterm}, bank=bank)
    assert stopped.error.exit_code == 75
    ((what, deadline_s), made) = bank.seen
    assert what == "finish", "it began before the checkpoint was written"
    assert 15 < deadline_s <= 20
    assert made == ("snapshot made", False), "the manifest came after it"
    assert store.is_whole(bank.root, 2)


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


def test_K04_a_checkpoint_that_cannot_be_written_ends_the_run_at_the_next_step_and_it_goes_on_from_the_one_before(
    toy, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = store.write_tree

    def full(folder: pathlib.Path, tree: object) -> object:
        if "step_00000002" in folder.parts[-3]:
            raise OSError(28, "No space left on device")
        return write(folder, tree)

    save = run_state.save_run
    with monkeypatch.context() as broken:
        broken.setattr(store, "write_tree", full)
        broken.setattr(train, "save_run", lambda run: (save(run), run.saver._running and wait_for(run.saver._running)))
        with pytest.raises(OSError, match="No space left"):
            toy("run.save_every=1", "run.steps=9", "run.max_lag=0")
    assert store.steps(tmp_path / "checkpoints") == [1]
    assert toy("run.steps=4", resume=True).fed == [1, 2, 3]


def wait_for(future) -> None:
    future.exception(20)


def test_the_evaluation_of_its_step_is_in_a_checkpoint_and_the_best_is_kept(toy, tmp_path: pathlib.Path) -> None:
    toy("run.save_every=1", "run.eval_every=2", "run.steps=4", "run.keep_last=4", "run.keep_best.metric=eval/known/with/sampled")
    metrics = {step: store.read_records(tmp_path / "checkpoints", step)["run"]["metrics"] for step in (1, 2, 3, 4)}
    assert metrics == {1: {}, 2: {"eval/known/with/sampled": 0.2}, 3: {}, 4: {"eval/known/with/sampled": 0.4}}


def test_the_newest_and_the_best_are_kept_and_the_others_deleted_while_it_runs(toy, tmp_path: pathlib.Path) -> None:
    best = ("run.eval_every=1", "run.keep_best.metric=eval/known/with/sampled", "run.keep_best.lowest=true", "run.keep_best.count=1")
    toy("run.save_every=1", "run.keep_last=2", "run.steps=6", *best)
    assert store.steps(tmp_path / "checkpoints") == [1, 5, 6], "the lowest by the metric is the first"
