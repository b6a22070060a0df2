"""The family ``alfworld``: household tasks in text, with the six task types of ALFWorld as environments.

Owns: the environments, their tasks (one per game), and the options:
    style          "full" (all commands explained) or "compact" (one line)
    grammar        "tagged" or "bare"
    max_turns      turns before truncation (30; the paper's run on this task alone uses 40)
    engine         "official" (textworld and Fast Downward), "native" (this package's own, same sentences), or "auto": official where it is
                   installed
    show_commands  "none" (as the paper) or "all": whether observations list the commands that may be given
Does not: hold games (see ``games``).

Without ``ALFWORLD_DATA`` the games are our own (200 training, 50 held out, other rooms). All types share the namespace "alfworld".
"""

from __future__ import annotations

import dataclasses
from typing import Any

from envs.alfworld import games, generate, wheel
from envs.alfworld.engine import Choice, make_engine
from envs.alfworld.env import Household, Shown, Style
from envs.api import EnvSpec, EnvTask, Split
from envs.options import choose
from envs.parse import Grammar
from envs.prompts import system_prompt

_GOALS = {
    "pick_and_place_simple": "put an object in or on a receptacle",
    "look_at_obj_in_light": "look at an object under a lamp",
    "pick_clean_then_place_in_recep": "clean an object and put it in or on a receptacle",
    "pick_heat_then_place_in_recep": "heat an object and put it in or on a receptacle",
    "pick_cool_then_place_in_recep": "cool an object and put it in or on a receptacle",
    "pick_two_obj_and_place": "put two objects of a kind in or on one receptacle",
}
_EXAMPLE = "go to cabinet 1"


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of one environment; every field may be given to ``make`` and ``spec``."""

    style: Style = "full"
    grammar: Grammar = "tagged"
    max_turns: int = 30
    engine: Choice = "auto"
    show_commands: Shown = "none"


def names() -> tuple[str, ...]:
    """Task types, without the family."""
    return generate.KINDS


def tasks(split: Split) -> tuple[EnvTask, ...]:
    """One task per game of the split. Raises ``EnvUnavailable`` when ``ALFWORLD_DATA`` names a folder without games."""
    return tuple(EnvTask(f"alfworld/{entry.kind}", entry.id, entry.goal, entry.kind) for entry in games.entries(split))


def spec(name: str, **options: Any) -> EnvSpec:
    """Describe a task type. Raises TypeError for an unknown option, ValueError for a value it cannot have."""
    chosen = choose(Options, options)
    return EnvSpec(
        name=f"alfworld/{name}",
        family="alfworld",
        goal=_GOALS[name],
        namespace="alfworld",
        actions=(),
        max_turns=chosen.max_turns,
        system_prompt=system_prompt("alfworld", chosen.style, chosen.grammar, (), chosen.max_turns, example=_EXAMPLE),
        timeout_reward=Household.timeout_reward,
    )


def prepare() -> None:
    """Load what playing needs. Raises ``EnvUnavailable``."""
    if games.data_folder() is None:
        wheel.household()
    make_engine("auto").close()


def build() -> str:
    """Generate all games, unless they are there; a line about them. Raises ``EnvUnavailable``."""
    if games.data_folder() is not None:
        return f"nothing to make: {games.DATA} is set"
    found = [games.path_of(entry.id) for split in ("train", "heldout") for entry in games.entries(split)]
    return f"{len(found)} games"


def make(name: str, **options: Any) -> Household:
    """An environment for the games of one type. Raises ``EnvUnavailable`` for a missing package or data."""
    chosen = choose(Options, options)
    if games.data_folder() is None:
        wheel.household()  # what is missing is told now, not in an episode
    return Household(
        make_engine(chosen.engine),
        name,
        lambda: tuple(entry.id for entry in games.entries("train") if entry.kind == name),
        style=chosen.style,
        grammar=chosen.grammar,
        max_turns=chosen.max_turns,
        shown=chosen.show_commands,
    )
