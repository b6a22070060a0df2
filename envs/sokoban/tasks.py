"""The family ``sokoban``: rooms of boxes to push onto goals, a new one for every seed.

Owns: the environments (by number of boxes), their tasks, and the options:
    style      "full" (a drawing and sentences) or "compact" (a few words)
    grammar    "tagged" or "bare"
    max_turns  turns before truncation (30 in the paper)
    size       side of the room in squares, outer walls included (6 in the paper)
    longest    rooms are solved by at most this many moves
Promises: the task "" plays training rooms, the task "heldout" rooms whose walls and targets no training room has.
Does not: know the rules (``room``) or make rooms (``generate``).
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from envs.api import EnvSpec, EnvTask, Split
from envs.options import choose
from envs.parse import Grammar
from envs.prompts import system_prompt
from envs.sokoban.env import Sokoban
from envs.sokoban.generate import check
from envs.sokoban.room import ACTIONS

_GOALS = {
    "boxes_1": "push the box onto its goal",
    "boxes_2": "push both boxes onto the goals",
    "boxes_3": "push all three boxes onto the goals",
}
_TASK = {"train": "", "heldout": "heldout"}  # what ``reset`` takes, by split


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of one environment; every field may be given to ``make`` and ``spec``."""

    style: Literal["full", "compact"] = "full"
    grammar: Grammar = "tagged"
    max_turns: int = 30
    size: int = 6
    longest: int = 30


def names() -> tuple[str, ...]:
    """``boxes_1``, ``boxes_2`` (the paper's) and ``boxes_3``."""
    return tuple(_GOALS)


def tasks(split: Split) -> tuple[EnvTask, ...]:
    """One task per environment; its rooms follow from the seed."""
    return tuple(EnvTask(f"sokoban/{name}", _TASK[split], goal, name) for name, goal in _GOALS.items())


def spec(name: str, **options: Any) -> EnvSpec:
    """Describe an environment. Raises TypeError for an unknown option, ValueError for a value it cannot have."""
    chosen = _chosen(name, options)
    return EnvSpec(
        name=f"sokoban/{name}",
        family="sokoban",
        goal=_GOALS[name],
        namespace="sokoban",
        actions=ACTIONS,
        max_turns=chosen.max_turns,
        system_prompt=system_prompt("sokoban", chosen.style, chosen.grammar, ACTIONS, chosen.max_turns),
    )


def prepare() -> None:
    """Nothing to load: the rules are here."""


def make(name: str, **options: Any) -> Sokoban:
    """An environment. Raises TypeError and ValueError as ``spec`` does."""
    chosen = _chosen(name, options)
    return Sokoban(
        boxes=boxes_of(name),
        size=chosen.size,
        longest=chosen.longest,
        style=chosen.style,
        grammar=chosen.grammar,
        max_turns=chosen.max_turns,
    )


def boxes_of(name: str) -> int:
    """How many boxes the rooms of an environment have."""
    return int(name.removeprefix("boxes_"))


def _chosen(name: str, options: dict[str, Any]) -> Options:
    chosen = choose(Options, options)
    check(chosen.size, boxes_of(name), chosen.longest)
    return chosen
