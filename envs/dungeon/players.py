"""Scripted players of the dungeons: yardsticks for what a lesson is worth.

Owns: three policies that read nothing but the observation text (and, where given, a lesson in words):
    random    any move
    explore   no lesson: steps onto stairs in sight, else toward the square that shows most unseen squares per move
    follow    goes to the middle of the third a lesson names ("north east"), steps onto stairs in sight, explores if there are none
and the expert, who follows the right lesson. They think in the words of the compact style; the full style is put into those first.
Promises: deterministic given the seed.
Does not: know the level, the expert apart.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

from envs.api import EnvTask
from envs.dungeon import level
from envs.minihack import reading
from envs.minihack.compact import COLUMNS, DIRECTIONS, ROWS, bearing
from envs.players import Player

KINDS = ("random", "explore", "expert", "follow")

_STEP = {name: delta for delta, name in DIRECTIONS.items()}
MOVES = tuple(_STEP)


def make_player(kind: str, task: EnvTask, *, seed: int, options: Mapping[str, Any], lesson: str = "") -> Player:
    """A player for one episode; ``options`` are the environment's. Raises ValueError as ``policy`` does."""
    lesson = _lesson_of(task, right=True) if kind == "expert" else lesson
    act = policy(kind, seed=seed, size=int(options.get("size", 9)), lesson=lesson)
    words = _Words(task, options) if options.get("style", "compact") == "full" else str
    if options.get("grammar", "bare") == "bare":
        return lambda text, actions: act(words(text))
    return lambda text, actions: f"<action>{act(words(text))}</action>"


def lesson(task: EnvTask, seed: int, *, right: bool = True) -> str:
    """Which third of the dungeon the stairs are in; not ``right``: the opposite one."""
    return _lesson_of(task, right=right)


def policy(kind: str, *, seed: int, size: int = 9, lesson: str = "") -> Callable[[str], str]:
    """Observation text -> move, for one episode in a square room of ``size`` squares.

    Raises ValueError for an unknown kind and for a lesson that names no third.
    """
    draw = random.Random(seed)
    if kind == "random":
        return lambda text: draw.choice(MOVES)
    if kind == "explore":
        return _Explorer(draw, size).act
    if kind in ("follow", "expert"):
        return _Explorer(draw, size, target=_middle_of(lesson, size)).act
    raise ValueError(f"no player {kind!r}: use one of {', '.join(KINDS)}")


def _lesson_of(task: EnvTask, *, right: bool) -> str:
    place = task.env.partition("/")[2].replace("_", " ")
    column, row = level.sector(place)
    if not right:  # the point reflection; of the centre, a corner
        column, row = (2 - column, 2 - row) if (column, row) != (1, 1) else (0, 0)
    return f"in the {place} the stairs are {ROWS[row]} {COLUMNS[column]}"


def _middle_of(lesson: str, size: int) -> tuple[int, int]:
    said = lesson.split()
    column = next((COLUMNS.index(word) for word in said if word in COLUMNS), None)
    row = next((ROWS.index(word) for word in said if word in ROWS), None)
    if column is None or row is None:
        raise ValueError(f"lesson {lesson!r} names no third: use one of {ROWS} and one of {COLUMNS}")
    return (2 * column + 1) * size // 6, (2 * row + 1) * size // 6


class _Words:
    """Full text -> what the policies read of the compact one: place, stairs in sight, whether the last move was refused."""

    def __init__(self, task: EnvTask, options: Mapping[str, Any]) -> None:
        name = task.env.partition("/")[2].replace("_", " ")
        self._room = level.design(name, kind=options.get("kind", "room"), size=int(options.get("size", 9))).room
        self._last: tuple[int, int] | None = None

    def __call__(self, text: str) -> str:
        seen = reading.read(text)
        x, y = seen.here
        said = f" third third {x - self._room.x} {y - self._room.y}"
        stairs = next((square for square, symbol in seen.symbols.items() if symbol == ">"), None)
        if stairs is not None and stairs != seen.here:
            said += f" stairs {bearing(stairs[0] - x, stairs[1] - y)}"
        refused, self._last = seen.here == self._last, seen.here
        return said + " blocked" * refused


class _Explorer:
    """Remembers the squares it has seen (it sees those next to it) and those that refused a move; goes to ``target`` first when there is
    one."""

    def __init__(self, draw: random.Random, size: int, target: tuple[int, int] | None = None):
        self._draw, self._size, self._target = draw, size, target
        self._seen: set[tuple[int, int]] = set()
        self._refused: set[tuple[int, int, str]] = set()
        self._last: tuple[int, int, str] | None = None

    def act(self, text: str) -> str:
        """The next move."""
        said = text.split()
        here = (int(said[2]), int(said[3]))
        self._seen.update((here[0] + dx, here[1] + dy) for dx in (-1, 0, 1) for dy in (-1, 0, 1))
        if "blocked" in said and self._last is not None:
            self._refused.add(self._last)
        if here == self._target:
            self._target = None
        stairs = said[said.index("stairs") + 1] if "stairs" in said else ""
        move = stairs or self._toward(here, self._target or self._best_target(here))
        if (*here, move) in self._refused:
            move = self._draw.choice(MOVES)
        self._last = (*here, move)
        return move

    def _best_target(self, here: tuple[int, int]) -> tuple[int, int]:
        """The square with the most unseen squares on and around it per move; equal ones are drawn from."""
        best, ties = 0.0, [here]
        for x in range(self._size):
            for y in range(self._size):
                distance = max(abs(x - here[0]), abs(y - here[1]))
                value = self._unseen_around(x, y) / distance if distance else 0.0
                if value > best:
                    best, ties = value, [(x, y)]
                elif value == best:
                    ties.append((x, y))
        return self._draw.choice(ties)

    def _unseen_around(self, x: int, y: int) -> int:
        columns, rows = range(max(0, x - 1), min(self._size, x + 2)), range(max(0, y - 1), min(self._size, y + 2))
        return sum((u, v) not in self._seen for u in columns for v in rows)

    def _toward(self, here: tuple[int, int], there: tuple[int, int]) -> str:
        dx, dy = there[0] - here[0], there[1] - here[1]
        delta = ((dx > 0) - (dx < 0), (dy > 0) - (dy < 0))
        return DIRECTIONS.get(delta) or self._draw.choice(MOVES)
