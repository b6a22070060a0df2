"""What a text environment is.

Owns: the ``TextEnv`` protocol, its records and the two errors.
Promises: every environment speaks text in and text out, is reproducible from the seed and the task given to ``reset``, never raises for a
bad action (it repeats the observation with a notice and counts the turn), and keeps *terminated* (the world ended) apart from *truncated*
(the turns ran out), and success apart from reward.
Does not: know about models, tokens or processes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, Protocol, runtime_checkable

Split = Literal["train", "heldout"]


class EnvUnavailable(RuntimeError):
    """A package, data set or tool the environment needs is missing; the message holds the line that installs it."""


class EnvError(RuntimeError):
    """The environment failed (not the model): the episode has no reward and must not be trained on or credited."""


@dataclasses.dataclass(frozen=True, slots=True)
class Observation:
    """What the agent sees after ``reset``: the text, and the actions it may take (canonical names; empty where actions are free text)."""

    text: str
    actions: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """The outcome of one turn.

    ``observation`` is the text after the action; on the last turn it shows the true final state. ``valid`` is False when the reply was no
    action: nothing happened, reward 0, the turn was counted. ``info`` holds ``turn`` (turns used so far), ``invalid`` (of them invalid),
    ``effective`` (the action changed the state), ``data_source`` ("real" or "generated"), ``task`` (its id) and what the family adds.
    ``actions`` are those that may be taken next, as in ``Observation``.
    """

    observation: str
    reward: float
    terminated: bool
    truncated: bool
    success: bool
    valid: bool
    info: Mapping[str, Any]
    actions: tuple[str, ...] = ()

    @property
    def done(self) -> bool:
        """True when the episode is over, for either reason."""
        return self.terminated or self.truncated


@dataclasses.dataclass(frozen=True, slots=True)
class EnvSpec:
    """What is known about an environment without making it: enough to write a prompt, a retrieval query and an action constraint."""

    name: str  # registry name, e.g. "dungeon/amber_cellar"
    family: str
    goal: str  # the goal in words; also the retrieval query. Where tasks have goals of their own, a sentence about all of them
    namespace: str  # scope of the experience bank
    actions: tuple[str, ...]  # empty: actions are free text (a grammar with arguments), so none can be listed
    max_turns: int
    system_prompt: str
    call_timeout_s: float = 0.0  # how long one call may take, where that is long; 0: as the run says
    timeout_reward: float = 0.0  # of an episode that is cut off without success: by the turns, or by whoever plays it


@dataclasses.dataclass(frozen=True, slots=True)
class EnvTask:
    """One task of an environment. Families whose episodes follow from the seed alone have one task, with an empty id."""

    env: str  # registry name of the environment
    id: str  # what ``reset`` takes
    goal: str  # in words; also the retrieval query
    kind: str = ""  # type of task, for tables by type
    weight: float = 1.0  # how often it is trained on, relative to the others


@runtime_checkable
class TextEnv(Protocol):
    """One world, one episode at a time. ``step`` before ``reset`` or after the end raises RuntimeError."""

    def reset(self, seed: int, task: str = "") -> Observation:
        """Start the episode that ``seed`` and ``task`` (an ``EnvTask.id``) name: the same pair gives the same episode in any process, on
        any day. Raises ValueError for a seed outside [0, 2^63) and KeyError for an unknown task.
        """
        ...

    def step(self, text: str) -> Step:
        """Take the model's whole reply as one turn."""
        ...

    def close(self) -> None:
        """Free processes, files and memory. May be called twice."""
        ...
