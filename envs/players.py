"""Scripted players: yardsticks for every family, warm-start data, and a way to test the loop without a model.

Owns: playing an episode with one, and finding those of a family. A family's players are in ``envs/<family>/players.py``:
``KINDS`` (names of the kinds it has), ``make_player(kind, task, *, seed, options, lesson)`` and ``lesson(task, seed, *, right)``.
The kinds all families share:
    random  any action that may be taken, without reading anything else
    expert  wins where winning is possible, by any means (it may look behind the game)
    follow  does what a lesson says, as far as the observation lets it
Promises: a player is deterministic given its seed and what it reads.
Does not: learn.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from envs.api import EnvTask, Step, TextEnv

Player = Callable[[str, tuple[str, ...]], str]  # (observation, actions that may be taken) -> reply; keeps its own memory for one episode


class Players(Protocol):
    """The module ``envs.<family>.players``."""

    KINDS: tuple[str, ...]

    def make_player(self, kind: str, task: EnvTask, *, seed: int, options: Mapping[str, Any], lesson: str = "") -> Player:
        """A player for the episode of ``seed``. Replies are in the grammar of ``options``. Raises ValueError for an unknown kind or a
        lesson that says nothing."""
        ...

    def lesson(self, task: EnvTask, seed: int, *, right: bool = True) -> str:
        """What an extractor could have written about this task: a sentence that helps ``follow``, or (not ``right``) misleads it."""
        ...


@dataclasses.dataclass(frozen=True)
class Played:
    """An episode from its end. ``transcript``: what was read and said in turn, beginning and ending with an observation."""

    success: bool
    reward: float
    transcript: tuple[str, ...]
    last: Step

    @property
    def turns(self) -> int:
        """Turns taken."""
        return len(self.transcript) // 2


def players_of(family: str) -> Players:
    """The players of a family. Raises KeyError when it has none."""
    try:
        module: Any = importlib.import_module(f"envs.{family}.players")
    except ModuleNotFoundError as missing:
        if missing.name != f"envs.{family}.players" and missing.name != f"envs.{family}":
            raise
        raise KeyError(f"no scripted players for {family!r}") from missing
    return module


def play(env: TextEnv, player: Player, seed: int, task: str = "") -> Played:
    """One whole episode."""
    seen = env.reset(seed, task)
    transcript, text, actions, reward = [seen.text], seen.text, seen.actions, 0.0
    while True:
        reply = player(text, actions)
        step = env.step(reply)
        text, actions, reward = step.observation, step.actions, reward + step.reward
        transcript += [reply, text]
        if step.done:
            return Played(step.success, reward, tuple(transcript), step)
