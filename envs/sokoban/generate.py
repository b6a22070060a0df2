"""Rooms by reverse play.

Owns: which room a seed names, and the split of rooms.
Promises: every room can be solved, within ``longest`` moves; no box starts on a target, and a shortest solution has at least two pushes
and three moves per box; training and held-out rooms never share their walls and targets, not even turned or mirrored; the room follows from
the arguments alone, on every machine.
Does not: play.

Walls and targets are drawn; the game played backward from the end (``room.solve``) gives every state that can be solved and its distance;
the start is drawn among them, evenly over distances so that long solutions are as frequent as short ones.
"""

from __future__ import annotations

import dataclasses
import hashlib
import random
from collections.abc import Callable, Iterable

from envs.api import Split
from envs.sokoban.room import Room, Solved, State, solve

SIZES, BOXES = range(6, 9), range(1, 4)  # smaller rooms are too easy; in larger ones the search through all states is no longer quick
_PUSHES, _MOVES = 2, 3  # of a shortest solution, per box, at least
_LARGEST = 21  # size times boxes; a room of size 8 with 3 boxes has a hundred thousand states
_HELDOUT_OF = 5  # one room in five is held out
_DRAWINGS = 10_000  # about one in two is a training room, one in ten a held-out room


@dataclasses.dataclass(frozen=True)
class Made:
    """A room and everything that is known about its states."""

    room: Room
    solved: Solved

    @property
    def moves(self) -> int:
        """The fewest moves that solve the room."""
        return self.solved.moves[self.room.start]

    @property
    def pushes(self) -> int:
        """The fewest pushes among the shortest solutions."""
        return self.solved.pushes[self.room.start]


def make_room(seed: int, split: Split, *, size: int = 6, boxes: int = 2, longest: int = 30) -> Made:
    """The room that ``seed`` names. Raises ValueError for a size, a number of boxes or a length for which there are no rooms."""
    check(size, boxes, longest)
    name = f"sokoban/{size}/{boxes}/{longest}/{split}/{seed}"
    draw = random.Random(int.from_bytes(hashlib.sha256(name.encode()).digest(), "big")).random
    for _ in range(_DRAWINGS):
        walls = _walls(size, draw)
        floor = sorted(set(range(size * size)) - walls)
        targets = frozenset(_pick(floor, draw) for _ in range(boxes))
        if len(targets) < boxes or not _connected(floor, size) or split_of(size, walls, targets) != split:
            continue
        solved = solve(size, walls, targets)
        start = _start(solved, targets, boxes, longest, draw)
        if start is not None:
            return Made(Room(size, walls, targets, *start), solved)
    raise ValueError(f"no room of size {size} with {boxes} boxes and at most {longest} moves in {_DRAWINGS} drawings: raise longest")


def check(size: int, boxes: int, longest: int) -> None:
    """Raises ValueError where no rooms are made."""
    if size not in SIZES or boxes not in BOXES or size * boxes > _LARGEST:
        raise ValueError(f"size {size}, {boxes} boxes: use a size of 6 to 8 and 1 to 3 boxes, but not 8 with 3")
    if longest < 6 * boxes:
        raise ValueError(f"longest={longest}: use {6 * boxes} or more for {boxes} boxes")


def split_of(size: int, walls: frozenset[int], targets: frozenset[int]) -> Split:
    """The split of all rooms with these walls and targets, turned or mirrored: a hash of the smallest of the eight drawings."""
    drawing = "".join("W" if square in walls else "G" if square in targets else "." for square in range(size * size))
    digest = hashlib.sha256(min(_symmetries(drawing, size)).encode()).digest()
    return "heldout" if digest[0] % _HELDOUT_OF == 0 else "train"


def _symmetries(drawing: str, size: int) -> Iterable[str]:
    for _ in range(4):
        drawing = "".join(drawing[(size - 1 - x) * size + y] for y in range(size) for x in range(size))
        yield drawing
        yield "".join(drawing[y * size : (y + 1) * size][::-1] for y in range(size))


def _walls(size: int, draw: Callable[[], float]) -> frozenset[int]:
    """The outer walls, and two of the squares inside up to a third of them."""
    inside = [y * size + x for y in range(1, size - 1) for x in range(1, size - 1)]
    count = 2 + int(draw() * (len(inside) // 3 - 1))
    outer = set(range(size * size)) - set(inside)
    return frozenset(outer | {_pick(inside, draw) for _ in range(count)})


def _connected(floor: list[int], size: int) -> bool:
    reached, ahead, free = {floor[0]}, [floor[0]], set(floor)
    while ahead:
        here = ahead.pop()
        for there in (here - size, here + size, here - 1, here + 1):
            if there in free and there not in reached:
                reached.add(there)
                ahead.append(there)
    return len(reached) == len(floor)


def _start(solved: Solved, targets: frozenset[int], boxes: int, longest: int, draw: Callable[[], float]) -> State | None:
    """A state to start from, or None when these walls and targets have none that is hard enough."""
    by_distance: dict[int, list[State]] = {}
    for state, moves in solved.moves.items():
        if _MOVES * boxes <= moves <= longest and solved.pushes[state] >= _PUSHES * boxes and not state[1] & targets:
            by_distance.setdefault(moves, []).append(state)
    if not by_distance:
        return None
    states = by_distance[_pick(sorted(by_distance), draw)]
    return _pick(sorted(states, key=lambda state: (state[0], sorted(state[1]))), draw)


def _pick(things: list, draw: Callable[[], float]):
    return things[int(draw() * len(things))]
