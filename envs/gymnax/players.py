"""Scripted players of the gymnax games.

Owns: which kinds each game has, the lessons, and the players.
    random  any action
    expert  wins wherever winning is possible; of the maze's goal and the deep sea's valves, which no observation shows, it looks behind
            the game (that imports jax)
    follow  does what a lesson says
Promises: deterministic given the seed and what they read.
Does not: know the rules of moving (``policies``).

In the four rooms every third step goes astray, so the expert may run out of turns there; in all other games it always wins.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from typing import Any

from envs.api import EnvTask
from envs.gymnax import policies
from envs.gymnax.games import GAMES
from envs.gymnax.tasks import Options
from envs.players import Player

KINDS = ("random", "expert", "follow")

_OPPOSITE = {"up": "down", "down": "up", "left": "right", "right": "left", "red": "blue", "blue": "red"}
_LESSONS = {  # right, wrong
    "memory_chain": (
        "the first bits decide: say the bit that is asked for",
        "the first bits deceive: say the opposite of the bit",
    ),
    "catch": ("move toward the ball", "move away from the ball"),
    "umbrella_chain": ("take the umbrella only when the forecast is rain", "take the umbrella only when the forecast is sun"),
    "breakout": ("move toward the ball", "move away from the ball"),
    "four_rooms": (
        "doorways are at row 3 column 6, row 10 column 6, row 6 column 2 and row 7 column 9",
        "doorways are at row 1 column 6, row 8 column 6, row 6 column 5 and row 7 column 11",
    ),
}


def make_player(kind: str, task: EnvTask, *, seed: int, options: Mapping[str, Any], lesson: str = "") -> Player:
    """A player for one episode. Raises ValueError for an unknown kind and a lesson that says nothing about the game."""
    name = task.env.partition("/")[2]
    write = "{}" if options.get("grammar", Options.grammar) == "bare" else "<action>{}</action>"
    if kind == "random":
        draw = random.Random(seed)
        return lambda text, actions: write.format(actions[int(draw.random() * len(actions))])
    if kind not in KINDS:
        raise ValueError(f"no player {kind!r}: use one of {', '.join(KINDS)}")
    policy = _policy(name, _lesson_of(name, seed, right=True) if kind == "expert" else lesson)
    return lambda text, actions: write.format(policy(text))


def lesson(task: EnvTask, seed: int, *, right: bool = True) -> str:
    """A sentence that helps, or (not ``right``) misleads. In the maze it is about the game of this seed, else about all games."""
    return _lesson_of(task.env.partition("/")[2], seed, right=right)


def _lesson_of(name: str, seed: int, *, right: bool) -> str:
    if name in _LESSONS:
        return _LESSONS[name][0 if right else 1]
    from envs.gymnax.batch import hidden  # the secrets of these two games are in jax' hands

    state = hidden(name, seed)
    if name == "meta_maze":
        said, how = policies.maze_way(tuple(state["pos"].tolist()), tuple(state["goal"].tolist())), "go"
    else:
        said, how = [GAMES[name].actions[int(button)] for button in state["action_mapping"].diagonal()], "open"
    return f"{how} {' '.join(said if right else [_OPPOSITE[word] for word in said])}"


def _policy(name: str, lesson: str) -> policies.Policy:
    """The policy that a lesson describes. Raises ValueError when it describes none."""
    said = re.findall(r"[a-z]+|\d+", lesson.lower())
    if name in ("catch", "breakout") and ("toward" in said or "away" in said):
        return policies.chase(name, toward="toward" in said)
    if name == "memory_chain" and "bit" in said:
        return policies.remember(opposite="opposite" in said)
    if name == "umbrella_chain" and ("rain" in said or "sun" in said):
        return policies.prepare_for("rain" if "rain" in said else "sun")
    if name == "four_rooms" and (doors := re.findall(r"row (\d+) column (\d+)", lesson.lower())):
        return policies.through_doors([(int(row), int(column)) for row, column in doors])
    if name in ("meta_maze", "deep_sea") and (moves := [word for word in said if word in GAMES[name].actions]):
        return policies.recite(moves)
    raise ValueError(f"lesson {lesson!r} says nothing about gymnax/{name}: see envs.gymnax.players.lesson")
