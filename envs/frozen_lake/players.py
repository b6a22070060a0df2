"""Scripted players of FrozenLake.

Owns: random, expert (the best policy there is, by dynamic programming over the turns that are left) and follow (goes the way a lesson says:
"go right and down"; of two sides, alternately).
Promises: deterministic given the seed and what they read.
Does not: win always. On slippery ice nobody can: the expert's rate of success is the most that any player can reach (``lake.chances`` has
it exactly, map by map; over maps of 6 by 6 and 30 turns the mean is 0.83).
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from typing import Any

from envs.api import EnvTask
from envs.frozen_lake.lake import ACTIONS, best, chances, make_lake
from envs.frozen_lake.tasks import Options
from envs.players import Player

KINDS = ("random", "expert", "follow")

_WHERE = re.compile(r"You are at \((\d+), (\d+)\)| you (\d+) (\d+)")


def make_player(kind: str, task: EnvTask, *, seed: int, options: Mapping[str, Any], lesson: str = "") -> Player:
    """A player for the lake of ``seed``. Raises ValueError for an unknown kind and a lesson that names no side."""
    write = "{}" if options.get("grammar", Options.grammar) == "bare" else "<action>{}</action>"
    if kind == "random":
        draw = random.Random(seed)
        return lambda text, actions: write.format(actions[int(draw.random() * len(actions))])
    if kind == "expert":
        return _Expert(seed, task.env.endswith("/slippery"), options, write)
    if kind == "follow":
        sides = _sides_in(lesson)
        turns = iter(range(2**31))
        return lambda text, actions: write.format(sides[next(turns) % len(sides)])
    raise ValueError(f"no player {kind!r}: use one of {', '.join(KINDS)}")


def lesson(task: EnvTask, seed: int, *, right: bool = True) -> str:
    """The sides on which the goal lies as seen from the start of this seed's lake; not ``right``: the opposite ones."""
    lake = make_lake(seed)
    dx, dy = lake.goal % lake.size - lake.start % lake.size, lake.goal // lake.size - lake.start // lake.size
    sign = 1 if right else -1
    sides = ["right" if dx * sign > 0 else "left"] * (dx != 0) + ["down" if dy * sign > 0 else "up"] * (dy != 0)
    return f"go {' and '.join(sides)} to the goal"


def expert_bound(task: EnvTask) -> float:
    """The least share of wins to expect of the expert in 200 episodes: on slippery ice three standard errors below the optimum."""
    return 0.75 if task.env.endswith("/slippery") else 0.95


class _Expert:
    """Knows the lake; reads where it stands."""

    def __init__(self, seed: int, slippery: bool, options: Mapping[str, Any], write: str) -> None:
        self._lake = make_lake(seed, int(options.get("size", Options.size)))
        self._slippery, self._write = slippery, write
        self._left = int(options.get("max_turns", Options.max_turns))
        self._table = chances(self._lake, self._left, slippery=slippery)

    def __call__(self, text: str, actions: tuple[str, ...]) -> str:
        found = _WHERE.search(text)
        if found is None:
            raise ValueError(f"no position in {text!r}")
        x, y = (int(number) for number in found.groups() if number is not None)
        action = best(self._lake, self._table, y * self._lake.size + x, self._left, slippery=self._slippery)
        self._left = max(1, self._left - 1)
        return self._write.format(ACTIONS[action])


def _sides_in(lesson: str) -> list[str]:
    sides = [word for word in re.findall(r"[a-z]+", lesson.lower()) if word in ACTIONS]
    if not sides:
        raise ValueError(f"lesson {lesson!r} names no side: use {', '.join(ACTIONS)}")
    return sides
