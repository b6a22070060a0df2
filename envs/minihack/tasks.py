"""The family ``minihack``: levels that ship with MiniHack, as in the paper's Room, Maze, KeyRoom and River tasks.

Owns: the table of tasks (``tasks.yaml``) and their options:
    style      "full" (sentences) or "compact" (a few words)
    grammar    "tagged" or "bare"
    max_turns  turns before truncation (30 in the paper)
Does not: change the levels.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import yaml

from envs.api import EnvSpec
from envs.minihack.compact import Room
from envs.minihack.env import MOVES, PICKUP_APPLY, MiniHackText, Style
from envs.minihack.game import Game, load_minihack
from envs.options import choose
from envs.parse import Grammar
from envs.prompts import system_prompt


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of one environment; every field may be given to ``make`` and ``spec``."""

    style: Style = "full"
    grammar: Grammar = "tagged"
    max_turns: int = 30


@functools.cache
def _tasks() -> dict[str, dict[str, Any]]:
    return yaml.safe_load(Path(__file__).with_name("tasks.yaml").read_text(encoding="utf-8"))


def names() -> tuple[str, ...]:
    """Task names, without the family."""
    return tuple(_tasks())


def spec(name: str, **options: Any) -> EnvSpec:
    """Describe a task. Raises TypeError for an unknown option, ValueError for a value it cannot have."""
    chosen, actions = choose(Options, options), _actions(name)
    return EnvSpec(
        name=f"minihack/{name}",
        family="minihack",
        goal=_tasks()[name]["goal"],
        namespace=f"minihack/{name}",
        actions=actions,
        max_turns=chosen.max_turns,
        system_prompt=system_prompt("minihack", chosen.style, chosen.grammar, actions, chosen.max_turns),
    )


def prepare() -> None:
    """Import the game. Raises ``EnvUnavailable`` when it is not installed."""
    load_minihack()


def make(name: str, **options: Any) -> MiniHackText:
    """Build the task's level. Raises ``EnvUnavailable`` when MiniHack is not installed."""
    chosen, task = choose(Options, options), _tasks()[name]
    load_minihack()
    from gymnasium.envs.registration import load_env_creator, registry  # comes with MiniHack

    entry = registry[task["id"]]
    if not isinstance(entry.entry_point, str):
        raise TypeError(f"{task['id']}: expected an entry point in words, got {entry.entry_point!r}")
    environment = load_env_creator(entry.entry_point)  # without gymnasium's wrappers, which hide seed() and add a time limit
    if not isinstance(environment, type):
        raise TypeError(f"{task['id']}: {entry.entry_point} is no class")
    return MiniHackText(
        Game(environment, **entry.kwargs),
        Room(*task["room"]),
        actions=_actions(name),
        style=chosen.style,
        grammar=chosen.grammar,
        max_turns=chosen.max_turns,
    )


def _actions(name: str) -> tuple[str, ...]:
    return MOVES + PICKUP_APPLY if _tasks()[name].get("pickup_apply") else MOVES
