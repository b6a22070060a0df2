"""The family ``frozen_lake``: gymnasium's FrozenLake on maps of its own, a new one for every seed.

Owns: the environments (``slippery``, as in the paper's configuration, and ``firm``, where a move goes where it was meant to), and the
options:
    style      "full" (a drawing and sentences) or "compact" (a few words)
    grammar    "tagged" or "bare"
    max_turns  turns before truncation
    size       side of the lake in squares
Does not: know the rules (gymnasium) or make maps (``lake``).
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from envs.api import EnvSpec
from envs.frozen_lake.env import FrozenLake, load_frozen_lake
from envs.frozen_lake.lake import ACTIONS
from envs.options import choose
from envs.parse import Grammar
from envs.prompts import system_prompt

_GOALS = {"slippery": "cross the slippery frozen lake to the goal", "firm": "cross the firm frozen lake to the goal"}


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of one environment; every field may be given to ``make`` and ``spec``."""

    style: Literal["full", "compact"] = "full"
    grammar: Grammar = "tagged"
    max_turns: int = 30
    size: int = 6


def names() -> tuple[str, ...]:
    """``slippery`` and ``firm``."""
    return tuple(_GOALS)


def spec(name: str, **options: Any) -> EnvSpec:
    """Describe an environment. Raises TypeError for an unknown option, ValueError for a value it cannot have."""
    chosen = _chosen(options)
    return EnvSpec(
        name=f"frozen_lake/{name}",
        family="frozen_lake",
        goal=_GOALS[name],
        namespace=f"frozen_lake/{name}",
        actions=ACTIONS,
        max_turns=chosen.max_turns,
        system_prompt=system_prompt("frozen_lake", chosen.style, chosen.grammar, ACTIONS, chosen.max_turns),
    )


def prepare() -> None:
    """Import the game. Raises ``EnvUnavailable`` when gymnasium is not installed."""
    load_frozen_lake()


def make(name: str, **options: Any) -> FrozenLake:
    """An environment. Raises ``EnvUnavailable`` when gymnasium is not installed, TypeError and ValueError as ``spec`` does."""
    chosen = _chosen(options)
    return FrozenLake(slippery=name == "slippery", size=chosen.size, style=chosen.style, grammar=chosen.grammar, max_turns=chosen.max_turns)


def _chosen(options: dict[str, Any]) -> Options:
    chosen = choose(Options, options)
    if not 2 <= chosen.size <= 20:
        raise ValueError(f"size={chosen.size}: use 2 to 20")
    return chosen
