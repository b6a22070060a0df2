"""Ways over squares.

Owns: shortest ways of a hero (``way``, ``nearest``), and of a boulder into the water (``push``).
Promises: deterministic: of equal ways the one whose moves come first in ``STEPS``. Doors are never passed diagonally.
Does not: know the game, or what is behind a square.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection

from envs.minihack.commands import MOVES

Square = tuple[int, int]  # column, row

STEPS: dict[str, Square] = dict(zip(MOVES, ((0, -1), (1, 0), (0, 1), (-1, 0), (1, -1), (1, 1), (-1, 1), (-1, -1)), strict=True))
_NAME = {delta: name for name, delta in STEPS.items()}


def toward(here: Square, there: Square) -> str:
    """The move whose direction is nearest by signs; "" on the square itself."""
    dx, dy = there[0] - here[0], there[1] - here[1]
    return _NAME.get(((dx > 0) - (dx < 0), (dy > 0) - (dy < 0)), "")


def after(here: Square, move: str) -> Square:
    """The square one ``move`` away."""
    dx, dy = STEPS[move]
    return here[0] + dx, here[1] + dy


def nearest(
    here: Square, floor: Collection[Square], is_goal: Callable[[Square], bool], doors: Collection[Square] = ()
) -> tuple[str, ...] | None:
    """The moves of a shortest way from ``here`` over ``floor`` to a goal; () on one, None where there is none."""
    came: dict[Square, tuple[Square, str]] = {}
    queue, seen = deque([here]), {here}
    while queue:
        at = queue.popleft()
        if is_goal(at):
            moves: list[str] = []
            while at != here:
                at, move = came[at]
                moves.append(move)
            return tuple(reversed(moves))
        for move, (dx, dy) in STEPS.items():
            then = (at[0] + dx, at[1] + dy)
            if then in seen or then not in floor or (dx and dy and (at in doors or then in doors)):
                continue
            seen.add(then)
            came[then] = (at, move)
            queue.append(then)
    return None


def way(here: Square, there: Square, floor: Collection[Square], doors: Collection[Square] = ()) -> tuple[str, ...] | None:
    """The moves of a shortest way from ``here`` to ``there``; None where there is none."""
    return nearest(here, floor, lambda at: at == there, doors)


def push(here: Square, floor: Collection[Square], boulders: Collection[Square], targets: Collection[Square]) -> tuple[str, ...] | None:
    """The fewest moves with which a hero pushes any one boulder into a target; None where it cannot. The others are left where they are."""
    best: deque[tuple[Square, Square, Square]] = deque((here, boulder, boulder) for boulder in sorted(boulders))
    came: dict[tuple[Square, Square, Square], tuple[tuple[Square, Square, Square], str] | None] = dict.fromkeys(best)
    others = {boulder: frozenset(boulders) - {boulder} for boulder in boulders}
    while best:
        state = best.popleft()
        at, boulder, which = state
        for move, (dx, dy) in STEPS.items():
            then = (at[0] + dx, at[1] + dy)
            moved = boulder
            if then == boulder:
                moved = (then[0] + dx, then[1] + dy)
                if moved in targets:
                    return (*_moves_to(state, came), move)
                if moved not in floor or moved in others[which]:
                    continue
            elif then not in floor or then in others[which]:
                continue
            new = (then, moved, which)
            if new not in came:
                came[new] = (state, move)
                best.append(new)
    return None


def _moves_to(
    state: tuple[Square, Square, Square], came: dict[tuple[Square, Square, Square], tuple[tuple[Square, Square, Square], str] | None]
) -> tuple[str, ...]:
    moves: list[str] = []
    while (step := came[state]) is not None:
        state, move = step
        moves.append(move)
    return tuple(reversed(moves))
