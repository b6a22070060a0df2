"""The family ``dungeon``: dark NetHack rooms, each with a name and a secret that never changes.

What can be learnt about one dungeon (its stairs are always in the same third) is useless in another, and cannot be seen from the start:
exactly what an experience bank is for. Names that share no adjective let a retriever tell dungeons apart; all share one namespace, so it
has to.

Owns: the names and their split, and the options:
    style      "compact" (a few words) or "full" (sentences)
    grammar    "bare" or "tagged"
    max_turns  turns before truncation
    size       side of the level in squares
    kind       "room" or "maze"
    hazards    "none", "trap" (a dart trap), "monster" (a sewer rat) or "both"
Does not: give hints; the goal names the dungeon and nothing else.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import yaml

from envs.api import EnvSpec, EnvTask, Split
from envs.dungeon import level
from envs.minihack.env import MOVES, MiniHackText, Style
from envs.minihack.game import load_minihack
from envs.options import choose
from envs.parse import Grammar
from envs.prompts import system_prompt


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of one environment; every field may be given to ``make`` and ``spec``."""

    style: Style = "compact"
    grammar: Grammar = "bare"
    max_turns: int = 8
    size: int = 9
    kind: level.Kind = "room"
    hazards: level.Hazards = "none"


@functools.cache
def splits() -> dict[str, tuple[str, ...]]:
    """Environment names (without the family) by split: ``train`` and ``heldout``."""
    table = yaml.safe_load(Path(__file__).with_name("names.yaml").read_text(encoding="utf-8"))
    return {split: tuple(name.replace(" ", "_") for name in named) for split, named in table.items()}


def names() -> tuple[str, ...]:
    """All dungeons of all splits, without the family."""
    return tuple(name for named in splits().values() for name in named)


def tasks(split: Split) -> tuple[EnvTask, ...]:
    """One task per dungeon of the split."""
    return tuple(EnvTask(f"dungeon/{name}", "", _goal(name)) for name in splits()[split])


def words() -> tuple[str, ...]:
    """Every word in a goal text, each once: for building a small vocabulary."""
    return tuple(dict.fromkeys(word for name in names() for word in _goal(name).split()))


def spec(name: str, **options: Any) -> EnvSpec:
    """Describe a dungeon. Raises TypeError for an unknown option, ValueError for a value it cannot have."""
    chosen = choose(Options, options)
    level.check_size(chosen.kind, chosen.size)
    return EnvSpec(
        name=f"dungeon/{name}",
        family="dungeon",
        goal=_goal(name),
        namespace="dungeon",
        actions=MOVES,
        max_turns=chosen.max_turns,
        system_prompt=system_prompt("dungeon", chosen.style, chosen.grammar, MOVES, chosen.max_turns),
    )


def prepare() -> None:
    """Import the game. Raises ``EnvUnavailable`` when it is not installed."""
    load_minihack()


def make(name: str, **options: Any) -> MiniHackText:
    """Build and verify the dungeon. Raises ``EnvUnavailable`` (MiniHack missing) or ``level.LevelError``."""
    chosen = choose(Options, options)
    plan = level.design(name.replace("_", " "), kind=chosen.kind, size=chosen.size, hazards=chosen.hazards)
    game = level.build(plan, load_minihack())
    return MiniHackText(game, plan.room, actions=MOVES, style=chosen.style, grammar=chosen.grammar, max_turns=chosen.max_turns)


def _goal(name: str) -> str:
    return f"find the stairs of the {name.replace('_', ' ')}"
