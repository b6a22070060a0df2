"""Gymnax games as text environments: many at once, or one.

Owns: the turns of every slot, and the way from replies to one dispatch and back to words.
Promises: a slot reads as the same game played alone, byte for byte; a mistake by one holder (an unknown task, a step after the end) is an
exception in that slot's place and touches nobody else; when the device fails, ``advance`` itself raises and the batch is lost.
Does not: wait for anybody (the pool decides which slots go together).
"""

from __future__ import annotations

from collections.abc import Mapping

from envs import parse
from envs.api import Observation, Step
from envs.gymnax.batch import DeviceBatch
from envs.gymnax.games import GAMES, Game
from envs.turns import Played, TurnBased

Answer = Observation | Step | Exception


class _Slot(TurnBased[int]):
    """The turns of one game. What the device says is put into ``seen`` before the turn is played."""

    family = "gymnax"

    def __init__(self, game: Game, *, style: str, grammar: parse.Grammar, max_turns: int) -> None:
        super().__init__(style=style, grammar=grammar, max_turns=max_turns)
        self._game, self._total = game, 0.0
        self.seen: tuple[str, float, bool] = ("", 0.0, False)  # words, reward, ended

    @property
    def running(self) -> bool:
        """Whether an episode is under way."""
        return self._turn >= 0

    def wants(self, reply: str) -> int | None:
        """The action that ``reply`` will play, or None."""
        said = self.said(reply)
        return None if said is None else self.read(said)

    def begin(self, seed: int, task: str) -> Observation:
        """Tell the first observation."""
        self._total = 0.0
        return Observation(self._tell(self.seen[0]), self._game.actions)

    def read(self, said: str) -> int | None:
        """The number of the action, or None."""
        action = parse.one_of(self._game.actions, said)
        return None if action is None else self._game.actions.index(action)

    def play(self, action: int) -> Played:
        """Judge what the device has done."""
        text, reward, ended = self.seen
        self._total += reward
        won = self._game.won(reward, self._total, ended)
        return Played(self._tell(text), float(won), ended or won, won, True, self._game.actions)

    def free(self) -> None:
        """Nothing: the batch holds the state."""

    def _tell(self, text: str) -> str:
        return text if self.style == "compact" else f"You see:{text}\n\nActions: {', '.join(self._game.actions)}"


class TextBatch:
    """``slots`` games of one kind, in words. Raises ``EnvUnavailable`` when gymnax is missing."""

    def __init__(self, name: str, slots: int, *, style: str, grammar: parse.Grammar, max_turns: int) -> None:
        self._game = GAMES[name]
        self._how = {"style": style, "grammar": grammar, "max_turns": max_turns}
        self._batch = DeviceBatch(name, slots)
        self._slots = [self._slot() for _ in range(slots)]
        self._batch.advance({}, {})  # compile

    @property
    def alike(self) -> bool:
        """As ``Game.alike``."""
        return self._game.alike

    @property
    def slots(self) -> int:
        """How many games there are room for."""
        return self._batch.slots

    def grow(self, slots: int) -> None:
        """Room for more games, compiled. The games under way go on."""
        self._batch.grow(slots)
        self._slots += [self._slot() for _ in range(slots - len(self._slots))]
        self._batch.advance({}, {})

    def advance(self, resets: Mapping[int, tuple[int, str]], steps: Mapping[int, str]) -> dict[int, Answer]:
        """Start episodes (slot: seed and task) and play turns (slot: reply) in one dispatch. A slot is in one of them at most.

        Raises whatever the device raises; then the batch is lost.
        """
        answers: dict[int, Answer] = {}
        seeds: dict[int, int] = {}
        for slot, (seed, task) in resets.items():
            if task:
                answers[slot] = KeyError(f"a gymnax game has no task {task!r}: its only one is ''")
            elif not 0 <= seed < 2**63:
                answers[slot] = ValueError(f"seed {seed}: use a whole number from 0 to 2^63 - 1")
            else:
                seeds[slot] = seed
        wanted = {slot: self._slots[slot].wants(reply) for slot, reply in steps.items() if self._slots[slot].running}
        actions = {slot: action for slot, action in wanted.items() if action is not None}
        if seeds or actions:
            rows = self._batch.advance(seeds, actions)
            told = zip(self._game.tell(rows.observations), rows.rewards.tolist(), rows.ended.tolist(), strict=True)
            for slot, seen in zip((*seeds, *actions), told, strict=True):
                self._slots[slot].seen = seen
        for slot, seed in seeds.items():
            answers[slot] = self._slots[slot].reset(seed)
        for slot, reply in steps.items():
            try:
                answers[slot] = self._slots[slot].step(reply)
            except RuntimeError as mistake:  # no episode is running in this slot
                answers[slot] = mistake
        return answers

    def _slot(self) -> _Slot:
        return _Slot(self._game, style=self._how["style"], grammar=self._how["grammar"], max_turns=self._how["max_turns"])


class GymnaxText:
    """One game as a ``TextEnv``: a batch of one slot."""

    def __init__(self, batch: TextBatch) -> None:
        self._batch: TextBatch | None = batch
        self.same_for_all_seeds = batch.alike

    def reset(self, seed: int, task: str = "") -> Observation:
        """As ``TextEnv.reset``. Raises RuntimeError after ``close``."""
        answer = self._open().advance({0: (seed, task)}, {})[0]
        if isinstance(answer, Observation):
            return answer
        raise _error(answer)

    def step(self, text: str) -> Step:
        """As ``TextEnv.step``."""
        answer = self._open().advance({}, {0: text})[0]
        if isinstance(answer, Step):
            return answer
        raise _error(answer)

    def close(self) -> None:
        """As ``TextEnv.close``."""
        self._batch = None

    def _open(self) -> TextBatch:
        if self._batch is None:
            raise RuntimeError("this environment was closed: make another")
        return self._batch


def _error(answer: Answer) -> Exception:
    return answer if isinstance(answer, Exception) else TypeError(f"unexpected answer {answer!r}")
