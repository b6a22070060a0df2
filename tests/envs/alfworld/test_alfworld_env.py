"""Observations, rewards, what is a command and what is not."""

import hashlib
import random

import pytest

from envs import registry
from envs.alfworld import commands, games

ENTRY = games.listed()[2]
NAME = f"alfworld/{ENTRY.kind}"


@pytest.fixture
def env():
    made = registry.make(NAME, engine="native", grammar="bare", max_turns=6)
    yield made
    made.close()
    made.close()


def plan_of(entry):
    from envs.alfworld.native import compiled
    from envs.alfworld.plan import plan

    return plan(compiled(str(games.path_of(entry.id))))


def test_first_observation_shows_the_room_and_the_goal(env):
    seen = env.reset(0, ENTRY.id)
    assert seen.text.startswith("You are in the middle of a room. Looking quickly around you, you see a ")
    assert seen.text.endswith(f"Your task is to: {ENTRY.goal}.")
    assert "look" in seen.actions
    assert list(seen.actions) == sorted(set(seen.actions))


def test_N01_fly_to_moon_is_no_command_and_costs_a_turn(env):
    seen = env.reset(0, ENTRY.id)
    step = env.step("fly to moon")
    assert seen.text in step.observation
    assert "nothing happened" in step.observation
    assert (step.reward, step.valid, step.done, step.success) == (0.0, False, False, False)
    assert (step.info["turn"], step.info["invalid"], step.info["effective"]) == (1, 1, False)
    assert step.actions == seen.actions


def test_N01_a_command_that_cannot_be_done_is_answered_and_valid(env):
    env.reset(0, ENTRY.id)
    for turn, said in enumerate(("go to moon", "take apple 9 from moon 1", "put cup 1 in/on shelf 99"), 1):
        step = env.step(said)
        assert step.observation == "Nothing happens."
        assert (step.reward, step.valid, step.done) == (0.0, True, False)
        assert (step.info["turn"], step.info["invalid"], step.info["effective"]) == (turn, 0, False)


def test_success_is_worth_one_and_ends_the_episode():
    env = registry.make(NAME, engine="native", grammar="tagged")
    env.reset(1, ENTRY.id)
    steps = [env.step(f"<think>so</think><action>{command}</action>") for command in plan_of(ENTRY)]
    assert [step.reward for step in steps] == [0.0] * (len(steps) - 1) + [1.0]
    assert (steps[-1].terminated, steps[-1].truncated, steps[-1].success) == (True, False, True)
    assert steps[-1].info["task"] == ENTRY.id
    assert (steps[-1].info["data_source"], steps[-1].info["engine"]) == ("generated", "native")
    with pytest.raises(RuntimeError, match="no episode is running"):
        env.step("look")


@pytest.mark.parametrize("last", ["look", "fly to moon"])
def test_the_last_turn_without_success_costs_one(env, last):
    env.reset(0, ENTRY.id)
    steps = [env.step("look") for _ in range(5)] + [env.step(last)]
    assert [step.reward for step in steps] == [0.0] * 5 + [-1.0]
    assert (steps[-1].terminated, steps[-1].truncated, steps[-1].success) == (False, True, False)


def test_looking_is_not_effective_and_moving_is(env):
    env.reset(0, ENTRY.id)
    told = {said: env.step(said).info["effective"] for said in ("look", "inventory", "help", plan_of(ENTRY)[0])}
    assert list(told.values()) == [False, False, False, True]


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("  Go To   Fridge 1 ", "go to fridge 1"),
        ("put apple 1 in/on fridge 1", "move apple 1 to fridge 1"),
        ("put apple 1 in fridge 1", "move apple 1 to fridge 1"),
        ("put apple 1 on fridge 1", "move apple 1 to fridge 1"),
        ("move apple 1 into fridge 1", "move apple 1 to fridge 1"),
    ],
)
def test_spellings_of_one_command(said, meant):
    listed = ("go to fridge 1", "move apple 1 to fridge 1")
    assert commands.listed(commands.read(said), listed) == meant
    older = ("go to fridge 1", "put apple 1 in/on fridge 1")
    assert commands.listed(commands.read(said), older) in older
    assert commands.listed("move apple 1 to fridge 2", listed) is None


@pytest.mark.parametrize(
    "said", ["", "go", "go to", "take apple 1", "look around", "fly to moon", "go to fridge 1; look", "open\n", "go to " + "x" * 200]
)
def test_what_is_no_command(said):
    assert commands.read(said) is None


def test_hostile_replies_are_invalid_and_quick(env):
    hostile = ("<action>" * 50_000, "go to " * 200_000, "\0" * 1_000_000, "open \ud800 1", "<think>" * 9_999, "look\u202e")
    env.reset(0, ENTRY.id)
    for said in hostile:
        step = env.step(said)
        assert not step.valid
    tagged = registry.make(NAME, engine="native")
    tagged.reset(0, ENTRY.id)
    assert [tagged.step(said).valid for said in hostile] == [False] * len(hostile)


def test_commands_are_listed_when_asked():
    env = registry.make(NAME, engine="native", grammar="bare", show_commands="all")
    seen = env.reset(0, ENTRY.id)
    assert seen.text.endswith(f"\n\nYou can: {', '.join(seen.actions)}.")
    step = env.step("look")
    assert step.observation.endswith(f"You can: {', '.join(step.actions)}.")


def test_without_a_task_the_seed_picks_a_training_game(env):
    train = [task.id for task in registry.tasks(NAME)]
    env.reset(len(train) + 3)
    assert env.step("look").info["task"] == train[3]
    for wrong in ("nothing", registry.tasks("alfworld/look_at_obj_in_light")[0].id, ENTRY.id[:-1] + "9"):
        with pytest.raises(KeyError):
            env.reset(0, wrong)


def test_specs_need_nothing_installed_and_explain_the_commands():
    spec = registry.spec(NAME, max_turns=40)
    assert (spec.namespace, spec.actions, spec.max_turns) == ("alfworld", (), 40)
    assert "40 turns" in spec.system_prompt
    assert "<action>go to cabinet 1</action>" in spec.system_prompt
    compact = registry.spec(NAME, style="compact", grammar="bare")
    assert len(compact.system_prompt) < 400
    for wrong in ({"engine": "mine"}, {"show_commands": "some"}, {"max_turns": 0}):
        with pytest.raises(ValueError, match="use"):
            registry.spec(NAME, **wrong)


def test_N03_golden_transcript():
    """Seed and replies give these bytes, in every process and on every Python version."""
    found = hashlib.sha256()
    for task in registry.tasks("alfworld", "heldout")[:6]:
        env = registry.make(task.env, engine="native", grammar="bare", show_commands="all")
        draw = random.Random(task.id).random
        seen = env.reset(5, task.id)
        found.update(seen.text.encode())
        actions = seen.actions
        for _ in range(25):
            step = env.step(actions[int(draw() * len(actions))] if draw() < 0.9 else "fly to moon")
            found.update(f"{step.observation}|{step.reward}|{step.done}|{step.info}".encode())
            actions = step.actions
            if step.done:
                break
    assert found.hexdigest()[:16] == "87893fd881d99a7a"
