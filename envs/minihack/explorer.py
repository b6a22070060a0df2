"""A player that reads the text and nothing else.

Owns: ``Explorer``: it remembers the squares it has seen, walks to stairs in sight, fetches what lies about and uses it (key, ring, potion,
boots, wand, horn), fights what stands in its way, and else goes to the nearest square from which something unseen can be seen. A lesson
may tell it the steps to take first, the direction to look in, or which monster means which direction.
Promises: deterministic given its draws and what it reads; it never walks into water or lava unless it floats, and pushes no boulder unless
told to.
Does not: know the level.
"""

from __future__ import annotations

import dataclasses
import random
import re

from envs.minihack import paths, reading
from envs.minihack.commands import LETTERS, MOVES
from envs.minihack.reading import Seen, Square

_WALLS, _LIQUID, _THINGS = "|-` ", "}", "(!=[/"
_VERBS = ("put on", "quaff", "wear", "zap", "apply")
_NOUNS = {"ring": "put on", "potion": "quaff", "boots": "wear", "wand": "zap", "horn": "apply"}
_DIRECTIONS = "|".join(sorted(("north east", "north west", "south east", "south west", *MOVES), key=len, reverse=True))
_STAIRS = re.compile(rf"(?:stairs are|grid bug is) (?:in the )?({_DIRECTIONS})\b")
_SIGN = re.compile(rf"(?:\ban? )?\b([a-z]+(?: [a-z]+)?) means ({_DIRECTIONS})\b")
_STEP = re.compile(r"([a-z][a-z ]*?)(?: (\d+)(?: times)?)?\Z")


@dataclasses.dataclass(frozen=True)
class Advice:
    """What a lesson says: ``steps`` to take first, the ``direction`` to look in, ``signs``: a monster's name and the direction it means."""

    steps: tuple[str, ...] = ()
    direction: str = ""
    signs: tuple[tuple[str, str], ...] = ()


def advice(lesson: str) -> Advice:
    """Read a lesson. Raises ValueError for one that says nothing the explorer can use."""
    said = lesson.casefold()
    _, _, listed = said.partition("do:")
    steps: list[str] = []
    for part in filter(None, (piece.strip() for piece in listed.partition(".")[0].split(","))):
        step = _STEP.fullmatch(part)
        if step is None or step[1] not in (*MOVES, *_VERBS, *LETTERS, "pickup"):
            raise ValueError(f"lesson step {part!r}: use actions with a number, as in 'do: east 3, pickup'")
        steps += [step[1]] * min(200, int(step[2] or 1))
    stairs = _STAIRS.search(said)
    signs = tuple((name.strip(), move.replace(" ", "")) for name, move in _SIGN.findall(said))
    found = Advice(tuple(steps), stairs[1].replace(" ", "") if stairs else "", signs)
    if found == Advice():
        raise ValueError(
            f"lesson {lesson!r} says nothing to do: use 'do: east 3, pickup', 'the stairs are south east' or 'a lichen means south'"
        )
    return found


class Explorer:
    """One episode's player. ``told``: what a lesson says."""

    def __init__(self, draw: random.Random, told: Advice | None = None) -> None:
        told = told or Advice()
        self._draw, self._steps, self._direction, self._signs = draw, list(told.steps), told.direction, told.signs
        self._map: dict[Square, str] = {}
        self._near: set[Square] = set()  # squares the hero stood on or next to: what is blank there is rock
        self._doors: set[Square] = set()
        self._refused: set[tuple[Square, str]] = set()
        self._last: tuple[Square, str] | None = None
        self._start: Square | None = None
        self._floats = self._used = False

    def act(self, text: str, actions: tuple[str, ...]) -> str:
        """The next action."""
        seen = reading.read(text)
        self._remember(seen)
        if self._steps and self._steps[0] in actions:
            action = self._steps.pop(0)
        else:
            self._steps = []
            action = self._answer(seen) if "cancel" in actions else self._decide(seen, actions)
        if action not in actions:
            action = actions[int(self._draw.random() * min(8, len(actions)))]
        self._last = (seen.here, action)
        return action

    def _remember(self, seen: Seen) -> None:
        if self._last is not None and self._last[0] == seen.here and self._last[1] in MOVES and not _fought(seen.message):
            self._refused.add(self._last)
        self._start = self._start or seen.here
        if self._map.get(seen.here, "") in _THINGS and seen.message.startswith("f - "):
            self._map[seen.here] = "."
        self._map |= {square: symbol for square, symbol in seen.symbols.items() if square != seen.here or square not in self._map}
        self._near |= {(seen.here[0] + dx, seen.here[1] + dy) for dx in (-1, 0, 1) for dy in (-1, 0, 1)}
        self._doors |= {square for square, symbol in seen.symbols.items() if symbol == "+"}
        self._floats = self._floats or "float" in seen.message
        for name, direction in self._signs:
            if name in seen.legend:
                self._direction = direction

    def _decide(self, seen: Seen, actions: tuple[str, ...]) -> str:
        stairs = [square for square, symbol in self._map.items() if symbol == ">"]
        if stairs and (found := self._way(seen.here, stairs[0])):
            return found[0]
        carried = _carried(seen.inventory)
        if "pickup" in actions and not carried:
            if self._map.get(seen.here, "") in tuple(_THINGS) or "You see here" in seen.message:
                self._map[seen.here] = "."
                return "pickup"
            things = [square for square, symbol in self._map.items() if symbol in _THINGS]
            for square in sorted(things):
                if found := self._way(seen.here, square):
                    return found[0]
        elif "pickup" in actions and (move := self._use(seen, carried)):
            return move
        return self._explore(seen.here)

    def _use(self, seen: Seen, verb: str) -> str:
        """The action that uses what is carried, or brings the hero where it can be used; "" when there is nothing to do with it now."""
        if verb == "unlock":
            shut = [door for door in sorted(self._doors) if self._map.get(door) == "+"]
            for door in shut:
                if abs(door[0] - seen.here[0]) + abs(door[1] - seen.here[1]) == 1:
                    return "apply"
                sides = [paths.after(door, move) for move in ("north", "east", "south", "west")]
                found = next((way for side in sides if side in self._map and (way := self._way(seen.here, side))), None)
                if found:
                    return found[0]
            return ""
        if self._used:
            return ""
        if verb in ("zap", "apply"):
            beside = [square for square, symbol in self._map.items() if symbol == _LIQUID and square[1] == seen.here[1]]
            if beside and beside[0][0] != seen.here[0] + 1:
                found = self._way(seen.here, (beside[0][0] - 1, seen.here[1]))
                return found[0] if found else ""
        return verb

    def _answer(self, seen: Seen) -> str:
        if "direction" in seen.message:
            self._used = True
            return "east"
        if "Right or Left" in seen.message:
            return "r"
        if "Improvise" in seen.message:
            return "y"
        offered = re.search(r"\[([a-zA-Z]+)", seen.message)
        self._used = "use or apply" not in seen.message and "zap" not in seen.message
        return offered[1][-1] if offered else "cancel"

    def _explore(self, here: Square) -> str:
        """Toward the frontier: seen floor with a neighbour that was never looked at. A direction to look in draws it."""
        known = self._floor()
        open_ends = {square for square in known if any(beside not in self._map and beside not in self._near for beside in _around(square))}
        if self._direction and self._start is not None:
            dx, dy = paths.STEPS[self._direction]
            x, y = self._start

            def cost(square: Square) -> float:  # how far it lies that way counts, not how far to the side of it
                ahead = ((square[0] - x) * dx + (square[1] - y) * dy) / (abs(dx) + abs(dy))
                return _distance(here, square) - 2 * min(ahead, 12)

            ranked = sorted(open_ends, key=lambda square: (cost(square), square))
            found = next((way for square in ranked[:8] if (way := self._way(here, square))), None)
        else:
            found = paths.nearest(here, self._steps_from(here, known), lambda at: at in open_ends and at != here, self._doors)
        return found[0] if found else MOVES[int(self._draw.random() * 8)]

    def _floor(self) -> set[Square]:
        blocked = _WALLS if self._floats or self._used else _WALLS + _LIQUID
        traps = {square for square, symbol in self._map.items() if symbol == "^"}
        return {square for square, symbol in self._map.items() if symbol not in blocked or square in self._doors} - traps

    def _steps_from(self, here: Square, floor: set[Square]) -> set[Square]:
        """``floor`` without the neighbours that refused a move from here."""
        return floor - {paths.after(here, move) for square, move in self._refused if square == here}

    def _way(self, here: Square, there: Square) -> tuple[str, ...] | None:
        floor = self._steps_from(here, self._floor() | {there})
        shut = {door for door in self._doors if self._map.get(door) == "+"}
        return paths.way(here, there, floor - shut, self._doors)


def _around(square: Square) -> list[Square]:
    return [paths.after(square, move) for move in MOVES]


def _distance(a: Square, b: Square) -> int:
    return max(abs(a[0] - b[0]), abs(a[1] - b[1]))


def _fought(message: str) -> bool:
    return any(word in message for word in ("You hit", "You miss", "You kill", "You destroy", "bites", "hits", "misses"))


def _carried(inventory: tuple[str, ...]) -> str:
    """What to do with a thing carried that a task may need: "unlock" or a verb; "" for nothing of the kind."""
    for line in inventory:
        words = line.replace(",", " ").split()
        if "key" in words or "Key" in words:
            return "unlock"
        found = next((verb for noun, verb in _NOUNS.items() if noun in words and "sickness" not in words), "")
        if found:
            return found
    return ""
