"""A lesson is worth having: scripted players with the right lesson, a wrong one, and none."""

import pytest

from envs.api import EnvTask
from envs.dungeon.players import make_player
from envs.players import play

pytest.importorskip("nle")

from envs import registry

EPISODES, TURNS = 60, 7
TASK = EnvTask("dungeon/amber_cellar", "", "find the stairs of the amber cellar")


@pytest.fixture(scope="module")
def dungeon():
    env = registry.make("dungeon/amber_cellar", max_turns=TURNS)  # its stairs are in the north west
    yield env
    env.close()


def rate(env, kind, lesson=""):
    players = (make_player(kind, TASK, seed=seed, options={}, lesson=lesson) for seed in range(EPISODES))
    return sum(play(env, player, seed).success for seed, player in enumerate(players)) / EPISODES


def test_right_lesson_beats_exploring_beats_wrong_lesson(dungeon):
    right, wrong = rate(dungeon, "follow", "the stairs are north west"), rate(dungeon, "follow", "south east")
    explore, blind = rate(dungeon, "explore"), rate(dungeon, "random")
    assert right >= 0.7  # a corner is the hardest place; over all names it is 0.94
    assert 0.1 <= explore <= 0.6
    assert wrong <= 0.3
    assert blind <= 0.15
    assert right > explore > blind


def test_lesson_without_a_third_is_an_error():
    with pytest.raises(ValueError, match="names no third"):
        make_player("follow", TASK, seed=0, options={}, lesson="be brave")
