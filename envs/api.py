"""What a text environment is.

Owns: the ``TextEnv`` protocol, its two records and the two errors.
Promises: every environment speaks text in and text out, is reproducible from the seed given to ``reset``, never raises for a bad action (it
repeats the observation with a notice and counts the turn), and keeps *terminated* (the world ended) apart from *truncated* (the turns ran
out).
Does not: know about models, tokens or processes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable


class EnvUnavailable(RuntimeError):
    """A package, data set or tool the environment needs is missing; the message holds the line that installs it."""


class EnvError(RuntimeError):
    """The environment failed (not the model): the episode has no reward and must not be trained on or credited."""


@dataclasses.dataclass(frozen=True, slots=True)
class Observation:
    """What the agent sees after ``reset``: the text, and the actions it may take (canonical names)."""

    text: str
    actions: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """The outcome of one turn.

    ``observation`` is the text after the action; on the last turn it shows the true final state. ``valid`` is False when the reply was no
    action: nothing happened, reward 0, the turn was counted. ``info`` holds ``turn`` (turns used so far), ``effective`` (the action changed
    the state) and ``data_source`` ("real" or "generated").
    """

    observation: str
    reward: float
    terminated: bool
    truncated: bool
    success: bool
    valid: bool
    info: Mapping[str, Any]

    @property
    def done(self) -> bool:
        """True when the episode is over, for either reason."""
        return self.terminated or self.truncated


@dataclasses.dataclass(frozen=True, slots=True)
class EnvSpec:
    """What is known about an environment without making it: enough to write a prompt, a retrieval query and an action constraint."""

    name: str  # registry name, e.g. "dungeon/amber_cellar"
    family: str
    goal: str  # the goal in words; also the retrieval query
    namespace: str  # scope of the experience bank
    actions: tuple[str, ...]
    max_turns: int
    system_prompt: str


@runtime_checkable
class TextEnv(Protocol):
    """One world, one episode at a time. ``step`` before ``reset`` or after the end raises RuntimeError."""

    def reset(self, seed: int) -> Observation:
        """Start the episode that ``seed`` names. The same seed gives the same episode in any process, on any day."""
        ...

    def step(self, text: str) -> Step:
        """Take the model's whole reply as one turn."""
        ...

    def close(self) -> None:
        """Free processes, files and memory. May be called twice."""
        ...
