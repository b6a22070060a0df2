"""Scripted players of MiniHack's levels.

Owns:
    random   any action that may be taken
    explore  reads the text of the full style (``explorer``)
    expert   does what won in a copy of the game (``expert``); where no try won, it explores as ``explore`` does (compact style: at random)
    follow   explores as its lesson says
Promises: deterministic given the seed.
Does not: serve explore and follow in the compact style.

A lesson is one or more of
    "the stairs are south east" (seen from the start)             rooms, mazes
    "a blue jelly means north" (what is in the cell)               Memento with two arms
    "do: east 4, southeast, pickup, put on, f, r" (steps to take)  the others, from what the expert did
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping
from typing import Any

from envs.api import EnvTask
from envs.minihack import expert, oracle, tasks
from envs.minihack.commands import MOVES
from envs.minihack.compact import bearing
from envs.minihack.explorer import Advice, Explorer, advice
from envs.players import Player

KINDS = ("random", "explore", "expert", "follow")

_OPPOSITE = {"north": "south", "south": "north", "east": "west", "west": "east"}
_SIGNS = {True: "a blue jelly means north. a lichen means south", False: "a blue jelly means south. a lichen means north"}


def kinds(task: EnvTask) -> tuple[str, ...]:
    """The kinds worth listing for a task. Where monsters roam the river the expert plans for minutes: it is left out."""
    return KINDS if "river_monster" not in task.env else tuple(kind for kind in KINDS if kind != "expert")


def make_player(kind: str, task: EnvTask, *, seed: int, options: Mapping[str, Any], lesson: str = "") -> Player:
    """A player for the episode of ``seed``. Raises ValueError for an unknown kind, for a lesson that says nothing, and for a kind that
    cannot read the style."""
    if kind not in KINDS:
        raise ValueError(f"no player {kind!r}: use one of {', '.join(KINDS)}")
    name, compact = task.env.partition("/")[2], options.get("style", "full") == "compact"
    if compact and kind in ("explore", "follow"):
        raise ValueError(f"MiniHack's {kind} player reads the full style: use style=full, or the random or expert player")
    draw = random.Random(f"{kind} {task.env} {seed}")
    if kind == "random":
        act = _at_random(draw)
    elif kind == "expert":
        plan = expert.plan(name, seed, tasks.spec(name, **options).max_turns)
        otherwise = _at_random(draw) if compact else Explorer(draw).act
        act = _reciting(plan) if plan else otherwise
    else:
        act = Explorer(draw, advice(lesson) if kind == "follow" else Advice()).act
    if options.get("grammar", "tagged") == "bare":
        return act
    return lambda text, actions: f"<action>{act(text, actions)}</action>"


def lesson(task: EnvTask, seed: int, *, right: bool = True) -> str:
    """A lesson about the episode of ``seed``; not ``right``: its mirror image. Raises ``EnvUnavailable``."""
    name = task.env.partition("/")[2]
    if name in ("memento_short_f2", "memento_f2"):
        return f"{_SIGNS[right]}."
    plan = None if name.startswith(("room", "mazewalk", "river_monster")) else expert.plan(name, seed, tasks.spec(name).max_turns)
    if plan:
        steps = [(action if right else _mirrored(action), len(list(same))) for action, same in itertools.groupby(plan)]
        return "do: " + ", ".join(action if times == 1 else f"{action} {times}" for action, times in steps) + "."
    level = oracle.levels(name, seed)
    direction = bearing(level.stairs[0] - level.hero[0], level.stairs[1] - level.hero[1]) if level.stairs else "east"
    return f"the stairs are {direction if right else _mirrored(direction)}."


def _at_random(draw: random.Random) -> Callable[[str, tuple[str, ...]], str]:
    return lambda text, actions: actions[int(draw.random() * len(actions))]


def _reciting(plan: tuple[str, ...]) -> Callable[[str, tuple[str, ...]], str]:
    steps = iter(plan)
    return lambda text, actions: next(steps)


def _mirrored(action: str) -> str:
    if action not in MOVES:
        return action
    for word, other in _OPPOSITE.items():
        if action == word:
            return other
    first, second = action[:5], action[5:]
    return _OPPOSITE[first] + _OPPOSITE[second]
