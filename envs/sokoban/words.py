"""A Sokoban room in words.

Owns: the two text styles.
Promises: both tell the whole room, which the player of Sokoban sees. Columns (x) and rows (y) count from 0 at the top left corner.
Does not: know what a good move is.

    full     the room as a drawing, a legend, and where things are
    compact  " you {x} {y}", then " box {x} {y}" for a box that is not on a goal, " done {x} {y}" for one that is, " goal {x} {y}" for a
             goal without a box, " wall {x} {y}" for the walls inside; " blocked" after a move that did nothing. One space stands before
             every word.
"""

from __future__ import annotations

from collections.abc import Iterable

from envs.sokoban.room import ACTIONS, Room, State

LEGEND = "A you, @ you on a goal, B box, C box on a goal, G goal, W wall, . floor"
MARKS = ("you", "box", "done", "goal", "wall", "blocked", "unknown")  # "unknown" is the notice for a reply that was no action


def words(size: int) -> tuple[str, ...]:
    """Every word of the compact style in rooms of this size, each once."""
    return (*MARKS, *(str(n) for n in range(size)))


def compact(room: Room, state: State, *, blocked: bool = False) -> str:
    """The room in a few words."""
    player, boxes = state
    size, targets = room.size, room.targets
    inside = (wall for wall in room.walls if 0 < wall % size < size - 1 and 0 < wall // size < size - 1)
    said = [f" you {_xy(player, size)}"]
    for word, squares in (("box", boxes - targets), ("done", boxes & targets), ("goal", targets - boxes), ("wall", inside)):
        said += [f" {word} {_xy(square, size)}" for square in sorted(squares)]
    return "".join(said) + " blocked" * blocked


def full(room: Room, state: State, *, blocked: bool = False) -> str:
    """The room as a drawing with its legend, and where things are."""
    player, boxes = state
    size = room.size
    lines = ["".join(_symbol(room, state, y * size + x) for x in range(size)) for y in range(size)]
    parts = [
        "Room:\n" + "\n".join(lines),
        f"Legend: {LEGEND}.",
        f"You are at {_places([player], size)}. Boxes at {_places(boxes, size)}; {len(boxes & room.targets)} of {len(boxes)} on a goal. "
        f"Goals at {_places(room.targets, size)}. (x, y) count from 0 at the top left.",
        "Actions: " + ", ".join(ACTIONS),
    ]
    if blocked:
        parts.insert(0, "The last move was blocked: nothing changed.")
    return "\n\n".join(parts)


def _symbol(room: Room, state: State, square: int) -> str:
    player, boxes = state
    goal = square in room.targets
    if square == player:
        return "@" if goal else "A"
    if square in boxes:
        return "C" if goal else "B"
    return "W" if square in room.walls else "G" if goal else "."


def _xy(square: int, size: int) -> str:
    return f"{square % size} {square // size}"


def _places(squares: Iterable[int], size: int) -> str:
    return " and ".join(f"({square % size}, {square // size})" for square in sorted(squares))
