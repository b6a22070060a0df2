"""What lies behind a level's screen, for players that may know it.

Owns: reading a screen into a ``Level``, and ``levels``: the same level, lit and with its map known.
Promises: the lit and mapped level of a seed is the level of that seed (same walls, stairs, traps, things and start): neither word in a
level file draws from the game's random streams.
Does not: say anything to a player that reads the text.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from pathlib import Path
from typing import Any

import numpy as np

from envs.minihack import tasks
from envs.minihack.compact import nethack
from envs.minihack.game import Screen

Square = tuple[int, int]  # column, row on the screen

# Offsets among the game's "cmap" glyphs (NetHack 3.6 defsym.h).
_FLOOR = (*range(12, 15), *range(19, 32), 33, 39, 40)  # doorway, open doors; room, corridor, stairs, furniture; ice, air, cloud
_DOORS, _CLOSED, _STAIRS, _WATER, _LAVA = (13, 14, 15, 16), (15, 16), 24, (32, 41), 34
_THINGS = "!=[/()"  # symbols of what a task may need


@dataclasses.dataclass(frozen=True)
class Level:
    """The squares of a level by what is there. ``floor`` holds all that can be walked on, traps and what lies under things included."""

    hero: Square
    floor: frozenset[Square]
    doors: frozenset[Square]  # open, closed or locked: never entered or left diagonally
    closed: frozenset[Square]
    traps: frozenset[Square]
    water: frozenset[Square]
    lava: frozenset[Square]
    boulders: frozenset[Square]
    monsters: frozenset[Square]
    peaceful: frozenset[Square]
    things: dict[Square, str]
    stairs: Square | None


def read(screen: Screen) -> Level:
    """The level as far as ``screen`` shows it."""
    tables = _tables()
    squares: dict[str, set[Square]] = {
        kind: set() for kind in ("floor", "doors", "closed", "traps", "water", "lava", "boulders", "monsters")
    }
    peaceful: set[Square] = set()
    things: dict[Square, str] = {}
    for y, x in np.argwhere(tables["drawn"][screen.glyphs]).tolist():
        glyph, symbol = int(screen.glyphs[y, x]), chr(screen.chars[y, x])
        for kind, found in squares.items():
            if tables[kind][glyph]:
                found.add((x, y))
        if tables["thing"][glyph] and symbol in _THINGS:
            things[x, y] = symbol
        if tables["monsters"][glyph] and (x, y) != (screen.x, screen.y) and b"peaceful" in screen.descriptions[y, x].tobytes():
            peaceful.add((x, y))
    squares["monsters"].discard((screen.x, screen.y))
    squares["floor"].add((screen.x, screen.y))
    stairs = np.argwhere(screen.glyphs == nethack().GLYPH_CMAP_OFF + _STAIRS)
    at = (int(stairs[0][1]), int(stairs[0][0])) if len(stairs) else None
    frozen = {kind: frozenset(found) for kind, found in squares.items()}
    return Level((screen.x, screen.y), **frozen, peaceful=frozenset(peaceful), things=things, stairs=at)


def levels(name: str, seed: int) -> Level:
    """The level of task ``name`` that ``seed`` names, all of it but its monsters. Raises ``EnvUnavailable``."""
    mapped = tasks.make_game(name, _mapped)
    try:
        known = read(mapped.reset(seed))
    finally:
        mapped.close()
    lit = tasks.make_game(name, _lit)  # the mapped one hides some things that lie in sight
    try:
        things = read(lit.reset(seed)).things
    finally:
        lit.close()
    return dataclasses.replace(known, things=known.things | things, floor=known.floor | frozenset(things))


@functools.cache
def _mapped(environment: type[Any]) -> type[Any]:
    return _changed(environment, flags=("premapped",))


@functools.cache
def _lit(environment: type[Any]) -> type[Any]:
    return _changed(environment, flags=())


def _changed(environment: type[Any], flags: tuple[str, ...]) -> type[Any]:
    """A subclass whose level is lit and has ``flags``."""
    from minihack.level_generator import PATH_DAT_DIR

    def patch_nhdat(self: Any, des_file: str) -> None:
        text = Path(PATH_DAT_DIR, des_file).read_text(encoding="utf-8") if des_file.endswith(".des") else des_file
        text = text.replace("unlit", "lit")
        for flag in flags:
            if flag in text:
                continue
            if "FLAGS:" in text:
                text = re.sub(r"(FLAGS:\s*[\w,]+)", rf"\1,{flag}", text, count=1)
            else:
                text = re.sub(r"(^(?:MAZE|LEVEL):.*$)", rf"\1\nFLAGS:{flag}", text, count=1, flags=re.MULTILINE)
        environment._patch_nhdat(self, text)

    return type(f"Known{environment.__name__}", (environment,), {"_patch_nhdat": patch_nhdat})


@functools.cache
def _tables() -> dict[str, np.ndarray]:
    """For each glyph of the game whether it is drawn as that kind of square."""
    game = nethack()
    size, cmap = game.MAX_GLYPH + 1, game.GLYPH_CMAP_OFF

    def of(offsets: Any) -> np.ndarray:
        table = np.zeros(size, bool)
        table[[cmap + i for i in offsets]] = True
        return table

    monsters = np.array([game.glyph_is_monster(i) or game.glyph_is_invisible(i) for i in range(game.MAX_GLYPH)] + [False])
    traps = np.array([game.glyph_is_trap(i) for i in range(game.MAX_GLYPH)] + [False])
    things = np.array([game.glyph_is_normal_object(i) for i in range(game.MAX_GLYPH)] + [False])
    boulders = np.zeros(size, bool)
    for i in np.flatnonzero(things).tolist():
        boulders[i] = game.OBJ_NAME(game.objclass(game.glyph_to_obj(i))) == "boulder"
    tables = {
        "floor": of((*_FLOOR, *_CLOSED)) | traps | (things & ~boulders) | monsters,
        "doors": of(_DOORS),
        "closed": of(_CLOSED),
        "traps": traps,
        "water": of(_WATER),
        "lava": of((_LAVA,)),
        "boulders": boulders,
        "monsters": monsters,
        "thing": things & ~boulders,
    }
    return tables | {"drawn": np.logical_or.reduce(list(tables.values()))}
