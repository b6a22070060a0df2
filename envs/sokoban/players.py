"""Scripted players of Sokoban.

Owns: random, expert (a shortest solution, searched forward from the room the seed names) and follow (the moves that a lesson says, one a
turn: "push right right up").
Promises: deterministic given the seed and the lesson.
Does not: read the room's text; what a lesson of moves says is all that ``follow`` knows.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping
from typing import Any

from envs.api import EnvTask
from envs.players import Player
from envs.sokoban.env import split_of_task
from envs.sokoban.generate import make_room
from envs.sokoban.room import ACTIONS, Room, State
from envs.sokoban.tasks import Options, boxes_of

KINDS = ("random", "expert", "follow")

_OPPOSITE = {"up": "down", "down": "up", "left": "right", "right": "left"}


def make_player(kind: str, task: EnvTask, *, seed: int, options: Mapping[str, Any], lesson: str = "") -> Player:
    """A player for the room of ``seed``. Raises ValueError for an unknown kind and a lesson without a move."""
    write = "{}" if options.get("grammar", Options.grammar) == "bare" else "<action>{}</action>"
    if kind == "random":
        draw = random.Random(seed)
        return lambda text, actions: write.format(actions[int(draw.random() * len(actions))])
    if kind == "expert":
        moves = iter(shortest(_room(task, seed, options)))
    elif kind == "follow":
        moves = iter(_moves_in(lesson))
    else:
        raise ValueError(f"no player {kind!r}: use one of {', '.join(KINDS)}")
    return lambda text, actions: write.format(next(moves, ACTIONS[0]))


def lesson(task: EnvTask, seed: int, *, right: bool = True) -> str:
    """The moves that solve the room with the default options; not ``right``: every one turned round."""
    moves = shortest(_room(task, seed, {}))
    return "push " + " ".join(moves if right else (_OPPOSITE[move] for move in moves))


def shortest(room: Room) -> list[str]:
    """A shortest solution, searched breadth first from the start. Raises ValueError when there is none."""
    came: dict[State, tuple[State, str] | None] = {room.start: None}
    ahead = deque([room.start])
    while ahead:
        state = ahead.popleft()
        if room.solved(state):
            moves: list[str] = []
            while (step := came[state]) is not None:
                state, move = step
                moves.append(move)
            return moves[::-1]
        for action in ACTIONS:
            after = room.step(state, action)
            if after not in came:
                came[after] = (state, action)
                ahead.append(after)
    raise ValueError("this room cannot be solved")


def _room(task: EnvTask, seed: int, options: Mapping[str, Any]) -> Room:
    size, longest = int(options.get("size", Options.size)), int(options.get("longest", Options.longest))
    return make_room(seed, split_of_task(task.id), size=size, boxes=boxes_of(task.env.partition("/")[2]), longest=longest).room


def _moves_in(lesson: str) -> list[str]:
    moves = [word for word in lesson.lower().replace(",", " ").replace(".", " ").split() if word in ACTIONS]
    if not moves:
        raise ValueError(f"lesson {lesson!r} names no move: use {', '.join(ACTIONS)}")
    return moves
