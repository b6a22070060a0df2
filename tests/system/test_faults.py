"""Every part of a run is killed, hung or made to fail in turn: the run goes on and counts it, or stops with an error that names the part,
within its deadline; afterwards no process and no thread is left that would keep the program from ending (docs/faults.md has the table)."""

import asyncio
import contextlib
import itertools
import os
import signal
import time

import pytest
from toy_runs import SHORT_S, Faults, ToyPool, araising, made_manager, nothing_left, raising, run, teach, toys

from crl_jax.checkpoint import store as checkpoints
from crl_jax.experience.editor import Editor
from crl_jax.experience.writer import Writer
from crl_jax.telemetry.tracker import JsonlTracker, TensorBoardTracker
from envs.guard import descendants

pytestmark = pytest.mark.system

SHORT = (f"run.collect_timeout_s={SHORT_S:g}",)


@pytest.fixture
def faults(monkeypatch):
    made = Faults()
    toys(monkeypatch, made)
    with nothing_left():
        yield made
        made.release()


@contextlib.contextmanager
def stops(error, match, *, within_s=15.0):
    """The run inside ends with ``error``, not much later than its deadlines say."""
    began = time.monotonic()
    with pytest.raises(error, match=match):
        yield
    assert time.monotonic() - began < within_s


def first(count, fault):
    """``fault`` in the first ``count`` calls only."""
    left = itertools.count()

    async def sometimes():
        if next(left) < count:
            await fault()

    return sometimes


# ---------------------------------------------------------------------------------------------------------------- nothing fails


def test_a_run_of_toys_ends_and_counts_no_fault(faults, tmp_path):
    last = run(tmp_path)[8]
    assert last["extractor/updates"] > 0
    assert last["bank/generations_merge"] > 0
    bad = ("env/lost", "env/restarts", "rollout/env_errors", "bank/sample_timeouts", "bank/distil_failed", "bank/search_timeouts")
    assert {name: last.get(name, 0) for name in bad} == dict.fromkeys(bad, 0)


# ---------------------------------------------------------------------------------------------------------------- environments


def test_a_lost_environment_worker_costs_its_episodes_and_is_replaced(monkeypatch, tmp_path):
    """One is killed, the next one hangs."""
    made, how = Faults(), {40: signal.SIGKILL, 90: signal.SIGSTOP}
    toys(monkeypatch, made, pool=None)

    async def lose():
        if number := how.get(made.calls["actor.sample"]):
            os.kill(descendants(os.getpid())[-1], number)

    made.at["actor.sample"] = lose
    with nothing_left():
        found = run(tmp_path, "env.call_timeout_s=1", "env.max_turns=3")
    assert found[8]["env/restarts"] == 2
    assert found[8]["env/lost"] > 1
    assert sum(row["rollout/env_errors"] for row in found.values()) > 1


# ---------------------------------------------------------------------------------------------------------------- samplers


def test_A08_an_actors_sampler_that_fails_stops_the_run(faults, tmp_path):
    faults.at["actor.sample"] = araising(RuntimeError("the actor's chip is gone"))
    with stops(RuntimeError, "the actor's chip is gone"):
        run(tmp_path)


def test_an_actors_sampler_that_hangs_stops_the_run_at_the_deadline(faults, tmp_path):
    faults.at["actor.sample"] = faults.ahang
    with stops(TimeoutError, r"evaluation \w+ without experience did not finish within 2 s"):
        run(tmp_path, *SHORT)


def test_A08_an_extractors_sampler_that_fails_stops_the_run(faults, tmp_path):
    faults.at["extractor.sample"] = araising(RuntimeError("the extractor's chip is gone"))
    with stops(RuntimeError, "the extractor's chip is gone"):
        run(tmp_path)


def test_an_extractors_sampler_that_hangs_costs_lessons_and_is_counted(faults, tmp_path):
    faults.at["extractor.sample"] = first(3, faults.ahang)

    async def slowly():
        await asyncio.sleep(0.12)

    faults.at["actor.sample"] = slowly
    last = run(tmp_path, *SHORT, "extractor.concurrency=4")[8]
    assert last["bank/sample_timeouts"] == last["bank/distil_failed"] + last.get("bank/merge_failed", 0) == 3
    assert last["bank/generations_distil"] > 0


def test_a_question_that_is_not_answered_in_time_gets_the_entry_itself():
    """Sooner than the batch of episodes that waits for it ends."""

    async def story():
        async with made_manager(delay=lambda prompt: 30.0 if "<lesson>" in prompt else 0.0, ask_timeout_s=0.1) as manager:
            await teach(manager, "the door is locked")
            answer = await manager.ask("room", "a door?", episode_id="e1")
            assert (answer.text, answer.generation_id) == ("the door is locked", None)
            assert (manager.counts["ask_fallbacks"], manager.counts["sample_timeouts"]) == (1, 1)

    asyncio.run(asyncio.wait_for(story(), 20))


# ---------------------------------------------------------------------------------------------------------------- extractor's learner


def test_A08_an_extractors_learner_that_fails_stops_the_run(faults, tmp_path):
    faults.at["extractor.update"] = raising(ValueError("a broken update"))
    with stops(ValueError, "a broken update"):
        run(tmp_path)


def test_A13_an_extractors_learner_that_hangs_stops_the_run_at_the_deadline(faults, tmp_path):
    faults.at["extractor.update"] = faults.hang
    with stops(TimeoutError, "the extractor's update did not end within 2 s"):
        run(tmp_path, *SHORT)


# ---------------------------------------------------------------------------------------------------------------- bank


@pytest.mark.parametrize(("part", "name"), [(Writer, "write"), (Editor, "merge")], ids=["distillation", "merge"])
def test_A08_a_bank_that_fails_stops_the_run(part, name, faults, monkeypatch, tmp_path):
    fail = raising if part is Writer else araising
    monkeypatch.setattr(part, name, fail(ValueError(f"a broken {name}")))
    with stops(ValueError, f"a broken {name}"):
        run(tmp_path)


def test_a_merge_that_hangs_keeps_nothing_from_going_on(faults, monkeypatch, tmp_path):
    async def hang(*_, **__):
        await faults.ahang()

    monkeypatch.setattr(Editor, "merge", hang)
    with pytest.warns(RuntimeWarning, match="1 merge"):
        last = run(tmp_path, *SHORT, "bank.merge_every=1")[8]
    assert last["bank/merges_deferred"] > 0
    assert last["extractor/updates"] > 0


def test_a_slow_embedder_shows_in_the_latency(faults, tmp_path):
    faults.at["embed"] = lambda: time.sleep(0.05)
    last = run(tmp_path)[8]
    assert last["bank/search_latency_s"] / last["bank/searches"] > 0.01


def test_a_hung_embedder_stops_the_run_at_the_deadline(faults, tmp_path):
    faults.at["embed"] = faults.hang
    with stops(TimeoutError, "the embedder stuck"):
        run(tmp_path, *SHORT)


# ---------------------------------------------------------------------------------------------------------------- disk


def test_K04_a_full_disk_under_the_checkpoints_stops_the_run(faults, monkeypatch, tmp_path):
    monkeypatch.setattr(checkpoints, "write_tree", raising(OSError(28, "No space left on device")))
    with stops(OSError, "No space left"):
        run(tmp_path, "run.save_every=1")


def test_a_hung_disk_under_the_checkpoints_stops_the_run_at_the_deadline(faults, monkeypatch, tmp_path):
    monkeypatch.setattr(checkpoints, "write_tree", lambda *_: faults.hang())
    with stops(TimeoutError, "the checkpoint of step 1 was not written"), pytest.warns(RuntimeWarning, match="the checkpoint did not end"):
        run(tmp_path, *SHORT, "run.save_every=1")


@pytest.mark.parametrize("kind", [JsonlTracker, TensorBoardTracker])
def test_a_tracker_that_fails_stops_the_run(kind, faults, monkeypatch, tmp_path):
    monkeypatch.setattr(kind, "log", raising(OSError(28, "No space left on device", "metrics")))
    with stops(OSError, "No space left"):
        run(tmp_path, "telemetry.tensorboard=true")


def test_a_tracker_that_hangs_stops_the_run_at_the_deadline(faults, monkeypatch, tmp_path):
    monkeypatch.setattr(JsonlTracker, "log", lambda *_: faults.hang())
    with stops(TimeoutError, r"the tracker metrics\.jsonl did not record within 2 s"):
        run(tmp_path, *SHORT)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_full_disk_under_tensorboard_is_an_error_and_no_hang(tmp_path):
    """The library's thread ends with the error, and its queue would fill up."""
    tracker = TensorBoardTracker(tmp_path)
    tracker._writer.file_writer.event_writer._ev_writer.write_event = raising(OSError(28, "No space left on device"))

    def steps():
        for step in range(200):
            tracker.log(step, {"loss": 1.0})
            time.sleep(0.01)

    with stops(OSError, "TensorBoard cannot write"):
        steps()


# ---------------------------------------------------------------------------------------------------- the end of a run that stopped


def test_A13_of_two_errors_the_first_is_raised_and_every_part_is_ended(faults, monkeypatch, tmp_path):
    """Both batches that are being collected fail, so there is an error left when the parts are ended."""
    ended = []
    pool = type("Pool", (ToyPool,), {"close": lambda self: _note(ended)})
    toys(monkeypatch, faults, pool=pool)

    async def fail():
        if faults.calls.get("actor.update"):
            await asyncio.sleep(0.1)
            raise RuntimeError("a failure")
        if faults.calls["actor.sample"] > 36:  # those of the evaluation and of the first batch
            await asyncio.sleep(0.05)

    faults.at["actor.sample"] = fail
    faults.at["actor.update"] = lambda: time.sleep(1.0)
    with stops(RuntimeError, "a failure"), pytest.warns(RuntimeWarning, match="the event loop did not end in order either"):
        run(tmp_path, "run.max_lag=2")
    assert ended == ["closed"]


async def _note(ended):
    ended.append("closed")
