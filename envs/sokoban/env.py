"""Sokoban as a text environment.

Owns: the episode. Promises: reward 1 when every box is on a target, else 0; a room that can no longer be solved is told in ``info["dead"]``
only and goes on. ``info`` also holds ``optimal_moves`` and ``optimal_pushes`` of the room, and ``moves_left`` (the fewest moves that still
solve it; -1 when dead): for measuring, never shown.
Does not: make rooms.
"""

from __future__ import annotations

from typing import Literal

from envs import parse
from envs.api import Observation, Split
from envs.sokoban import words
from envs.sokoban.generate import Made, make_room
from envs.sokoban.room import ACTIONS, State
from envs.turns import Played, TurnBased

_SPLITS: dict[str, Split] = {"": "train", "train": "train", "heldout": "heldout"}


def split_of_task(task: str) -> Split:
    """Whose rooms a task plays. Raises KeyError for an unknown task."""
    if task not in _SPLITS:
        raise KeyError(f"no Sokoban task {task!r}: use '' (training rooms) or 'heldout'")
    return _SPLITS[task]


class Sokoban(TurnBased[str]):
    """Rooms with ``boxes`` boxes, one per seed and split."""

    family = "sokoban"

    def __init__(
        self, *, boxes: int, size: int, longest: int, style: Literal["full", "compact"], grammar: parse.Grammar, max_turns: int
    ) -> None:
        super().__init__(style=style, grammar=grammar, max_turns=max_turns, data_source="generated")
        self._boxes, self._size, self._longest = boxes, size, longest
        self._made: Made | None = None
        self._state: State = (0, frozenset())

    def begin(self, seed: int, task: str) -> Observation:
        """Make the room that ``seed`` and the task's split name."""
        self._made = make_room(seed, split_of_task(task), size=self._size, boxes=self._boxes, longest=self._longest)
        self._state = self._made.room.start
        return Observation(self._render(), ACTIONS)

    def read(self, said: str) -> str | None:
        """The direction, or None."""
        return parse.one_of(ACTIONS, said)

    def play(self, action: str) -> Played:
        """Walk or push."""
        assert self._made is not None
        before, self._state = self._state, self._made.room.step(self._state, action)
        won, moved = self._made.room.solved(self._state), before != self._state
        left = self._made.solved.moves.get(self._state, -1)
        info = {"optimal_moves": self._made.moves, "optimal_pushes": self._made.pushes, "moves_left": left, "dead": left < 0}
        return Played(self._render(blocked=not moved), float(won), won, won, moved, ACTIONS, info)

    def free(self) -> None:
        """Forget the room."""
        self._made = None

    def _render(self, *, blocked: bool = False) -> str:
        assert self._made is not None
        tell = words.compact if self.style == "compact" else words.full
        return tell(self._made.room, self._state, blocked=blocked)
