"""The family ``minihack``: levels that ship with MiniHack, as in the paper's Room, Maze, KeyRoom and River tasks.

Owns: the table of tasks (``tasks.yaml``) and their options:
    style      "full" (sentences) or "compact" (a few words)
    grammar    "tagged" or "bare"
    max_turns  turns before truncation (30 as in the paper, unless the table says more)
    map        of the full style: "crop" (9 x 9 squares around the hero, as in the paper) or "whole" (all that the hero remembers)
Does not: change the levels.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import yaml

from envs.api import EnvSpec
from envs.minihack import commands
from envs.minihack.compact import Room
from envs.minihack.env import MiniHackText, Style
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
    map: Literal["crop", "whole"] = "crop"


@functools.cache
def _tasks() -> dict[str, dict[str, Any]]:
    return yaml.safe_load(Path(__file__).with_name("tasks.yaml").read_text(encoding="utf-8"))


def names() -> tuple[str, ...]:
    """Task names, without the family."""
    return tuple(_tasks())


def spec(name: str, **options: Any) -> EnvSpec:
    """Describe a task. Raises TypeError for an unknown option, ValueError for a value it cannot have, or a style the level cannot have."""
    chosen, actions, task = _choose(name, options), _actions(name), _tasks()[name]
    rules = "compact" if chosen.style == "compact" else task.get("rules", "full")
    prompt = system_prompt("minihack", rules, chosen.grammar, actions, chosen.max_turns)
    if chosen.map == "whole":
        prompt = prompt.replace("the part of the map around you", "the map as far as you remember it")
    return EnvSpec(
        name=f"minihack/{name}",
        family="minihack",
        goal=task["goal"],
        namespace=f"minihack/{name}",
        actions=actions,
        max_turns=chosen.max_turns,
        system_prompt=prompt,
    )


def prepare() -> None:
    """Import the game. Raises ``EnvUnavailable`` when it is not installed."""
    load_minihack()


def make(name: str, **options: Any) -> MiniHackText:
    """Build the task's level. Raises ``EnvUnavailable`` when MiniHack is not installed, else as ``spec``."""
    chosen, task = _choose(name, options), _tasks()[name]
    return MiniHackText(
        make_game(name),
        Room(*task["room"]) if "room" in task else None,
        actions=_actions(name),
        style=chosen.style,
        grammar=chosen.grammar,
        max_turns=chosen.max_turns,
        whole=chosen.map == "whole",
    )


def make_game(name: str, change: Callable[[type[Any]], type[Any]] = lambda environment: environment) -> Game:
    """The game behind a task; ``change`` may derive another class from MiniHack's. Raises ``EnvUnavailable``."""
    task = _tasks()[name]
    load_minihack()
    from gymnasium.envs.registration import load_env_creator, registry  # comes with MiniHack

    entry = registry[task["id"]]
    if not isinstance(entry.entry_point, str):
        raise TypeError(f"{task['id']}: expected an entry point in words, got {entry.entry_point!r}")
    environment = load_env_creator(entry.entry_point)  # without gymnasium's wrappers, which hide seed() and add a time limit
    if not isinstance(environment, type):
        raise TypeError(f"{task['id']}: {entry.entry_point} is no class")
    keys = commands.keys(task.get("commands", "moves"))
    return Game(change(environment), **entry.kwargs, **({"actions": keys} if keys else {}))


def styles(name: str) -> tuple[Style, ...]:
    """The text styles a task has."""
    return ("full", "compact") if "room" in _tasks()[name] else ("full",)


def _choose(name: str, options: Mapping[str, Any]) -> Options:
    task = _tasks()[name]
    chosen = choose(Options, {"max_turns": task.get("max_turns", 30), **options})
    if chosen.style not in styles(name):
        raise ValueError(f"minihack/{name} has no compact style ({task['no_compact']}): use style=full")
    return chosen


def _actions(name: str) -> tuple[str, ...]:
    return commands.words(_tasks()[name].get("commands", "moves"))
