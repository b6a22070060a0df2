"""A NetHack level as a text environment.

Owns: turns, the reading of replies, the two text styles, and when an episode is over.
Promises: reward 1 on reaching the stairs, else 0; an invalid reply repeats the observation with a notice, costs a turn and does not touch
the game; death is *terminated*, running out of turns is *truncated*; the last observation shows where the hero really ended.
Does not: build levels.
"""

from __future__ import annotations

from typing import Literal

from envs import parse, prompts
from envs.api import Observation, Step
from envs.minihack import compact, full
from envs.minihack.game import Ending, Game, Screen

Style = Literal["full", "compact"]

MOVES = ("north", "east", "south", "west", "northeast", "southeast", "southwest", "northwest")  # in the order of NLE's compass commands
PICKUP_APPLY = ("pickup", "apply")


class MiniHackText:
    """``game`` told in words. ``actions[i]`` is the word for the game's command i; ``room`` places the compact coordinates."""

    def __init__(
        self, game: Game, room: compact.Room, *, actions: tuple[str, ...], style: Style, grammar: parse.Grammar, max_turns: int
    ) -> None:
        if len(actions) != len(game.commands):
            raise ValueError(f"{len(actions)} action words for {len(game.commands)} commands of the game")
        self._game, self._room = game, room
        self._actions, self._max_turns = actions, max_turns
        self._style: Style = style
        self._grammar: parse.Grammar = grammar
        self._turn = -1  # -1: no episode is running
        self._screen: Screen | None = None
        self._text = ""
        self._closed = False

    def reset(self, seed: int) -> Observation:
        """Start the episode that ``seed`` names. Raises ValueError for a seed the game cannot take."""
        if not 0 <= seed < 2**63:
            raise ValueError(f"seed {seed}: use a whole number from 0 to 2^63 - 1")
        self._screen = self._game.reset(seed)
        self._turn, self._text = 0, self._render(self._screen)
        return Observation(self._text, self._actions)

    def step(self, text: str) -> Step:
        """Play one turn. Raises RuntimeError when no episode is running."""
        if self._turn < 0 or self._screen is None:
            raise RuntimeError("no episode is running: call reset(seed) first")
        self._turn += 1
        action = parse.parse_action(text, self._actions, self._grammar)
        if action is None:
            return self._outcome(self._with_notice(), Ending.RUNNING, valid=False, effective=False)
        before = (self._screen.x, self._screen.y, self._screen.time)
        self._screen, ending = self._game.step(self._actions.index(action))
        after = (self._screen.x, self._screen.y, self._screen.time)
        refused = before == after and ending == Ending.RUNNING
        self._text = self._render(self._screen, blocked=refused, on_stairs=ending == Ending.SUCCESS)
        return self._outcome(self._text, ending, valid=True, effective=not refused)

    def close(self) -> None:
        """Free the game. May be called twice."""
        if not self._closed:
            self._closed, self._turn = True, -1
            self._game.close()

    def _outcome(self, text: str, ending: Ending, *, valid: bool, effective: bool) -> Step:
        success = ending == Ending.SUCCESS
        terminated = ending != Ending.RUNNING
        truncated = not terminated and self._turn >= self._max_turns
        info = {"turn": self._turn, "effective": effective, "data_source": "real"}
        if terminated or truncated:
            self._turn = -1
        return Step(text, float(success), terminated, truncated, success, valid, info)

    def _with_notice(self) -> str:
        notice = prompts.invalid_notice(self._style)
        return f"{self._text} {notice}" if self._style == "compact" else f"{notice}\n\n{self._text}"

    def _render(self, screen: Screen, *, blocked: bool = False, on_stairs: bool = False) -> str:
        if self._style == "compact":
            return compact.render(screen, self._room, blocked=blocked, on_stairs=on_stairs)
        return full.render(screen, self._actions)
