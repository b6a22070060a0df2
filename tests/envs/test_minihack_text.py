"""NetHack in words: every task, both styles, and what the text may and must say."""

import hashlib
import os
import pathlib
import random
import re
import tempfile

import pytest

nle = pytest.importorskip("nle")

from envs import registry  # noqa: E402
from envs.api import TextEnv  # noqa: E402
from envs.minihack import compact, full, tasks  # noqa: E402

# Observations of seeds 1 and 2 of a dark room with monsters and traps under a fixed action sequence. Anything that reads the clock, a
# process id or an unseeded random stream changes them.
GOLDEN = {1: "61a0bbf3f569269c", 2: "8166d293114f5f2a"}


def play(env, seed, turns=20):
    """The observations of one episode under moves drawn from ``seed``."""
    draw, first = random.Random(seed), env.reset(seed)
    texts = [first.text]
    for _ in range(turns):
        step = env.step(draw.choice(first.actions))
        texts.append(step.observation)
        if step.done:
            break
    return texts


def digest(texts):
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


@pytest.fixture(scope="module")
def monsters():
    env = registry.make("minihack/room_ultimate_15x15", grammar="bare", style="full")
    yield env
    env.close()


def test_N03_seed_fixes_the_episode_byte_for_byte(monsters):
    assert {seed: digest(play(monsters, seed)) for seed in GOLDEN} == GOLDEN
    other = registry.make("minihack/room_ultimate_15x15", grammar="bare", style="full")
    assert play(other, 1) == play(monsters, 1) != play(monsters, 2)
    other.close()


@pytest.mark.parametrize(("name", "style"), [(name, style) for name in tasks.names() for style in tasks.styles(name)])
def test_every_task_creates_and_steps(name, style):
    env = registry.make(f"minihack/{name}", style=style, grammar="bare")
    assert isinstance(env, TextEnv)
    texts = play(env, seed=0, turns=8)
    assert len(texts) == 9 or len(set(texts)) > 1
    if style == "compact":
        words = set(compact.words(26))
        assert all(set(text.split()) <= words and text == "".join(f" {word}" for word in text.split()) for text in texts)
    env.close()
    env.close()


def test_N01_invalid_action_repeats_the_observation_and_costs_a_turn():
    env = registry.make("minihack/room_5x5", max_turns=3)
    first = env.reset(0).text
    before = env._game.screen()
    step = env.step("fly to moon")
    assert step.observation.endswith(first)
    assert (step.reward, step.valid, step.done, step.info["turn"]) == (0.0, False, False, 1)
    assert env._game.screen().time == before.time
    moved = env.step("<action>east</action>")
    assert moved.valid
    assert moved.observation != first
    last = env.step("fly to moon")
    assert (last.truncated, last.terminated, last.success) == (True, False, False)
    assert last.observation.endswith(moved.observation)  # the notice of the first one is not repeated
    with pytest.raises(RuntimeError, match="reset"):
        env.step("<action>east</action>")
    env.close()


def test_success_shows_where_the_hero_ended():
    env = registry.make("minihack/room_5x5", style="compact", grammar="bare")
    assert env.reset(3).text.startswith(" north west 0 0 stairs southeast")
    steps = [env.step("southeast") for _ in range(4)]
    assert [step.reward for step in steps] == [0, 0, 0, 1]
    assert [step.success for step in steps] == [False, False, False, True]
    assert steps[-1].observation == " south east 4 4 stairs here"
    assert (steps[-1].terminated, steps[-1].truncated) == (True, False)
    env.close()


def test_death_is_terminated_without_success_and_shows_the_last_screen():
    env = registry.make("minihack/room_ultimate_15x15", grammar="bare", max_turns=200)
    draw, first = random.Random(4), env.reset(4)
    while not (step := env.step(draw.choice(first.actions))).done:
        pass
    assert (step.terminated, step.truncated, step.success, step.reward) == (True, False, False, 0.0)
    assert "Message: You die" in step.observation
    rows = step.observation.split("\n\n")[1].split("\n")[1:]
    assert rows[4][4] == "@"
    env.close()


def test_turn_limit_is_truncation():
    env = registry.make("minihack/room_15x15", grammar="bare", max_turns=4)
    env.reset(0)
    steps = [env.step("north") for _ in range(4)]
    assert [step.done for step in steps] == [False, False, False, True]
    assert (steps[-1].terminated, steps[-1].truncated) == (False, True)
    env.close()


def test_blocked_is_said_only_when_a_move_was_refused():
    env = registry.make("minihack/room_5x5", style="compact", grammar="bare")
    env.reset(0)
    refused = env.step("north")
    assert refused.observation.endswith(" blocked")
    assert not refused.info["effective"]
    moved = env.step("east")
    assert "blocked" not in moved.observation
    assert moved.info["effective"]
    env.close()


def test_legend_holds_exactly_what_the_crop_shows():
    env = registry.make("minihack/room_15x15", grammar="bare")  # lit: the stairs in the far corner are on the map, but not in the crop
    text = env.reset(0).text
    assert (env._game.screen().chars == ord(">")).any()
    _, crop, legend, *_ = text.split("\n\n")
    shown = set("".join(crop.split("\n")[1:])) - {" "}
    assert {line[0] for line in legend.split("\n")[1:]} == shown == {"@", "."}
    env.close()


def test_position_and_health_are_those_of_the_hero(monsters):
    for seed in range(5):
        text = monsters.reset(seed).text
        screen = monsters._game.screen()
        x, y, hp, max_hp = map(int, re.search(r"Position: x (\d+), y (\d+). Health: (\d+) of (\d+)", text).groups())
        assert screen.chars[y, x] == ord("@")
        assert 0 < hp <= max_hp
        step = monsters.step("fly")
        assert f"Health: {hp} of" in step.observation


@pytest.mark.parametrize(
    ("delta", "name"),
    [((0, -1), "north"), ((1, -1), "northeast"), ((5, 2), "east"), ((3, 2), "southeast"), ((-1, 4), "south"), ((-7, -7), "northwest")],
)
def test_bearing_is_the_nearest_of_eight(delta, name):
    assert compact.bearing(*delta) == name


def test_thirds_cover_a_side_in_order():
    told = [compact.third(offset, 9, compact.ROWS) for offset in range(9)]
    assert told == ["north"] * 3 + ["middle"] * 3 + ["south"] * 3


def test_hundred_episodes_leave_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    env = registry.make("minihack/room_ultimate_5x5", grammar="bare", style="compact")
    play(env, 0)
    open_files, own_files = len(os.listdir("/proc/self/fd")), len(list(tmp_path.rglob("*")))
    for seed in range(100):
        play(env, seed, turns=10)
    assert len(os.listdir("/proc/self/fd")) == open_files
    assert len(list(tmp_path.rglob("*"))) <= own_files + 5
    env.close()
    assert not list(tmp_path.iterdir())


def test_crop_is_the_size_the_prompt_draws():
    assert full.CROP == 9


def test_second_instance_of_a_level_reuses_the_compiled_level_and_leaves_the_package_alone(monkeypatch):
    shipped = pathlib.Path(nle.__file__).parent / "nethackdir" / "nhdat"  # every instance starts with a link to it
    before = hashlib.sha256(shipped.read_bytes()).digest()
    first = registry.make("minihack/room_15x15", grammar="bare")
    monkeypatch.setattr("subprocess.call", None)  # the level compiler
    second = registry.make("minihack/room_15x15", grammar="bare")
    assert play(first, 5) == play(second, 5)
    first.close()
    second.close()
    assert hashlib.sha256(shipped.read_bytes()).digest() == before
