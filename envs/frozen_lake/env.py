"""Gymnasium's FrozenLake as a text environment.

Owns: the two text styles and the episode.
Promises: reward 1 on the goal, else 0; a hole ends the episode; gymnasium moves the player, by its own rules and a generator seeded with
the episode's seed.
Does not: make maps (``lake``).

    full     the lake as a drawing, a legend, and where you and the goal are
    compact  " you {x} {y} goal {x} {y}", then " hole {x} {y}" for every hole; " here" on the goal, " fell" in a hole, " still" when a move
             led nowhere. One space before every word. x and y count from 0 at the top left.
"""

from __future__ import annotations

import importlib
from typing import Any, Literal

from envs import parse
from envs.api import EnvUnavailable, Observation
from envs.frozen_lake.lake import ACTIONS, Lake, make_lake
from envs.turns import Played, TurnBased

MARKS = ("you", "goal", "hole", "here", "fell", "still", "unknown")
LEGEND = "P you, _ frozen, O hole, G goal, X you in a hole, √ you on the goal"


def load_frozen_lake() -> Any:
    """Gymnasium's module of the game. Raises ``EnvUnavailable`` with the install line when gymnasium is missing."""
    try:
        return importlib.import_module("gymnasium.envs.toy_text.frozen_lake")
    except ModuleNotFoundError as missing:
        raise EnvUnavailable(f"{missing.name} is not installed: pip install 'crl-jax[minihack]'") from missing


class FrozenLake(TurnBased[int]):
    """Lakes of ``size`` by ``size`` squares, one per seed."""

    family = "frozen_lake"

    def __init__(self, *, slippery: bool, size: int, style: Literal["full", "compact"], grammar: parse.Grammar, max_turns: int) -> None:
        super().__init__(style=style, grammar=grammar, max_turns=max_turns)
        self._game = load_frozen_lake().FrozenLakeEnv
        self._slippery, self._size = slippery, size
        self._world: Any = None
        self._lake = make_lake(0, size)
        self._square = 0

    def begin(self, seed: int, task: str) -> Observation:
        """Make the lake that ``seed`` names."""
        if task:
            raise KeyError(f"a frozen lake has no task {task!r}: its only one is ''")
        self._lake = make_lake(seed, self._size)
        self._world = self._game(desc=self._lake.rows(), is_slippery=self._slippery)
        self._square = int(self._world.reset(seed=seed)[0])
        return Observation(self._render(), ACTIONS)

    def read(self, said: str) -> int | None:
        """The number of the action, or None."""
        action = parse.one_of(ACTIONS, said)
        return None if action is None else ACTIONS.index(action)

    def play(self, action: int) -> Played:
        """Slide."""
        before = self._square
        square, reward, ended, _, _ = self._world.step(action)
        self._square = int(square)
        moved = self._square != before
        won = self._square == self._lake.goal
        text = self._render(still=not moved)
        return Played(text, float(reward), bool(ended), won, moved, ACTIONS)

    def free(self) -> None:
        """Forget the lake."""
        self._world = None

    def _render(self, *, still: bool = False) -> str:
        tell = compact if self.style == "compact" else full
        return tell(self._lake, self._square, still=still)


def compact(lake: Lake, square: int, *, still: bool) -> str:
    """The lake in a few words."""
    said = [f" {word} {at % lake.size} {at // lake.size}" for word, at in (("you", square), ("goal", lake.goal))]
    said += [f" hole {at % lake.size} {at // lake.size}" for at in sorted(lake.holes)]
    end = " here" if square == lake.goal else " fell" if square in lake.holes else " still" if still else ""
    return "".join(said) + end


def full(lake: Lake, square: int, *, still: bool) -> str:
    """The lake as a drawing with its legend, and where you and the goal are."""
    size = lake.size
    lines = ["".join(_symbol(lake, square, y * size + x) for x in range(size)) for y in range(size)]
    where = f"You are at ({square % size}, {square // size}), the goal is at ({lake.goal % size}, {lake.goal // size})."
    said = "You fell into a hole. " if square in lake.holes else "You reached the goal. " if square == lake.goal else ""
    parts = [
        "Lake:\n" + "\n".join(lines),
        f"Legend: {LEGEND}.",
        f"{said}{'The last move led nowhere. ' * still}{where} (x, y) count from 0 at the top left.",
        "Actions: " + ", ".join(ACTIONS),
    ]
    return "\n\n".join(parts)


def _symbol(lake: Lake, you: int, square: int) -> str:
    if square == you:
        return "X" if square in lake.holes else "√" if square == lake.goal else "P"
    return "O" if square in lake.holes else "G" if square == lake.goal else "_"
