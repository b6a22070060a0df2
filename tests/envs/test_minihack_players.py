"""Scripted players of MiniHack: what they win, and what they read."""

import time

import pytest

pytest.importorskip("nle")

from envs import registry
from envs.api import EnvTask
from envs.dungeon import players as dungeon_players
from envs.minihack import expert, explorer, oracle, paths, players, reading, tasks
from envs.players import play


def task_of(name, family="minihack"):
    return EnvTask(f"{family}/{name}", "", registry.spec(f"{family}/{name}").goal)


def wins(name, kind, seeds, *, right=True, **options):
    env, task = registry.make(f"minihack/{name}", **options), task_of(name)
    told = [players.lesson(task, seed, right=right) if kind == "follow" else "" for seed in range(seeds)]
    one = (players.make_player(kind, task, seed=seed, options=options, lesson=told[seed]) for seed in range(seeds))
    won = sum(play(env, player, seed).success for seed, player in enumerate(one))
    env.close()
    return won


@pytest.mark.parametrize(
    "name",
    [
        "room_ultimate_5x5",
        "mazewalk_9x9",
        "keyroom_dark_s5",
        "river_narrow",
        "corridor_battle_dark",
        "hidenseek",
        "memento_f4",
        "lavacross_full",
    ],
)
def test_expert_wins(name):
    assert wins(name, "expert", 3) == 3


def test_expert_serves_both_styles_and_grammars():
    assert wins("room_ultimate_5x5", "expert", 3, style="compact", grammar="bare") == 3


def test_expert_beats_explorer_beats_random():
    random, explore, expert_ = (wins("room_dark_15x15", kind, 12) for kind in ("random", "explore", "expert"))
    assert random < explore < expert_ == 12


@pytest.mark.parametrize("name", ["room_dark_15x15", "memento_short_f2", "memento_f2", "river_narrow"])
def test_right_lesson_beats_wrong_lesson(name):
    assert wins(name, "follow", 6) > wins(name, "follow", 6, right=False) + 2


@pytest.mark.parametrize("name", ["keyroom_s5", "lavacross_levitate", "mazewalk_mapped_9x9"])
def test_explorer_uses_what_it_finds(name):
    assert wins(name, "explore", 4, map="whole") >= 3


def test_player_is_deterministic():
    env, task = registry.make("minihack/hidenseek"), task_of("hidenseek")
    once, again = (play(env, players.make_player("explore", task, seed=4, options={}), 4).transcript for _ in range(2))
    assert once == again
    env.close()


def test_lessons_in_words():
    assert explorer.advice("In this room the stairs are south east.").direction == "southeast"
    assert explorer.advice("do: east 2, pickup, put on, f. then see").steps == ("east", "east", "pickup", "put on", "f")
    assert explorer.advice("do: east 2 times").steps == ("east", "east")
    assert explorer.advice("A blue jelly means north. A lichen means south.").signs == (("blue jelly", "north"), ("lichen", "south"))


@pytest.mark.parametrize("lesson", ["", "be brave", "do: fly 3"])
def test_lesson_that_says_nothing_is_an_error(lesson):
    with pytest.raises(ValueError, match="lesson"):
        players.make_player("follow", task_of("room_5x5"), seed=0, options={}, lesson=lesson)


def test_what_a_player_cannot_do_is_an_error():
    with pytest.raises(ValueError, match="style=full"):
        players.make_player("explore", task_of("room_5x5"), seed=0, options={"style": "compact"})
    with pytest.raises(ValueError, match="no player 'brave'"):
        players.make_player("brave", task_of("room_5x5"), seed=0, options={})
    with pytest.raises(ValueError, match="full style"):
        reading.read(" north west 0 0")


def test_a_plan_is_the_same_in_another_order_of_asking():
    expert.plan.cache_clear()
    first = [expert.plan("hidenseek", seed, 30) for seed in (0, 2)]
    expert.plan.cache_clear()
    assert [expert.plan("hidenseek", seed, 30) for seed in (2, 0)] == first[::-1]


def test_boulder_is_pushed_into_the_target():
    floor = {(x, y) for x in range(5) for y in range(3)}
    assert paths.push((0, 1), floor, {(2, 1)}, {(5, 1)}) == ("east",) * 4
    assert paths.push((4, 1), floor, {(2, 0)}, {(5, 0)}) is not None
    assert paths.push((0, 1), {(0, 1)}, {(2, 1)}, {(5, 1)}) is None


def test_doors_are_not_passed_diagonally():
    floor = {(0, 0), (1, 1), (1, 0)}
    assert paths.way((0, 0), (1, 1), floor) == ("southeast",)
    assert paths.way((0, 0), (1, 1), floor, doors={(1, 1)}) == ("east", "south")


@pytest.mark.parametrize("grammar", ["bare", "tagged"])
def test_dungeon_players_read_the_full_style_too(grammar):
    options = {"style": "full", "grammar": grammar, "max_turns": 12}
    env, task = registry.make("dungeon/amber_cellar", **options), task_of("amber_cellar", "dungeon")
    expert_, random = (
        sum(play(env, dungeon_players.make_player(kind, task, seed=seed, options=options), seed).success for seed in range(10))
        for kind in ("expert", "random")
    )
    env.close()
    assert expert_ >= 9 > random


def test_every_task_has_the_four_kinds_but_two_without_an_expert():
    without = {name for name in tasks.names() if players.kinds(task_of(name)) != players.KINDS}
    assert without == {"river_monster", "river_monster_lava"}


@pytest.mark.parametrize(
    "name", ["room_ultimate_15x15", "mazewalk_9x9", "keyroom_dark_s15", "hidenseek_big", "corridor_battle_dark", "lavacross_full"]
)
def test_what_the_expert_knows_is_the_level_that_is_played(name):
    env = registry.make(f"minihack/{name}")
    for seed in range(3):
        env.reset(seed)
        known, shown = oracle.levels(name, seed), oracle.read(env.screen)
        assert known.hero == shown.hero
        assert known.stairs is not None
        assert shown.stairs in (None, known.stairs)
        assert shown.floor - shown.monsters <= known.floor
        assert shown.things.items() <= known.things.items()
    env.close()


def test_a_lesson_of_a_megabyte_is_read_in_time_that_grows_with_its_length_only():
    began = time.process_time()
    for lesson in ("x" * 1_000_000, "a lichen means " * 50_000):
        with pytest.raises(ValueError, match="says nothing to do"):
            explorer.advice(lesson)
    assert time.process_time() - began < 10
