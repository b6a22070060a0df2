"""The text says what the player sees, and nothing more."""

import collections
import random

import numpy as np
import pytest

pytest.importorskip("nle")

from envs import registry
from envs.minihack import compact, full, oracle, reading, tasks
from envs.minihack.compact import Room, nethack
from envs.minihack.game import Screen

BLANK = ord(" ")


def walk(name, seed, turns, **options):
    """The environment after each turn of random play."""
    env = registry.make(f"minihack/{name}", grammar="bare", max_turns=turns, **options)
    draw, seen = random.Random(seed), env.reset(seed)
    yield env, seen.text
    actions = seen.actions
    for _ in range(turns):
        step = env.step(draw.choice(actions))
        actions = step.actions
        yield env, step.observation
        if step.done:
            break
    env.close()


def without_what_is_not_drawn(screen: Screen) -> Screen:
    """The screen with noise wherever the player sees nothing."""
    hidden = screen.chars == BLANK
    hidden[screen.y, screen.x] = False
    noise = np.random.default_rng(0)
    descriptions, glyphs = screen.descriptions.copy(), screen.glyphs.copy()
    descriptions[hidden] = noise.integers(65, 90, descriptions[hidden].shape, dtype=np.uint8)
    glyphs[hidden] = nethack().GLYPH_CMAP_OFF  # plain rock
    values = {name: getattr(screen, name) for name in Screen.__dataclass_fields__}
    return Screen(**values | {"descriptions": descriptions, "glyphs": glyphs})


@pytest.mark.parametrize("name", tasks.names())
def test_text_follows_from_the_squares_that_are_drawn(name):
    for env, text in walk(name, seed=1, turns=12):
        masked = without_what_is_not_drawn(env.screen)
        assert full.render(masked, env._now) == text
        assert full.render(masked, env._now, whole=True) == full.render(env.screen, env._now, whole=True)
        if "room" in tasks._tasks()[name]:
            room = Room(*tasks._tasks()[name]["room"])
            assert compact.render(masked, room) == compact.render(env.screen, room)


@pytest.mark.parametrize("name", ["room_ultimate_15x15", "keyroom_s15", "hidenseek_lava", "memento_f4", "lavacross_full"])
def test_map_is_what_the_terminal_shows(name):
    """The characters are those of the screen a person would play on."""
    for env, _ in walk(name, seed=2, turns=10):
        inner = env._game._env
        terminal = inner.last_observation[inner._observation_keys.index("tty_chars")]
        if env._turn >= 0:  # after the end the terminal shows something else
            assert (terminal[1:22, :79] == env.screen.chars).all()


@pytest.mark.parametrize("name", [name for name in tasks.names() if name.startswith(("room_dark", "room_ultimate", "keyroom_dark"))])
def test_in_the_dark_only_squares_that_were_next_to_the_hero_are_drawn(name):
    for seed in range(3):
        near: set[tuple[int, int]] = set()
        for env, text in walk(name, seed=seed, turns=25, map="whole"):
            symbols = reading.read(text).symbols
            stood = {(env.screen.x, env.screen.y)} | {square for square, symbol in symbols.items() if symbol == "^"}  # it may teleport
            near |= {(x + dx, y + dy) for x, y in stood for dx in (-1, 0, 1) for dy in (-1, 0, 1)}
            assert set(symbols) <= near


@pytest.mark.parametrize(("name", "seeds"), [("room_dark_5x5", 60), ("keyroom_dark_s5", 60), ("room_ultimate_5x5", 60)])
def test_equal_first_screens_hide_different_levels(name, seeds):
    """Where the stairs are does not follow from a text that does not show them."""
    env = registry.make(f"minihack/{name}")
    by_text = collections.defaultdict(list)
    for seed in range(seeds):
        by_text[env.reset(seed).text].append(seed)
    env.close()
    alike = [group[:4] for text, group in by_text.items() if len(group) > 1 and ">" not in text.split("Legend")[0]]
    differ = [group for group in alike if len({oracle.levels(name, seed).stairs for seed in group}) > 1]
    assert differ


def test_legend_tells_apart_what_has_the_same_symbol():
    texts = [text for seed in range(4) for _, text in walk("hidenseek", seed=seed, turns=6)]
    assert any("\n# " in text and "tree" in text for text in texts)
    assert any("\n# " in text and "cloud" in text for text in texts)


def test_whole_map_holds_the_crop_and_says_where_it_lies():
    for (env, crop), (_, whole) in zip(walk("mazewalk_9x9", 3, 15), walk("mazewalk_9x9", 3, 15, map="whole"), strict=True):
        around, all_of_it = reading.read(crop), reading.read(whole)
        assert around.symbols.items() <= all_of_it.symbols.items()
        assert all(env.screen.chars[y, x] == ord(symbol) for (x, y), symbol in all_of_it.symbols.items())
        assert len(all_of_it.symbols) == (env.screen.chars != BLANK).sum()
    assert "map as far as you remember" in registry.spec("minihack/mazewalk_9x9", map="whole").system_prompt
