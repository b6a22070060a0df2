"""How the levels end, and what may be said when."""

import pytest

pytest.importorskip("nle")

from envs import registry
from envs.api import EnvTask
from envs.minihack import commands, players, tasks
from envs.minihack.env import MOVES, MiniHackText
from envs.minihack.game import Game, load_minihack
from envs.players import play


def played(name, kind, seed, lesson="", **options):
    env = registry.make(f"minihack/{name}", **options)
    try:
        return play(env, players.make_player(kind, EnvTask(f"minihack/{name}", "", ""), seed=seed, options=options, lesson=lesson), seed)
    finally:
        env.close()


def flags(last):
    return (last.success, last.reward, last.terminated, last.truncated)


@pytest.mark.parametrize(
    "name", ["hidenseek", "corridor_battle", "memento_short_f2", "lavacross_ring_pickup", "lavacross_full", "keyroom_s5"]
)
def test_reaching_the_goal_is_success(name):
    assert flags(played(name, "expert", 1).last) == (True, 1.0, True, False)


@pytest.mark.parametrize("seed", [1, 3])
def test_board_that_squeaks_ends_the_level_without_success(seed):
    """MiniHack ends the level as done, with a reward below 0."""
    sign = "a blue jelly means {}. a lichen means {}."
    right, wrong = (played("memento_short_f2", "follow", seed, sign.format(*ways)) for ways in (("north", "south"), ("south", "north")))
    assert flags(right.last) == (True, 1.0, True, False)
    assert flags(wrong.last) == (False, 0.0, True, False)
    assert "squeak" in wrong.last.observation


def test_walking_into_lava_is_death():
    env = registry.make("minihack/lavacross_ring_inv", grammar="bare")
    env.reset(0)
    steps = [env.step("east") for _ in range(4)]
    assert [step.done for step in steps] == [False, False, False, True]
    assert flags(steps[-1]) == (False, 0.0, True, False)
    env.close()


def test_monster_that_finds_the_hero_is_death():
    deaths = [played("hidenseek", "random", seed).last for seed in range(6)]
    assert any(flags(last) == (False, 0.0, True, False) and "You die" in last.observation for last in deaths)


@pytest.mark.parametrize("name", ["room_5x5", "river"])
def test_the_games_own_time_limit_is_never_an_ending(name):
    env = registry.make(f"minihack/{name}", grammar="bare", max_turns=400)  # MiniHack's own are 100 and 350
    env.reset(0)
    assert not any(env.step("west").done for _ in range(399))
    assert flags(env.step("west")) == (False, 0.0, False, True)
    env.close()


def test_a_question_takes_answers_and_nothing_else_does():
    env = registry.make("minihack/lavacross_ring_inv", grammar="bare")
    seen = env.reset(0)
    assert set(seen.actions) == {*MOVES, "pickup", "put on"}
    assert not env.step("f").valid  # no question is open
    asked = env.step("put on")
    assert "What do you want to put on?" in asked.observation
    assert set(asked.actions) == {*commands.LETTERS, "cancel"}
    assert asked.info["effective"]
    stays = env.step("east")  # the game would take its key for the letter l
    assert not stays.valid
    assert stays.observation.endswith(asked.observation)
    left = env.step("cancel")
    assert left.valid
    assert set(left.actions) == set(seen.actions)
    steps = [env.step(reply) for reply in ("put on", "f", "r")]
    assert all(step.valid for step in steps)
    assert "on right hand" in steps[-1].observation
    env.close()


def test_a_direction_is_asked_for_with_moves():
    assert commands.allowed(commands.words("all"), "In what direction?") == (*MOVES, "cancel")


def test_a_question_that_no_word_answers_is_left():
    """A peaceful monster in the way: the keys of northwest and southeast are y and n."""
    minihack = load_minihack()
    level = minihack.LevelGenerator(w=5, h=2)
    level.set_start_pos((0, 0))
    level.add_monster("gnome", place=(1, 0), args=("peaceful", "asleep"))
    level.add_goal_pos((4, 0))
    game = Game(minihack.MiniHackNavigation, des_file=level.get_des())
    env = MiniHackText(game, None, actions=MOVES, style="full", grammar="bare", max_turns=9)
    env.reset(0)
    time = env.screen.time
    step = env.step("east")
    assert "Really attack" in step.observation
    assert not step.info["effective"]
    after = env.step("northwest")  # not a "yes"
    assert not after.info["effective"]
    assert "peaceful" in after.observation
    assert env.screen.time == time
    env.close()


@pytest.mark.parametrize("name", ["corridor_battle", "memento_f2", "lavacross_full", "hidenseek"])
def test_style_that_a_level_does_not_have_is_an_error_that_says_why(name):
    for call in (registry.spec, registry.make):
        with pytest.raises(ValueError, match=r"has no compact style \(.+\): use style=full"):
            call(f"minihack/{name}", style="compact")


def test_styles_and_turns_of_the_table():
    assert tasks.styles("keyroom_s15") == ("full", "compact")
    assert tasks.spec("memento_f2").max_turns == 120
    assert tasks.spec("memento_f2", max_turns=9).max_turns == 9


def test_hostile_replies_are_no_actions():
    env = registry.make("minihack/lavacross_full")
    seen = env.reset(1)
    hostile = ["<action>" * 50_000, "<think>" * 50_000, "x" * 3_000_000, "\0", "\ud800", "<action>\x1b</action>", "<action>,</action>", ""]
    for reply in hostile:
        step = env.step(reply)
        assert not step.valid
        assert step.observation.endswith(seen.text)
        assert step.actions == seen.actions
    env.close()
