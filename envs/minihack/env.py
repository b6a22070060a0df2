"""A NetHack level as a text environment.

Owns: the two text styles, and when an episode is over.
Promises: reward 1 when the game says that the level's task is done, else 0; death and a level's own failure are *terminated*; the last
observation shows where the hero really ended. A question of the game that none of the action words can answer ("Really attack?") is left
at once, so that no word is ever taken for an answer.
Does not: build levels.
"""

from __future__ import annotations

from typing import Literal

from envs import parse
from envs.api import Observation
from envs.minihack import compact, full
from envs.minihack.commands import CANCEL, MOVES, PICKUP_APPLY, allowed
from envs.minihack.game import Ending, Game, Screen
from envs.turns import Played, TurnBased

__all__ = ["MOVES", "PICKUP_APPLY", "MiniHackText", "Style"]

Style = Literal["full", "compact"]


class MiniHackText(TurnBased[str]):
    """``game`` told in words. ``actions[i]`` is the word for the game's command i; ``room`` places the compact coordinates (None: the level
    has no compact style); ``whole``: the full style shows the whole map that the hero remembers, not a crop."""

    family = "minihack"

    def __init__(
        self,
        game: Game,
        room: compact.Room | None,
        *,
        actions: tuple[str, ...],
        style: Style,
        grammar: parse.Grammar,
        max_turns: int,
        whole: bool = False,
    ) -> None:
        super().__init__(style=style, grammar=grammar, max_turns=max_turns)
        if len(actions) != len(game.commands):
            raise ValueError(f"{len(actions)} action words for {len(game.commands)} commands of the game")
        if style == "compact" and room is None:
            raise ValueError("this level has no compact style: use style=full")
        self._game, self._room, self._words, self._whole = game, room, actions, whole
        self._now = actions  # the words that may be said now
        self._screen: Screen | None = None

    def begin(self, seed: int, task: str) -> Observation:
        """Start the game that ``seed`` names."""
        if task:
            raise KeyError(f"a NetHack level has no task {task!r}: its only one is ''")
        self._screen = self._game.reset(seed)
        self._now = self._may_say(self._screen)
        return Observation(self._render(self._screen), self._now)

    def read(self, said: str) -> str | None:
        """The action word, or None for what is none or cannot be said now."""
        return parse.one_of(self._now, said)

    def play(self, action: str) -> Played:
        """Send the command of ``action``."""
        assert self._screen is not None
        asked, before = self._screen.asking, (self._screen.x, self._screen.y, self._screen.time)
        self._screen, ending = self._game.step(self._words.index(action))
        after = (self._screen.x, self._screen.y, self._screen.time)
        refused = before == after and ending == Ending.RUNNING and not asked and not self._screen.asking
        if self._screen.asking and CANCEL not in self._words:
            self._screen, refused = self._game.decline(), True
        self._now = self._may_say(self._screen)
        success = ending == Ending.SUCCESS
        text = self._render(self._screen, blocked=refused, on_stairs=success)
        return Played(text, float(success), ending != Ending.RUNNING, success, effective=not refused, actions=self._now)

    @property
    def screen(self) -> Screen:
        """What lies behind the text; for scripted players that may look there, and for tests. Only after ``reset``."""
        assert self._screen is not None, "call reset(seed) first"
        return self._screen

    def free(self) -> None:
        """End the game."""
        self._game.close()

    def _may_say(self, screen: Screen) -> tuple[str, ...]:
        return allowed(self._words, screen.message if screen.asking else "")

    def _render(self, screen: Screen, *, blocked: bool = False, on_stairs: bool = False) -> str:
        if self.style == "compact" and self._room is not None:
            return compact.render(screen, self._room, blocked=blocked, on_stairs=on_stairs)
        return full.render(screen, self._now, whole=self._whole)
