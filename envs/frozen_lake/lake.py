"""A frozen lake: its map, which seed it follows from, and the exact rules of slipping.

Owns: the maps, the transition probabilities, and the best that any policy can do (dynamic programming over the turns that are left).
Promises: start and goal are random and different, and a way between them avoids every hole; the map follows from (seed, size) alone: a map
without a way is followed by the next one, counted in whole numbers.
Does not: move anybody (gymnasium does).

A square is its number, row by row. A move slides to the intended side or to either side of it, one third each; at the edge it stays.
"""

from __future__ import annotations

import dataclasses
import hashlib
import random
from collections import deque

ACTIONS = ("left", "down", "right", "up")  # in gymnasium's order
FROZEN_PROBABILITY = 0.95

_STEPS = ((-1, 0), (0, 1), (1, 0), (0, -1))


@dataclasses.dataclass(frozen=True)
class Lake:
    """A square of ``size`` by ``size`` squares."""

    size: int
    holes: frozenset[int]
    start: int
    goal: int

    def rows(self) -> list[str]:
        """The map in gymnasium's letters."""
        letters = ["H" if square in self.holes else "F" for square in range(self.size**2)]
        letters[self.start], letters[self.goal] = "S", "G"
        return ["".join(letters[y * self.size : (y + 1) * self.size]) for y in range(self.size)]

    def over(self, square: int) -> bool:
        """Whether an episode ends on this square."""
        return square == self.goal or square in self.holes

    def slide(self, square: int, action: int) -> int:
        """Where one square in the direction of ``ACTIONS[action]`` is."""
        x, y = square % self.size, square // self.size
        dx, dy = _STEPS[action]
        return max(0, min(self.size - 1, y + dy)) * self.size + max(0, min(self.size - 1, x + dx))

    def outcomes(self, square: int, action: int, *, slippery: bool) -> tuple[int, ...]:
        """The squares that a move may end on, each as likely as the others."""
        turns = (action - 1, action, action + 1) if slippery else (action,)
        return tuple(self.slide(square, turn % 4) for turn in turns)


def make_lake(seed: int, size: int = 6) -> Lake:
    """The lake that ``seed`` names. Raises ValueError for a size below 2."""
    if size < 2:
        raise ValueError(f"size {size}: a lake has at least 2 by 2 squares")
    attempt = 0
    while True:  # with 19 of 20 squares frozen, nearly every map has a way
        lake = _draw(f"frozen_lake/{size}/{seed}/{attempt}", size)
        if distance(lake) is not None:
            return lake
        attempt += 1


def distance(lake: Lake) -> int | None:
    """The fewest moves from start to goal on ice that does not slip, or None when there is no way."""
    far, ahead = {lake.start: 0}, deque([lake.start])
    while ahead:
        here = ahead.popleft()
        if here == lake.goal:
            return far[here]
        for action in range(4):
            there = lake.slide(here, action)
            if there not in far and there not in lake.holes:
                far[there] = far[here] + 1
                ahead.append(there)
    return None


def chances(lake: Lake, turns: int, *, slippery: bool) -> tuple[tuple[float, ...], ...]:
    """``chances(...)[left][square]``: the probability that the best policy still reaches the goal in ``left`` turns (0 to ``turns``).

    Bellman: c[left][s] = max over actions of the mean of c[left - 1] over the outcomes; 1 at the goal, 0 in a hole.
    """
    ends = [[lake.outcomes(square, action, slippery=slippery) for action in range(4)] for square in range(lake.size**2)]
    table = [tuple(float(square == lake.goal) for square in range(lake.size**2))]
    for _ in range(turns):
        last = table[-1]
        table.append(tuple(last[s] if lake.over(s) else max(_mean(last, squares) for squares in ends[s]) for s in range(lake.size**2)))
    return tuple(table)


def best(lake: Lake, table: tuple[tuple[float, ...], ...], square: int, left: int, *, slippery: bool) -> int:
    """An action of the best policy with ``left`` turns (1 or more) to go, by the table of ``chances``; of equal ones the quickest."""

    def value(action: int) -> tuple[float, float]:
        ends = lake.outcomes(square, action, slippery=slippery)
        return round(_mean(table[left - 1], ends), 9), sum(_mean(row, ends) for row in table[:left])

    return max(range(4), key=value)


def _mean(value: tuple[float, ...], squares: tuple[int, ...]) -> float:
    total = 0.0
    for square in squares:
        total += value[square]
    return total / len(squares)


def _draw(name: str, size: int) -> Lake:
    draw = random.Random(int.from_bytes(hashlib.sha256(name.encode()).digest(), "big")).random
    start = int(draw() * size**2)
    goal = (start + 1 + int(draw() * (size**2 - 1))) % size**2
    holes = frozenset(square for square in range(size**2) if draw() >= FROZEN_PROBABILITY) - {start, goal}
    return Lake(size, holes, start, goal)
