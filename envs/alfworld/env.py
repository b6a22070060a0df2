"""A household game as a text environment.

Owns: the text of an observation, and the rewards.
Promises: reward 1 when the goal is reached, -1 on the last turn of an episode that did not reach it, else 0; a command that the game does
not list now is valid and answered "Nothing happens."; what is no command at all is invalid.
Does not: play (see ``engine``) or choose games (see ``games``).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Literal

from envs import parse
from envs.alfworld import commands, games
from envs.alfworld.engine import NOTHING, Engine, View
from envs.api import Observation, Step
from envs.turns import Played, TurnBased

Style = Literal["full", "compact"]
Shown = Literal["none", "all"]

_BANNER = re.compile(r"\A\s*-= [^\n]* =-\s*")


class Household(TurnBased[str]):
    """The games of one task type, ``kind``. ``choices()`` are their ids, of which the seed picks one where ``reset`` names none."""

    family = "alfworld"
    timeout_reward = -1.0

    def __init__(
        self,
        engine: Engine,
        kind: str,
        choices: Callable[[], tuple[str, ...]],
        *,
        style: Style,
        grammar: parse.Grammar,
        max_turns: int,
        shown: Shown = "none",
    ) -> None:
        super().__init__(style=style, grammar=grammar, max_turns=max_turns)
        self._engine, self._kind, self._choices, self._shown = engine, kind, choices, shown

    def drawn(self, seed: int) -> str:
        """A training game."""
        choices = self._choices()
        return choices[seed % len(choices)]

    def begin(self, seed: int, task: str) -> Observation:
        """Start the game ``task``. Raises KeyError for an unknown game, or one of another type."""
        if task.split("-")[0] != self._kind:
            raise KeyError(f"{task!r} is no game of alfworld/{self._kind}: see envs.registry.tasks('alfworld/{self._kind}')")
        view = self._engine.start(str(games.path_of(task)))
        self.data_source = "generated" if games.is_generated(task) else "real"
        return Observation(self._render(view, _BANNER.sub("", view.said)), view.commands)

    def read(self, said: str) -> str | None:
        """The command, or None."""
        return commands.read(said)

    def play(self, action: str) -> Played:
        """Say the command as the game spells it."""
        view = self._engine.do(commands.listed(action, self._actions) or action)
        kind = (commands.meaning(action) or ("",))[0]
        effective = view.said != NOTHING and kind not in commands.ONLY_LOOKS
        return Played(self._render(view, view.said.strip()), float(view.won), view.won, view.won, effective, view.commands)

    def step(self, text: str) -> Step:
        """As ``TextEnv.step``; ``info`` also says which ``engine`` played."""
        step = super().step(text)
        return dataclasses.replace(step, info={**step.info, "engine": self._engine.name})

    def free(self) -> None:
        """Free the engine."""
        self._engine.close()

    def _render(self, view: View, said: str) -> str:
        return said if self._shown == "none" else f"{said}\n\nYou can: {', '.join(view.commands)}."
