"""An observation in a handful of words, for a model with a vocabulary of a few hundred.

Owns: the ``compact`` text style and its words.
Promises: only what the player sees, read from the glyphs on the screen. Every word has one leading space, so a word-piece tokenizer whose
pieces carry the space loses nothing.

    " {north|middle|south} {west|centre|east} {x} {y}"   the third of the room the hero is in, then column and row inside the room, from 0
    " {thing} {direction}"                               for the nearest thing of each kind in sight or remembered on the map
    " stairs here"                                       on the stairs
    " blocked"                                           the last move was refused: nothing moved and no time passed
    " hurt"                                              health is below its maximum

Where the room lies on the screen is static knowledge of the level (a person would see its walls); what is in it is not.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from typing import Any

import numpy as np
from jaxtyping import Int8

from envs.minihack.game import Screen

ROWS = ("north", "middle", "south")
COLUMNS = ("west", "centre", "east")
DIRECTIONS = {
    (0, -1): "north",
    (1, -1): "northeast",
    (1, 0): "east",
    (1, 1): "southeast",
    (0, 1): "south",
    (-1, 1): "southwest",
    (-1, 0): "west",
    (-1, -1): "northwest",
}
THINGS = ("stairs", "trap", "monster", "door", "key", "boulder", "water", "lava")  # in the order they are told
MARKS = ("here", "blocked", "hurt", "unknown")  # "unknown" is the notice for a reply that was no action

# Offsets of the map symbols among the game's "cmap" glyphs (NetHack 3.6 defsym.h).
_OPEN_OR_CLOSED_DOORS = range(13, 17)
_STAIRS_DOWN = 24
_WATER = (32, 41)
_LAVA = 34


@dataclasses.dataclass(frozen=True)
class Room:
    """Where the playable rectangle lies on the screen: its first column and row, its width and height in squares."""

    x: int
    y: int
    width: int
    height: int


def words(largest: int) -> tuple[str, ...]:
    """Every word ``render`` can say in rooms whose side is at most ``largest`` squares, each once."""
    told = (*ROWS, *COLUMNS, *DIRECTIONS.values(), *THINGS, *MARKS, *(str(n) for n in range(largest)))
    return tuple(dict.fromkeys(told))


def render(screen: Screen, room: Room, *, blocked: bool = False, on_stairs: bool = False) -> str:
    """The words for ``screen``.

    ``blocked``: the last move was refused. ``on_stairs``: the hero stands on the stairs, whose symbol it covers.
    """
    x, y = screen.x - room.x, screen.y - room.y
    said = [third(y, room.height, ROWS), third(x, room.width, COLUMNS), str(x), str(y)]
    seen = _nearest(screen)
    if on_stairs:
        said += ["stairs", "here"]
        seen.pop("stairs", None)
    for thing in THINGS:
        if thing in seen:
            said += [thing, seen[thing]]
    said += ["blocked"] * blocked + ["hurt"] * (screen.hp < screen.max_hp)
    return "".join(f" {word}" for word in said)


def third(offset: int, size: int, names: tuple[str, str, str]) -> str:
    """The name of the third that square ``offset`` (0-based) of a side of ``size`` squares lies in."""
    return names[min(2, max(0, 3 * offset // size))]


def bearing(dx: int, dy: int) -> str:
    """The nearest of the eight directions; ``dy`` grows southward. Exact for adjacent squares and along straight lines."""
    if abs(dx) > 2 * abs(dy):
        dy = 0
    elif abs(dy) > 2 * abs(dx):
        dx = 0
    return DIRECTIONS[int(np.sign(dx)), int(np.sign(dy))]


def _nearest(screen: Screen) -> dict[str, str]:
    """The direction of the nearest thing of each kind (king's moves; reading order breaks ties). The hero's own square is left out."""
    kinds = _thing_of_glyph()[screen.glyphs]
    kinds[screen.y, screen.x] = -1
    best: dict[str, tuple[int, str]] = {}
    for y, x in np.argwhere(kinds >= 0).tolist():
        dx, dy = x - screen.x, y - screen.y
        thing, distance = THINGS[kinds[y, x]], max(abs(dx), abs(dy))
        if thing not in best or distance < best[thing][0]:
            best[thing] = (distance, bearing(dx, dy))
    return {thing: direction for thing, (_, direction) in best.items()}


@functools.cache
def _thing_of_glyph() -> Int8[np.ndarray, " glyphs"]:
    """For each glyph of the game the index in ``THINGS``, or -1 for what is not worth a word."""
    game = nethack()
    kinds = np.full(game.MAX_GLYPH + 1, -1, np.int8)
    for glyph in range(game.MAX_GLYPH):
        if game.glyph_is_monster(glyph) or game.glyph_is_invisible(glyph):
            kinds[glyph] = THINGS.index("monster")
        elif game.glyph_is_trap(glyph):
            kinds[glyph] = THINGS.index("trap")
    cmap = game.GLYPH_CMAP_OFF
    kinds[cmap + _STAIRS_DOWN] = THINGS.index("stairs")
    kinds[[cmap + i for i in _OPEN_OR_CLOSED_DOORS]] = THINGS.index("door")
    kinds[[cmap + i for i in _WATER]] = THINGS.index("water")
    kinds[cmap + _LAVA] = THINGS.index("lava")
    for glyph in range(game.GLYPH_OBJ_OFF, game.GLYPH_CMAP_OFF):
        name = _object_name(glyph)
        if name in ("boulder", "key"):
            kinds[glyph] = THINGS.index(name)
    return kinds


def _object_name(glyph: int) -> str:
    """ "boulder", "key" (the skeleton key) or "" for an object's glyph."""
    game = nethack()
    if not game.glyph_is_normal_object(glyph):
        return ""
    name = game.OBJ_NAME(game.objclass(game.glyph_to_obj(glyph)))
    return {"boulder": "boulder", "skeleton key": "key"}.get(name or "", "")


def nethack() -> Any:
    """NLE's tables of glyphs; imported late because the game is optional, and needed only once there is a screen to read."""
    return importlib.import_module("nle.nethack")
