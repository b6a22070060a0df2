"""The scripted players bound what can be reached: the expert wins, a right lesson helps, no lesson is slower, chance wins nothing."""

import random

import pytest

from envs import registry
from envs.alfworld import players, tasks
from envs.players import play, players_of

OPTIONS = {"engine": "native"}


@pytest.fixture(scope="module")
def envs():
    made = {f"alfworld/{kind}": registry.make(f"alfworld/{kind}", **OPTIONS) for kind in tasks.names()}
    yield made
    for env in made.values():
        env.close()


def results(envs, games, kind, *, right=None):
    """Episodes of ``kind``, with a lesson when ``right`` says which."""
    lessons = ["" if right is None else players.lesson(task, seed, right=right) for seed, task in enumerate(games)]
    who = [players.make_player(kind, task, seed=n, options=OPTIONS, lesson=lessons[n]) for n, task in enumerate(games)]
    return [play(envs[task.env], player, seed, task.id) for seed, (task, player) in enumerate(zip(games, who, strict=True))]


def test_expert_wins_and_a_lesson_is_worth_having(envs):
    games = registry.tasks("alfworld", "heldout")
    expert = results(envs, games, "expert")
    follow = results(envs, games, "follow", right=True)
    misled = results(envs, games, "follow", right=False)
    explore = results(envs, games, "explore")
    blind = results(envs, games[::5], "random")
    assert all(played.success and played.reward == 1 for played in expert)
    assert sum(played.success for played in follow) >= 0.95 * len(games)
    assert sum(played.success for played in explore) <= 0.9 * len(games)
    assert sum(played.success for played in misled) <= sum(played.success for played in explore) + 2
    assert sum(played.turns for played in follow) < 0.5 * sum(played.turns for played in explore)
    assert sum(played.success for played in blind) <= 1
    assert all(played.reward == -1 for played in blind if not played.success)


def test_expert_recovers_from_turns_that_others_played(envs):
    draw = random.Random(4).random
    for task in registry.tasks("alfworld")[:24]:
        env = registry.make(task.env, engine="native", max_turns=60)
        player = players.make_player("expert", task, seed=0, options=OPTIONS)
        seen = env.reset(0, task.id)
        text, actions, done = seen.text, seen.actions, False
        for turn in range(60):
            reply = player(text, actions)
            if turn < 12 and draw() < 0.6:  # somebody else's turn: any command, or none
                reply = f"<action>{actions[int(draw() * len(actions))]}</action>" if draw() < 0.8 else "fly to moon"
            step = env.step(reply)
            text, actions, done = step.observation, step.actions, step.done
            if done:
                break
        assert step.success, task.id


def test_expert_that_missed_turns_says_so(envs):
    task = registry.tasks("alfworld")[0]
    player = players.make_player("expert", task, seed=0, options=OPTIONS)
    env = envs[task.env]
    seen = env.reset(0, task.id)
    player(seen.text, seen.actions)
    going = [action for action in seen.actions if action.startswith("go to ")]
    steps = [env.step(f"<action>{action}</action>") for action in (going[0], going[1], "inventory")]
    steps.append(env.step(f"<action>{next(a for a in steps[-1].actions if a.startswith(('take', 'open', 'close')))}</action>"))
    with pytest.raises(ValueError, match="must read every observation"):
        player(steps[-1].observation, steps[-1].actions)


def test_lessons_name_receptacles_and_can_be_read_back():
    for seed, task in enumerate(registry.tasks("alfworld")[:30]):
        for right in (True, False):
            said = players.lesson(task, seed, right=right)
            assert players.Lesson.read(said).sources
        assert players.lesson(task, seed) == players.lesson(task, seed + 1)
    read = players.Lesson.read("the lettuce is in fridge 1; clean it in sinkbasin 1, then move it to diningtable 1")
    assert (read.sources, read.tool, read.place) == (("fridge 1",), "sinkbasin 1", "diningtable 1")


def test_unknown_players_goals_and_empty_lessons_are_errors():
    task = registry.tasks("alfworld")[0]
    with pytest.raises(ValueError, match="use one of random, explore, expert, follow"):
        players.make_player("wizard", task, seed=0, options=OPTIONS)
    with pytest.raises(ValueError, match="names no receptacle"):
        players.make_player("follow", task, seed=0, options=OPTIONS, lesson="be brave")
    with pytest.raises(ValueError, match="known forms"):
        players.Searcher("tidy up")
    assert players_of("alfworld") is players
