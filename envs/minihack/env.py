"""A NetHack level as a text environment.

Owns: the two text styles, and when an episode is over.
Promises: reward 1 on reaching the stairs, else 0; death is *terminated*; the last observation shows where the hero really ended.
Does not: build levels.
"""

from __future__ import annotations

from typing import Literal

from envs import parse
from envs.api import Observation
from envs.minihack import compact, full
from envs.minihack.game import Ending, Game, Screen
from envs.turns import Played, TurnBased

Style = Literal["full", "compact"]

MOVES = ("north", "east", "south", "west", "northeast", "southeast", "southwest", "northwest")  # in the order of NLE's compass commands
PICKUP_APPLY = ("pickup", "apply")


class MiniHackText(TurnBased[str]):
    """``game`` told in words. ``actions[i]`` is the word for the game's command i; ``room`` places the compact coordinates."""

    family = "minihack"

    def __init__(
        self, game: Game, room: compact.Room, *, actions: tuple[str, ...], style: Style, grammar: parse.Grammar, max_turns: int
    ) -> None:
        super().__init__(style=style, grammar=grammar, max_turns=max_turns)
        if len(actions) != len(game.commands):
            raise ValueError(f"{len(actions)} action words for {len(game.commands)} commands of the game")
        self._game, self._room, self._words = game, room, actions
        self._screen: Screen | None = None

    def begin(self, seed: int, task: str) -> Observation:
        """Start the game that ``seed`` names."""
        if task:
            raise KeyError(f"a NetHack level has no task {task!r}: its only one is ''")
        self._screen = self._game.reset(seed)
        return Observation(self._render(self._screen), self._words)

    def read(self, said: str) -> str | None:
        """The action word, or None."""
        return parse.one_of(self._words, said)

    def play(self, action: str) -> Played:
        """Send the command of ``action``."""
        assert self._screen is not None
        before = (self._screen.x, self._screen.y, self._screen.time)
        self._screen, ending = self._game.step(self._words.index(action))
        after = (self._screen.x, self._screen.y, self._screen.time)
        refused = before == after and ending == Ending.RUNNING
        success = ending == Ending.SUCCESS
        text = self._render(self._screen, blocked=refused, on_stairs=success)
        return Played(text, float(success), ending != Ending.RUNNING, success, effective=not refused, actions=self._words)

    def free(self) -> None:
        """End the game."""
        self._game.close()

    def _render(self, screen: Screen, *, blocked: bool = False, on_stairs: bool = False) -> str:
        if self.style == "compact":
            return compact.render(screen, self._room, blocked=blocked, on_stairs=on_stairs)
        return full.render(screen, self._words)
