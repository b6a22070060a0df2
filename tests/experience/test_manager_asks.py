"""Questions that are answered at the same time: in a synchronous run their ids and what becomes of them depend on no timing."""

import asyncio
import json
import random
import sqlite3

import pytest
from experience_toys import episode
from manager_toys import add, build, observation, run, teach

from crl_jax.experience.store import Store
from crl_jax.experience.verify import verify

QUESTIONS = [f"s1/g{group}/{member}" for group in range(3) for member in range(4)]
GENERATIONS = "SELECT * FROM generations WHERE id NOT LIKE '%~%' ORDER BY id"


def reply(prompt):
    """Every third question has an empty answer, whose generation is trained on at once."""
    if "environment: " in prompt:
        return add(observation(prompt))
    return "" if "what 2" in prompt or "what 5" in prompt else "<answer>go north</answer>"


async def asked(manager, seed):
    """All questions at once, in an order that ``seed`` makes."""
    order = random.Random(seed).sample(range(len(QUESTIONS)), len(QUESTIONS))
    answers = await asyncio.gather(*(manager.ask("room", f"what {n}", episode_id=QUESTIONS[n], number=1) for n in order))
    return {QUESTIONS[n]: answer.generation_id for n, answer in zip(order, answers, strict=True)}


async def step(manager, number, given):
    manager.on_step(number)
    await manager.observe([episode(name, asks=(i,) if i else (), observation="x") for name, i in sorted(given.items())])
    await teach(manager, f"lesson {number}")


def told(path, seed, *, killed=False):
    """A bank after a batch whose episodes ask; with ``killed`` the batch was given up once, half of it answered, and is played again."""
    rng = random.Random(seed)

    async def life():
        saved = None
        async with build(reply, lambda prompt: rng.choice([0.0, 0.001, 0.01]), store=Store.open(path), in_turn=True) as manager:
            await step(manager, 0, {})
            if killed:
                saved = json.loads(json.dumps(await manager.checkpoint()))
                await asked(manager, seed + 1)
        async with build(reply, lambda prompt: rng.choice([0.0, 0.001, 0.01]), store=Store.open(path), in_turn=True) as manager:
            if saved is not None:
                await manager.restore(saved)
            given = await asked(manager, seed)
            await step(manager, 1, given)
            end = await manager.checkpoint()
            del end["carry"]["log_row"]
            return given, end, [(s.generation.id, s.reward) for s in await manager.pop_batch() or []]

    found = run(life())
    with sqlite3.connect(path) as db:
        return found, db.execute(GENERATIONS).fetchall()


@pytest.mark.parametrize(("seed", "killed"), [(2, False), (3, False), (4, True)])
def test_K02_ids_of_answers_and_the_order_of_training_are_those_of_the_questions(seed, killed, tmp_path):
    first, other = told(tmp_path / "a.sqlite", 1), told(tmp_path / "b.sqlite", seed, killed=killed)
    assert other == first
    (given, _, batch), stored = first
    assert given["s1/g0/1"] == "g00000002+s1/g0/1/1"
    assert [i for i, _ in batch] == ["g00000002+s1/g0/2/1", "g00000002+s1/g1/1/1"], "the empty ones came first, in the order of their names"
    assert len(stored) == 2 + len(QUESTIONS)
    store = Store.open(tmp_path / "b.sqlite")
    assert verify(store).faults == ()
    assert store.generation_count() == len(stored) + (len(QUESTIONS) if killed else 0)
    store.close()


def test_a_question_that_is_asked_again_has_an_id_of_its_own():
    """A bank that others share goes on where an asynchronous run plays an episode again."""

    async def story():
        async with build(reply, in_turn=True) as manager:
            await teach(manager, "one")
            twice = [await manager.ask("room", "what 1", episode_id="s1/g0/0", number=1) for _ in range(2)]
            assert [answer and answer.generation_id for answer in twice] == ["g00000002+s1/g0/0/1", "g00000002"]
            await teach(manager, "two")
            assert manager._store.generation("g00000003").step == 0

    run(story())
