"""Dungeons: names, fixed secrets, and a text that gives nothing away."""

import collections
import random

import pytest

from envs.dungeon import dungeons, level

nle = pytest.importorskip("nle")

from envs import registry  # noqa: E402
from envs.minihack.game import load_minihack  # noqa: E402


def test_names_differ_in_their_adjective_and_splits_are_disjoint():
    names = [name for named in dungeons.splits().values() for name in named]
    assert len(dungeons.splits()["train"]) == 36
    assert len(dungeons.splits()["heldout"]) == 12
    assert len({name.split("_")[0] for name in names}) == len(names) == 48


def test_training_names_spread_evenly_over_the_thirds():
    count = collections.Counter(level.sector(name.replace("_", " ")) for name in dungeons.splits()["train"])
    assert set(count.values()) == {4}
    assert len({level.sector(name.replace("_", " ")) for name in dungeons.splits()["heldout"]}) == 9


def test_secret_depends_on_the_name_alone():
    """Golden squares: a change would make every stored experience wrong."""
    assert [level.design(name).stairs for name in ("amber cellar", "ruby hall", "thorny tomb")] == [(0, 1), (2, 7), (5, 2)]
    assert level.design("ruby hall", kind="maze").rows == level.design("ruby hall", kind="maze").rows


@pytest.mark.parametrize("hazards", ["none", "trap", "monster", "both"])
@pytest.mark.parametrize("kind", ["room", "maze"])
def test_stairs_are_told_exactly_when_they_have_been_next_to_the_hero(kind, hazards):
    env = registry.make("dungeon/ruby_hall", kind=kind, hazards=hazards, max_turns=40)
    plan = level.design("ruby hall", kind=kind)
    seen_once = False
    for seed in range(6):
        draw, first, near = random.Random(seed), env.reset(seed), False
        text = first.text
        while True:
            said = text.split()
            here = (int(said[2]), int(said[3]))
            assert plan.rows[here[1]][here[0]] == "."
            near = near or max(abs(here[0] - plan.stairs[0]), abs(here[1] - plan.stairs[1])) <= 1
            if "monster" not in said:  # one that stands on the stairs hides them
                assert ("stairs" in said) == near
            seen_once = seen_once or "stairs" in said
            # walk at random, but on average toward the stairs, so that both cases occur
            dx, dy = plan.stairs[0] - here[0], plan.stairs[1] - here[1]
            toward = ("south" if dy > 0 else "north" if dy < 0 else "") + ("east" if dx > 0 else "west" if dx < 0 else "")
            step = env.step(toward if draw.random() < 0.5 else draw.choice(first.actions))
            if step.success:
                assert here != plan.stairs
                assert step.observation.split()[2:6] == [*map(str, plan.stairs), "stairs", "here"]
            if step.done:
                break
            text = step.observation
    env.close()
    assert seen_once or kind == "maze"


@pytest.mark.parametrize("name", ["amber_cellar", "velvet_well", "golden_vault"])
def test_hero_starts_on_random_squares_away_from_the_stairs(name):
    env = registry.make(f"dungeon/{name}")
    x1, y1, x2, y2 = level.design(name.replace("_", " ")).no_start
    starts = {tuple(map(int, env.reset(seed).text.split()[2:4])) for seed in range(60)}
    assert not [(x, y) for x, y in starts if x1 <= x <= x2 and y1 <= y <= y2]
    assert len(starts) > 15
    env.close()


def test_level_that_does_not_compile_is_an_error(capfd):
    broken = level.design("amber cellar")
    minihack = load_minihack()

    class Broken(minihack.LevelGenerator):
        def get_des(self):
            return super().get_des() + "STAIR:nowhere\n"

    class Package:
        LevelGenerator = Broken
        MiniHackNavigation = minihack.MiniHackNavigation

    with pytest.raises(level.LevelError, match="amber cellar"):
        level.build(broken, Package)
    capfd.readouterr()


def test_moved_stairs_are_an_error():
    plan = level.design("amber cellar")
    game = level.build(plan, load_minihack())
    elsewhere = level.Level(plan.name, plan.rows, (8, 8), plan.no_start, plan.hazards)
    with pytest.raises(level.LevelError, match="no walk"):
        level.verify(game, elsewhere)
    game.close()


@pytest.mark.parametrize(("size", "kind"), [(5, "room"), (19, "room"), (10, "maze")])
def test_size_that_cannot_be_is_an_error(size, kind):
    with pytest.raises(ValueError, match="size"):
        level.design("amber cellar", size=size, kind=kind)


@pytest.mark.parametrize("size", [6, 7, 10, 12, 18])
def test_other_sizes_are_built_as_designed(size):
    registry.make("dungeon/jade_cellar", size=size).close()  # construction walks to the stairs
