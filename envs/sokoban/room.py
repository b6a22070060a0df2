"""A Sokoban room, its rules, and what is known about every state of it.

Owns: the rules (the player walks onto free floor and pushes one box, never pulls), and ``Solved``: for every state from which a room can be
solved, the fewest moves to the end.
Promises: ``Solved`` is exact and complete, because it is found backward from the end over all states: a state it does not know cannot be
solved by any moves.
Does not: make rooms, or put them into words.

A square is its number, row by row from the top left corner. A state is ``(player, boxes)`` with the boxes as a frozen set of squares.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

ACTIONS = ("up", "down", "left", "right")

State = tuple[int, frozenset[int]]


@dataclasses.dataclass(frozen=True)
class Room:
    """A square room of ``size`` by ``size`` squares, outer walls included, and how it starts."""

    size: int
    walls: frozenset[int]
    targets: frozenset[int]
    player: int
    boxes: frozenset[int]

    @property
    def start(self) -> State:
        """The first state."""
        return self.player, self.boxes

    def step(self, state: State, action: str) -> State:
        """The state after ``action``; the same one when a wall, or a box that cannot be pushed, is in the way."""
        player, boxes = state
        delta = deltas(self.size)[action]
        there, beyond = player + delta, player + 2 * delta
        if there in self.walls:
            return state
        if there not in boxes:
            return there, boxes
        if beyond in self.walls or beyond in boxes:
            return state
        return there, boxes - {there} | {beyond}

    def solved(self, state: State) -> bool:
        """Whether every box is on a target."""
        return state[1] == self.targets


def deltas(size: int) -> dict[str, int]:
    """By action what it adds to a square's number in a room of this size."""
    return {"up": -size, "down": size, "left": -1, "right": 1}


@dataclasses.dataclass(frozen=True)
class Solved:
    """``moves[state]``: the fewest moves from there to the end. ``pushes[state]``: the fewest pushes among such shortest ways."""

    moves: dict[State, int]
    pushes: dict[State, int]


def solve(size: int, walls: frozenset[int], targets: frozenset[int]) -> Solved:
    """All states of these walls and targets that can be solved: the game played backward, breadth first, from every solved state."""
    floor = [square for square in range(size * size) if square not in walls]
    level: list[State] = [(player, targets) for player in floor if player not in targets]
    moves, pushes = dict.fromkeys(level, 0), dict.fromkeys(level, 0)
    depth = 0
    while level:
        depth += 1
        above: list[State] = []
        for state in level:
            for before, pushed in _before(state, size, walls):
                count = pushes[state] + pushed
                if before not in moves:
                    moves[before], pushes[before] = depth, count
                    above.append(before)
                elif moves[before] == depth and count < pushes[before]:
                    pushes[before] = count
        level = above
    return Solved(moves, pushes)


def _before(state: State, size: int, walls: frozenset[int]) -> Iterator[tuple[State, bool]]:
    """The states from which one move leads to ``state``, and whether that move was a push."""
    player, boxes = state
    for delta in (-size, size, -1, 1):
        came_from, ahead = player - delta, player + delta
        if came_from in walls or came_from in boxes:
            continue
        yield (came_from, boxes), False
        if ahead in boxes:
            yield (came_from, boxes - {ahead} | {player}), True
