"""The rules that all families share: seeds, turns, invalid replies, the end.

Owns: ``TurnBased``, the base of the families' environments.
Promises: a turn is counted for every reply; a reply that is no action changes nothing, is told so, has reward 0 and is counted as invalid;
after the last turn an episode is *truncated*, unless the world ended by itself; an environment whose world raised needs a ``reset``.
Does not: know any game.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Generic, TypeVar

from envs import parse, prompts
from envs.api import Observation, Step

Action = TypeVar("Action")


@dataclasses.dataclass(frozen=True, slots=True)
class Played:
    """What an action did to the world.

    ``terminated``: the world ended. ``effective``: the action changed something. ``actions``: what may be done next (see ``Step``).
    """

    text: str
    reward: float = 0.0
    terminated: bool = False
    success: bool = False
    effective: bool = True
    actions: tuple[str, ...] = ()
    info: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class TurnBased(abc.ABC, Generic[Action]):
    """A ``TextEnv`` whose family fills in ``begin``, ``read``, ``play`` and ``free``."""

    family: ClassVar[str]  # its prompts are in envs/<family>/prompts.yaml
    timeout_reward: ClassVar[float] = 0.0  # of the turn that was the last one without success

    def __init__(self, *, style: str, grammar: parse.Grammar, max_turns: int, data_source: str = "real") -> None:
        self.style, self.max_turns, self.data_source = style, max_turns, data_source
        self.grammar: parse.Grammar = grammar
        self.task = ""
        self._turn, self._invalid = -1, 0  # -1: no episode is running
        self._text, self._actions = "", ()
        self._closed = False

    @abc.abstractmethod
    def begin(self, seed: int, task: str) -> Observation:
        """Start an episode. Raises KeyError for an unknown task."""

    @abc.abstractmethod
    def read(self, said: str) -> Action | None:
        """The action named by ``said`` (what stands inside the tags, or the whole reply), or None. Never a guess."""

    @abc.abstractmethod
    def play(self, action: Action) -> Played:
        """Do ``action``."""

    @abc.abstractmethod
    def free(self) -> None:
        """Free what the world holds; called once."""

    def drawn(self, seed: int) -> str:
        """The id of the task that ``seed`` draws where ``reset`` names none; "" where the seed alone makes the episode."""
        return ""

    def said(self, reply: str) -> str | None:
        """The part of a reply that is the action, or None. Families with a syntax of their own (tool calls) override it."""
        return parse.said(reply, self.grammar)

    def reset(self, seed: int, task: str = "") -> Observation:
        """As ``TextEnv.reset``. Raises RuntimeError after ``close``."""
        if self._closed:
            raise RuntimeError("this environment was closed: make another")
        if not hasattr(seed, "__index__") or not 0 <= seed < 2**63:
            raise ValueError(f"seed {seed!r}: use a whole number from 0 to 2^63 - 1")
        seed = int(seed)  # NumPy's integers and True are spelled otherwise where a generator's key is written out
        self._turn = -1
        task = task or self.drawn(seed)
        seen = self.begin(seed, task)
        self.task, self._turn, self._invalid = task, 0, 0
        self._text, self._actions = seen.text, seen.actions
        return seen

    def step(self, text: str) -> Step:
        """As ``TextEnv.step``."""
        if self._turn < 0:
            raise RuntimeError("no episode is running: call reset(seed) first")
        turn, self._turn = self._turn + 1, -1  # stays -1 when the world raises
        said = self.said(text)
        action = None if said is None else self.read(said)
        valid = action is not None
        if action is None:
            self._invalid += 1
            done = Played(prompts.with_notice(self.family, self.style, self._text), effective=False, actions=self._actions)
        else:
            done = self.play(action)
            self._text, self._actions = done.text, done.actions
        truncated = not done.terminated and turn >= self.max_turns
        reward = done.reward + (self.timeout_reward if truncated and not done.success else 0.0)
        info = {
            "turn": turn,
            "invalid": self._invalid,
            "effective": done.effective,
            "data_source": self.data_source,
            "task": self.task,
            **done.info,
        }
        if not (done.terminated or truncated):
            self._turn = turn
        return Step(done.text, reward, done.terminated, truncated, done.success, valid, info, done.actions)

    def close(self) -> None:
        """As ``TextEnv.close``."""
        if not self._closed:
            self._closed, self._turn = True, -1
            self.free()
