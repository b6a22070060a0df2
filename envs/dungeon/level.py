"""The level behind a dungeon's name.

Owns: where the stairs are, the shape of the level, its description file, and the proof that the game built it.
Promises: the level depends on the name (and kind, size) alone, through SHA-256, so it is the same everywhere and for ever; ``verify``
raises ``LevelError`` unless a hero that walks to the designed square is told by the game that these are the stairs.
Does not: put anything into words.

The hero starts on a random square outside the stairs' third of the room and not next to it; hazards lie on random squares. Both follow from
the game seed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import random
from collections import deque
from typing import Any, Literal

from envs.minihack.compact import Room
from envs.minihack.env import MOVES
from envs.minihack.game import Ending, Game

Kind = Literal["room", "maze"]
Hazards = Literal["none", "trap", "monster", "both"]
Square = tuple[int, int]  # column, row inside the level, from 0

_FLOOR, _ROCK = ".", " "
_STEP = dict(zip(MOVES, ((0, -1), (1, 0), (0, 1), (-1, 0), (1, -1), (1, 1), (-1, 1), (-1, -1)), strict=True))
_VERIFY_SEEDS = range(8)  # a monster or a trap may stop a walk
_HINT = "the level compiler's message is on stderr"


class LevelError(RuntimeError):
    """The game did not build the level that was asked for (its level compiler reports errors on stderr only and goes on)."""


@dataclasses.dataclass(frozen=True)
class Level:
    """A fixed level: ``rows`` of floor and rock, the stairs' square, and the rectangle (x1, y1, x2, y2) in which the hero does not
    start."""

    name: str
    rows: tuple[str, ...]
    stairs: Square
    no_start: tuple[int, int, int, int]
    hazards: Hazards

    @property
    def room(self) -> Room:
        """Where the level lies on the screen: NetHack centres a map, then moves it to an even column and an odd row of the screen."""
        width, height = len(self.rows[0]), len(self.rows)
        x, y = 1 + (76 - width) // 2, 2 + (18 - height) // 2
        return Room(x + x % 2, y + 1 - y % 2, width, height)


def check_size(kind: Kind, size: int) -> None:
    """Raises ValueError for a size that cannot hold a level."""
    if not 6 <= size <= 18 or (kind == "maze" and size % 2 == 0):
        raise ValueError(f"dungeon size {size}: use 6 to 18, odd for a maze")


def design(name: str, *, kind: Kind = "room", size: int = 9, hazards: Hazards = "none") -> Level:
    """The level of ``name``: a square of ``size`` squares. Raises ValueError for a size that cannot hold it."""
    check_size(kind, size)
    rows = _maze(name, size) if kind == "maze" else (_FLOOR * size,) * size
    column, row = sector(name)
    (x1, x2), (y1, y2) = _third(column, size), _third(row, size)
    free = [
        (x, y) for y in range(y1, y2 + 1) for x in range(x1, x2 + 1) if rows[y][x] == _FLOOR and (kind == "room" or x % 2 == y % 2 == 0)
    ]
    stairs = free[_hash(name, "square") % len(free)]
    near = (max(0, x1 - 1), max(0, y1 - 1), min(size - 1, x2 + 1), min(size - 1, y2 + 1))
    return Level(name, rows, stairs, near, hazards)


def sector(name: str) -> tuple[int, int]:
    """The third (column, row; 0, 1 or 2 each) of the room in which the stairs of ``name`` lie."""
    number = _hash(name) % 9
    return number % 3, number // 3


def build(level: Level, minihack: Any, **options: Any) -> Game:
    """Compile ``level`` into a game. Raises ``LevelError`` when the result is not the level."""
    generator = minihack.LevelGenerator(map="\n".join(level.rows), lit=False)
    generator.add_goal_pos(level.stairs)
    side = len(level.rows) - 1
    generator.add_line(f"BRANCH:(0,0,{side},{side}),{level.no_start}".replace(" ", ""))
    if level.hazards in ("trap", "both"):
        generator.add_trap("dart")
    if level.hazards in ("monster", "both"):
        generator.add_monster("sewer rat", "r", args=("hostile",))
    game = Game(minihack.MiniHackNavigation, des_file=generator.get_des(), **options)
    try:
        verify(game, level)
    except BaseException:
        game.close()
        raise
    return game


def verify(game: Game, level: Level) -> None:
    """Walk to the stairs by the shortest way. Raises ``LevelError`` when no walk ends on them."""
    room = level.room
    toward = _ways_to(level.stairs, level.rows)
    for seed in _VERIFY_SEEDS:
        screen = game.reset(seed)
        for _ in range(2 * len(toward) + 20):
            here = (screen.x - room.x, screen.y - room.y)
            if here not in toward:
                raise LevelError(f"dungeon {level.name!r}: the hero stands at {here}, no floor of this level; {_HINT}")
            screen, ending = game.step(MOVES.index(toward[here] or "north"))
            if ending == Ending.SUCCESS and (screen.x - room.x, screen.y - room.y) == level.stairs:
                return
            if ending != Ending.RUNNING:
                break
    raise LevelError(f"dungeon {level.name!r}: no walk reached the stairs at {level.stairs}; {_HINT}")


def _ways_to(goal: Square, rows: tuple[str, ...]) -> dict[Square, str]:
    """For every square from which ``goal`` can be reached the first move of a shortest way ("" at the goal)."""
    ways, queue = {goal: ""}, deque([goal])
    while queue:
        x, y = queue.popleft()
        for move, (dx, dy) in _STEP.items():
            before = (x - dx, y - dy)
            inside = 0 <= before[0] < len(rows[0]) and 0 <= before[1] < len(rows)
            if inside and before not in ways and rows[before[1]][before[0]] == _FLOOR:
                ways[before] = move
                queue.append(before)
    return ways


def _maze(name: str, size: int) -> tuple[str, ...]:
    """A perfect maze (one way between any two cells) on the squares with even coordinates."""
    draw = random.Random(_hash(name, "maze")).random  # the one method whose stream Python promises to keep
    grid = [[_ROCK] * size for _ in range(size)]
    path: list[Square] = [(0, 0)]
    grid[0][0] = _FLOOR
    while path:
        x, y = path[-1]
        ahead = [(x + 2 * dx, y + 2 * dy) for dx, dy in ((0, -1), (1, 0), (0, 1), (-1, 0))]
        ahead = [(u, v) for u, v in ahead if 0 <= u < size and 0 <= v < size and grid[v][u] == _ROCK]
        if not ahead:
            path.pop()
            continue
        u, v = ahead[int(draw() * len(ahead))]
        grid[v][u] = grid[(y + v) // 2][(x + u) // 2] = _FLOOR
        path.append((u, v))
    return tuple("".join(row) for row in grid)


def _third(index: int, size: int) -> tuple[int, int]:
    """First and last offset of a third of a side, consistent with ``compact.third``."""
    inside = [offset for offset in range(size) if min(2, 3 * offset // size) == index]
    return inside[0], inside[-1]


def _hash(*words: str) -> int:
    return int.from_bytes(hashlib.sha256("/".join(words).encode()).digest()[:8], "big")
