"""The extractor's updates in turn and beside the actor: order, errors, and nothing under way after ``settle``."""

import threading
import time
import types

import pytest

from crl_jax.experience.buffer import Sample
from crl_jax.extractor_learner import ExtractorLearner
from crl_jax.records import Generation, GenerationKind, Sum
from crl_jax.telemetry.histogram import Histogram


def sample(name):
    """Evidence of a generation that version 1 wrote."""
    return Sample(Generation(name, GenerationKind.DISTIL, (1, 2), (3, 4), (-0.3, -0.4), (1, 1), 0), 1.0, 1, 0, -1)


class ToyRole:
    """An extractor whose update waits for ``gate``."""

    def __init__(self, done):
        self.version, self.done, self.gate, self.fails = 3, done, threading.Event(), False
        self.gate.set()

    def update(self, samples):
        assert self.gate.wait(10)
        if self.fails:
            raise ValueError("a broken update")
        self.done.append(f"update {len(samples)}")
        return {"loss": Sum(2.0, 1.0)}

    def publish(self):
        self.version += 1
        self.done.append("publish")


def toy_run(batches, *, sync, deadline_s=10.0, trains=True, max_lag=None):
    done: list[str] = []
    waiting = [[sample(f"g{i}")] * 2 for i in range(batches)]
    loss = types.SimpleNamespace(alpha=0.5, cooldown_steps=1, max_lag=max_lag)
    config = types.SimpleNamespace(run=types.SimpleNamespace(sync=sync), extractor=types.SimpleNamespace(loss=loss))
    return types.SimpleNamespace(
        config=config,
        extractor=ToyRole(done),
        trains_extractor=trains,
        collect_deadline_s=deadline_s,
        pop_evidence=lambda step: waiting.pop() if waiting else None,
        record_training=lambda evidence, weights, step: done.append("record"),
        done=done,
    )


def test_in_turn_every_full_batch_is_learned_before_the_step_returns():
    run = toy_run(2, sync=True)
    with ExtractorLearner(run) as learner:
        learner.step(0)
        assert run.done == ["update 2", "record", "publish"] * 2
        found = learner.metrics()
    assert (found["extractor/loss"], found["extractor/version"], found["extractor/lag"]) == (Sum(4.0, 2.0), 5, Sum(2 * 2 + 2 * 3, 4))
    assert (found["extractor/lags"], found["extractor/stale"]) == (Histogram({2: 2, 3: 2}), Sum(0, 4))
    assert "extractor/loss" not in learner.metrics()


def test_generations_beyond_the_bound_in_versions_are_counted():
    run = toy_run(2, sync=True, max_lag=2)
    with ExtractorLearner(run) as learner:
        learner.step(0)
        assert learner.metrics()["extractor/stale"] == Sum(2, 4), "the second batch is learned by version 4, three after its own"


def test_beside_the_actor_a_step_does_not_wait_and_the_metrics_come_later():
    run = toy_run(1, sync=False)
    run.extractor.gate.clear()
    with ExtractorLearner(run) as learner:
        learner.step(0)
        learner.step(1)  # still busy: nothing is started twice
        assert run.done == []
        assert "extractor/loss" not in learner.metrics()
        run.extractor.gate.set()
        learner.settle()
        assert run.done == ["update 2", "record", "publish"]
        assert learner.metrics()["extractor/loss"] == Sum(2.0, 1.0)


def test_A08_an_error_of_the_thread_is_raised_by_the_next_call():
    run = toy_run(1, sync=False)
    run.extractor.fails = True
    with ExtractorLearner(run) as learner:
        learner.step(0)
        with pytest.raises(ValueError, match="a broken update"):
            learner.settle()


def test_waiting_has_a_deadline():
    run = toy_run(1, sync=False, deadline_s=0.05)
    run.extractor.gate.clear()
    with ExtractorLearner(run) as learner:
        learner.step(0)
        with pytest.raises(TimeoutError, match=r"raise run\.collect_timeout_s"):
            learner.settle()
        run.extractor.gate.set()


def test_a_frozen_extractor_learns_nothing():
    run = toy_run(1, sync=True, trains=False)
    with ExtractorLearner(run) as learner:
        learner.step(0)
    assert run.done == []


def test_A13_a_hung_update_is_raised_by_a_step_past_the_deadline_and_keeps_nothing_from_ending():
    run = toy_run(1, sync=False, deadline_s=0.05)
    run.extractor.gate.clear()

    def steps(learner):
        for step in range(100):
            learner.step(step)
            time.sleep(0.01)

    with ExtractorLearner(run) as learner, pytest.raises(TimeoutError, match=r"the extractor's update did not end"):
        steps(learner)
    left = [thread for thread in threading.enumerate() if thread.name == "extractor-learner"]
    assert all(thread.daemon for thread in left)
    run.extractor.gate.set()
