"""The learning signal end to end: what reaches the extractor's update of what happened in episodes, over several steps."""

import asyncio
import dataclasses
import functools
import types

import numpy as np
import pytest
from experience_toys import episode
from manager_toys import build, run, teach

from crl_jax.experience.buffer import TrainingBuffer
from crl_jax.experience.reward import RewardRule
from crl_jax.extractor_learner import ExtractorLearner
from crl_jax.records import Condition, Decision, Generation, GenerationKind, Sum, Verdict
from crl_jax.run import Run


def test_what_was_retrieved_but_not_shown_is_neither_credited_nor_counted():
    async def story():
        async with build() as manager:
            await teach(manager, "red door needs key")
            (shown,) = await manager.retrieve("room", "red door")
            kept = dataclasses.replace(episode("a"), verdicts=(Verdict(shown.id, Decision.REJECT),))
            await manager.observe([kept])
            assert (len(manager.buffer), len(manager.state.usage)) == (0, 0)
            assert manager._reader._reserved.count(shown.id) == 0, "the reservation is given back all the same"

    run(story())


def test_old_evidence_leaves_as_steps_go_by():
    async def story():
        async with build(buffer=TrainingBuffer(batch_size=2, capacity=8, max_age_steps=2)) as manager:
            await teach(manager, "a lesson")
            (entry,) = manager.state.space("room")
            manager.on_step(1)
            await manager.observe([episode("e", shown=[entry])])
            manager.on_step(3)
            assert len(manager.buffer) == 1
            manager.on_step(4)
            assert (len(manager.buffer), manager.stats()["buffer_dropped_age"]) == (0, 1)

    run(story())


def test_the_manager_compares_inside_the_groups_of_a_step():
    async def story():
        async with build(reward=RewardRule(base="relative"), buffer=TrainingBuffer(batch_size=1, capacity=8)) as manager:
            await teach(manager, "a lesson")
            (entry,) = manager.state.space("room")
            free = [dataclasses.replace(episode(f"f{n}", success=n < 3), group_id="g", condition=Condition.FREE) for n in range(4)]
            guided = [dataclasses.replace(episode(f"e{n}", shown=[entry], success=n < 1), group_id="g") for n in range(2)]
            await manager.observe([*free, *guided, episode("alone", shown=[entry])])
            (sample,) = await manager.pop_batch()
            # free mean (3 - 1) / 4 = 0.5: 1 - 0.5 and -1 - 0.5; a group of its own without a free half: 1
            assert (sample.reward, sample.evidence) == (pytest.approx((0.5 - 1.5 + 1.0) / 3), 3)
            assert manager.stats()["reward_without_free_half"] == 1

    run(story())


def test_rewards_of_the_buffer_are_finite_and_given_one_way():
    buffer = TrainingBuffer(batch_size=1, capacity=1)
    for wrong in ({"reward": float("nan")}, {"reward": float("inf")}, {}, {"reward": 1.0, "success": True}):
        with pytest.raises(ValueError, match=r"finite|either"):
            buffer.credit("g", step=0, **wrong)
    assert len(buffer) == 0


ALPHA = 0.5


class Learner:
    """An extractor that remembers the advantages it was trained with."""

    version = 0

    def __init__(self):
        self.advantages = []

    def update(self, samples):
        self.advantages.append([sample.advantage for sample in samples])
        return {}

    def publish(self):
        self.version += 1


def generation(name):
    return Generation(name, GenerationKind.DISTIL, (1,), (2,), (-0.1,), (0,), 0)


def training(cooldown_steps):
    """The parts of a run that the extractor's side of the loop touches, with the loop's own functions over them."""
    buffer = TrainingBuffer(batch_size=2, capacity=8)
    loss = types.SimpleNamespace(alpha=ALPHA, cooldown_steps=cooldown_steps, max_lag=None)

    async def record_trained(generation_ids, *, step):
        buffer.record_trained(generation_ids, step=step)

    fake = types.SimpleNamespace(
        extractor=Learner(),
        config=types.SimpleNamespace(run=types.SimpleNamespace(sync=True), extractor=types.SimpleNamespace(loss=loss)),
        trains_extractor=True,
        extractor_updates=0,
        manager=types.SimpleNamespace(record_trained=record_trained),
        shell=types.SimpleNamespace(call=lambda coroutine, deadline_s, what: asyncio.run(coroutine)),
        collect_deadline_s=10.0,
        pop_evidence=lambda step: buffer.pop_batch(generation),
    )
    fake.record_training = functools.partial(Run.record_training, fake)
    return fake, buffer


def learn(fake, buffer, step, names=("old", "new")):
    for name, success in zip(names, (True, False), strict=True):
        buffer.credit(name, success=success, step=step)
    with ExtractorLearner(fake) as learner:
        learner.step(step)
        return learner.metrics()


def test_training_again_on_a_generation_weighs_less_each_time():
    """Eq. 7 in the loop: weights 1, 2^-a, 3^-a, and 1 for a generation that is new. Rewards +1 and -1 are already centred."""
    fake, buffer = training(cooldown_steps=0)
    for step in range(3):
        learn(fake, buffer, step, ("old", f"new{step}"))
    assert np.allclose(fake.extractor.advantages, [[1.0, -1.0], [2**-ALPHA, -1.0], [3**-ALPHA, -1.0]])
    metrics = learn(fake, buffer, 3, ("old", "new0"))
    assert metrics["extractor/weight"] == Sum(pytest.approx(4**-ALPHA + 2**-ALPHA), 2)


def test_cooldown_silences_a_generation_and_a_silent_update_does_not_count_as_training():
    fake, buffer = training(cooldown_steps=2)
    for step in range(4):
        learn(fake, buffer, step, ("old", f"new{step}"))
    assert np.allclose(fake.extractor.advantages, [[1.0, -1.0], [0.0, -1.0], [2**-ALPHA, -1.0], [0.0, -1.0]])


def test_with_a_cooldown_of_one_a_second_batch_of_the_same_step_is_silent():
    fake, buffer = training(cooldown_steps=1)
    learn(fake, buffer, 0)
    learn(fake, buffer, 0)
    learn(fake, buffer, 1)
    assert np.allclose(fake.extractor.advantages, [[1.0, -1.0], [0.0, 0.0], [2**-ALPHA, -(2**-ALPHA)]])
