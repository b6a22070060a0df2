"""A player that reads: goal, observations, and perhaps a lesson.

Owns: ``Lesson`` (what a lesson says) and ``Searcher`` (who does it, and searches for the rest).
Promises: it knows nothing but the texts and the commands listed with them.
Does not: look behind the game.
"""

from __future__ import annotations

import dataclasses
import re

_GOALS = (
    (r"(?:look at|examine the) (?P<thing>\w+) (?:under|with) the (?P<lamp>\w+)", 1, ""),
    (r"(?:put two|find two) (?P<thing>\w+) (?:in|and put them in) (?P<place>\w+)", 2, ""),
    (r"(?:put a|put some) clean (?P<thing>\w+) in (?P<place>\w+)", 1, "clean"),
    (r"(?:put a|put some) hot (?P<thing>\w+) in (?P<place>\w+)", 1, "heat"),
    (r"(?:put a|put some) cool (?P<thing>\w+) in (?P<place>\w+)", 1, "cool"),
    (r"(?P<verb>clean|heat|cool) some (?P<thing>\w+) and put it in (?P<place>\w+)", 1, ""),
    (r"(?:put a|put some) (?P<thing>\w+) (?:in|on) (?P<place>\w+)", 1, ""),
)
_TOOLS = {"clean": "sinkbasin", "heat": "microwave", "cool": "fridge"}
_RECEPTACLE = re.compile(r"\b([a-z]+ \d+)\b")


@dataclasses.dataclass(frozen=True)
class Lesson:
    """Receptacles, in the order of use: where the thing is, where it is treated, where it goes (or where the lamp is)."""

    sources: tuple[str, ...]
    tool: str = ""
    place: str = ""

    @classmethod
    def read(cls, text: str) -> Lesson:
        """Understand "the O is in R (and R); clean it in R, then move it to R". Raises ValueError when it names no receptacle."""
        said = text.lower()
        first, _, rest = said.partition(";")
        where = re.search(r"\b(?:is|are) (?:in|on)\b(.*)", first)
        sources = _RECEPTACLE.findall(where[1]) if where else []
        tool = re.search(r"\b(?:clean|heat|cool) (?:it|them) (?:in|with) ([a-z]+ \d+)", rest or said)
        place = re.search(r"\b(?:move (?:it|them) to|at) ([a-z]+ \d+)", rest or said)
        if not (sources or tool or place):
            raise ValueError(f"lesson {text!r} names no receptacle: say 'the lettuce is in fridge 1; move it to countertop 2'")
        return cls(tuple(sources), tool[1] if tool else "", place[1] if place else "")


class Searcher:
    """Goes to the receptacles the lesson names, then to all others as they are listed; takes the thing, treats it, brings it."""

    def __init__(self, goal: str, lesson: Lesson | None = None) -> None:
        found = next((m for pattern, *_ in _GOALS if (m := re.fullmatch(pattern, goal.strip().lower()))), None)
        if found is None:
            raise ValueError(f"goal {goal!r} is in none of the known forms")
        words = found.groupdict()
        self._count, verb = next((count, verb) for pattern, count, verb in _GOALS if pattern == found.re.pattern)
        self._thing, self._lamp, self._place = words["thing"], words.get("lamp"), words.get("place") or ""
        self._verb = words.get("verb") or verb
        self._lesson = lesson or Lesson(())
        self._room: list[str] = []  # receptacles, as the first observation lists them
        self._todo: list[str] = []  # those not looked into yet
        self._here = ""
        self._treated = False
        self._lamp_at = ""

    def act(self, text: str, actions: tuple[str, ...]) -> str:
        """The next command."""
        if not self._room:
            self._room = [action.removeprefix("go to ") for action in actions if action.startswith("go to ")]
            hinted = [*self._lesson.sources, *([self._lesson.place] if self._lamp else [])]
            rest = sorted(self._room, key=lambda r: (r.split()[0] == self._place, self._room.index(r)))
            self._todo = list(dict.fromkeys([r for r in hinted if r in self._room] + rest))
        carried = self._carried(actions)
        if self._lamp and self._lamp in text and f"use {self._lamp} 1" in actions and self._here:
            self._lamp_at = self._here
        if carried:
            return self._bring(carried, actions)
        take = next((a for a in actions if re.match(rf"take {self._thing} \d+ from ", a)), None)
        if take and not (self._count > 1 and take.split(" from ")[1] == self._target()):
            self._treated = False
            return take
        return self._look_on(actions)

    def _bring(self, carried: str, actions: tuple[str, ...]) -> str:
        if self._lamp:
            use = next((a for a in actions if a.startswith(f"use {self._lamp} ")), None)
            if use:
                return use
            return self._go(self._lamp_at, actions) if self._lamp_at else self._look_on(actions)
        if self._verb and not self._treated:
            treat = next((a for a in actions if a.startswith(f"{self._verb} {carried} with ")), None)
            if treat:
                self._treated = True
                return treat
            return self._go(self._first(_TOOLS[self._verb], self._lesson.tool), actions)
        target = self._target()
        if self._here != target:
            return self._go(target, actions)
        opening = f"open {target}"
        if opening in actions:
            return opening
        # "move O to R", or "put O in/on R" in older games
        return next(
            (a for a in actions if re.fullmatch(rf"(?:move|put) {carried} (?:to|in/on) {target}", a)), f"move {carried} to {target}"
        )

    def _look_on(self, actions: tuple[str, ...]) -> str:
        """Open what is here, or go to the next receptacle; when all were seen, begin again."""
        if f"open {self._here}" in actions:
            return f"open {self._here}"
        if not self._todo:
            self._todo = list(self._room)
        return self._go(self._todo[0], actions)

    def _go(self, receptacle: str, actions: tuple[str, ...]) -> str:
        """Two receptacles may be reached from one place: "go to" is not listed for the one that is here already; it is looked at then."""
        self._here = receptacle
        self._todo = [r for r in self._todo if r != receptacle]
        going = f"go to {receptacle}"
        return going if going in actions else f"examine {receptacle}"

    def _carried(self, actions: tuple[str, ...]) -> str:
        """The thing in the hand, which alone can be examined."""
        return next((a.removeprefix("examine ") for a in actions if re.fullmatch(rf"examine {self._thing} \d+", a)), "")

    def _target(self) -> str:
        return self._first(self._place, self._lesson.place)

    def _first(self, kind: str, hinted: str) -> str:
        if hinted in self._room and hinted.split()[0] == kind:
            return hinted
        return min((r for r in self._room if r.split()[0] == kind), key=lambda r: int(r.split()[1]), default="")
