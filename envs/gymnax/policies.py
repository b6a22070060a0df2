"""Ways to play the gymnax games, from the text to an action.

Owns: the policies that the scripted players are made of.
Promises: a policy reads the text in either style and remembers no more than it has read.
Does not: choose a policy, or know what is hidden.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable

Policy = Callable[[str], str]
Square = tuple[int, int]  # row, column

_WAYS: dict[str, Square] = {"up": (-1, 0), "right": (0, 1), "down": (1, 0), "left": (0, -1)}
_MAZE = frozenset((row, column) for row in range(1, 10) for column in range(1, 10) if row % 2 or column % 2)


def recite(moves: list[str]) -> Policy:
    """The moves one after the other; the last one again at the end."""
    ahead = deque(moves)
    return lambda text: ahead.popleft() if len(ahead) > 1 else ahead[0]


def chase(game: str, *, toward: bool) -> Policy:
    """Bring the paddle under the place where the ball comes down, or keep it away from there."""

    def policy(text: str) -> str:
        if "paddle" not in text:  # the ball is down
            return "stay"
        paddle = _number(r"paddle column (\d+)", text)
        target = _number(r"ball column (\d+)", text) if game == "catch" else _landing(text)
        if not toward:
            return "left" if target > paddle or (target == paddle and paddle > 2) else "right"
        return "stay" if target == paddle else "left" if target < paddle else "right"

    return policy


def remember(*, opposite: bool) -> Policy:
    """Keep the bits that are shown and say the one that is asked for, or the opposite of it."""
    kept: list[str] = []

    def policy(text: str) -> str:
        shown = re.search(r"bits((?: zero| one)+)", text)
        if shown is not None:
            kept[:] = shown[1].split()
        asked = re.search(r"say bit (first|second|third)", text)
        bit = kept[("first", "second", "third").index(asked[1])] if asked is not None and kept else "zero"
        return ({"zero": "one", "one": "zero"}[bit]) if opposite else bit

    return policy


def prepare_for(weather: str) -> Policy:
    """Take the umbrella when the forecast says ``weather``."""
    return lambda text: "take" if f"forecast {weather}" in text else "leave"


def through_doors(doors: Iterable[Square]) -> Policy:
    """Go the shortest way through the four rooms when these are the doorways."""
    walls = {(row, 6) for row in range(13)} | {(6, column) for column in range(6)} | {(7, column) for column in range(7, 13)}
    floor = frozenset({(row, column) for row in range(1, 12) for column in range(1, 12)} - walls | set(doors))

    def policy(text: str) -> str:
        you = (_number(r"you row (\d+)", text), _number(r"you row \d+ column (\d+)", text))
        goal = (_number(r"goal row (\d+)", text), _number(r"goal row \d+ column (\d+)", text))
        way = shortest(you, goal, floor)
        return way[0] if way else "up"

    return policy


def maze_way(start: Square, goal: Square) -> list[str]:
    """The shortest way through the maze; where start and goal are the same square, a step away and back."""
    return shortest(start, goal, _MAZE) or (["up", "down"] if (start[0] - 1, start[1]) in _MAZE else ["left", "right"])


def shortest(start: Square, goal: Square, floor: frozenset[Square]) -> list[str]:
    """The moves of a shortest way over ``floor``; none when there is no way."""
    came: dict[Square, tuple[Square, str] | None] = {start: None}
    ahead = deque([start])
    while ahead and goal not in came:
        here = ahead.popleft()
        for move, (down, right) in _WAYS.items():
            there = (here[0] + down, here[1] + right)
            if there in floor and there not in came:
                came[there] = (here, move)
                ahead.append(there)
    moves: list[str] = []
    step = came.get(goal)
    while step is not None:
        moves.append(step[1])
        step = came[step[0]]
    return moves[::-1]


def _landing(text: str) -> int:
    """The column where Breakout's ball comes down, if no brick is in its way; going up, its column now.

    At a side wall the ball stays in its column for one step and turns round.
    """
    column, height = _number(r"ball column (\d+)", text), _number(r"ball column \d+ height (\d+)", text)
    last_column, last_height = _number(r"from column (\d+)", text), _number(r"from column \d+ height (\d+)", text)
    if (column, height) == (last_column, last_height):  # it starts in a corner, flying down and inward
        sideways = 1 if column == 0 else -1
    elif height > last_height:
        return column
    else:
        sideways = (column > last_column) - (column < last_column) or (1 if column == 0 else -1)
    while height > 0:
        column, height = column + sideways, height - 1
        if not 0 <= column <= 9:
            column, sideways = min(9, max(0, column)), -sideways
    return column


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    if found is None:
        raise ValueError(f"no {pattern!r} in {text!r}")
    return int(found[1])
