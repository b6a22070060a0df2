"""An expert for household games: what to do next, knowing everything.

Owns: the next operator from any state, and whole plans made of it.
Promises: it works from every state, so it recovers from whatever was done before; a plan ends where the goal is reached.
Does not: search (the six tasks have short scripts), or find shortest plans.
"""

from __future__ import annotations

import dataclasses

from envs.alfworld.native import Compiled
from envs.alfworld.rules import Operator, State, pairs

LONGEST = 60

_TREATMENTS = {"isclean": "cleanobject", "ishot": "heatobject", "iscool": "coolobject"}
_TOOLS = {"cleanobject": "sinkbasintype", "heatobject": "microwavetype", "coolobject": "fridgetype"}


@dataclasses.dataclass(frozen=True)
class Wanted:
    """What a goal asks for: ``count`` objects of a type in one receptacle of a type, treated; or one in the hand by a lamp that is on."""

    target: str
    place: str = ""
    count: int = 1
    treatment: str = ""  # predicate
    lamp: str = ""


def wanted(game: Compiled) -> Wanted:
    """The goal of a game. Raises ValueError for one that is none of the six tasks."""
    if len(game.problem.goal) == 1:
        atoms = game.problem.goal[0].true
        lit = {atom[1] for atom in atoms if atom[0] == "istoggled"}
        targets = [atom for atom in atoms if atom[0] == "objecttype" and atom[1] not in lit]
        lamps = [atom[2] for atom in atoms if atom[0] == "objecttype" and atom[1] in lit]
        places = {atom[2] for atom in atoms if atom[0] == "receptacletype"}
        treatments = [atom[0] for atom in atoms if atom[0] in _TREATMENTS]
        if len({atom[2] for atom in targets}) == 1 and len(places) + len(lamps) == 1 and len(treatments) < 2:
            return Wanted(targets[0][2], "".join(places), len(targets), "".join(treatments), "".join(lamps))
    raise ValueError("the goal of this game is none of the six tasks: there is no expert for it")


def plan(game: Compiled, state: State | None = None) -> list[str]:
    """Commands that reach the goal from ``state`` (untouched), or from the start. Raises ValueError where there is no way."""
    state = state.copy() if state is not None else game.world.start()
    expert, commands = Expert(game), []
    while not game.world.reached(state):
        operator = expert.next(state)
        commands.append(game.command(operator, state))
        state.apply(operator)
        if len(commands) > LONGEST:
            raise ValueError(f"no plan of at most {LONGEST} commands: the expert's script does not fit this game")
    return commands


class Expert:
    """Chooses operators for one game."""

    def __init__(self, game: Compiled) -> None:
        facts = game.world.facts
        self._game, self._want = game, wanted(game)
        self._agent = next(iter(facts["atlocation"]))[0]
        self._at = pairs(facts["receptacleatlocation"])
        self._kinds = pairs([*facts["objecttype"], *facts["receptacletype"]])
        self._fits = facts["cancontain"]
        self._openable = {arguments[0] for arguments in facts["openable"]}

    def next(self, state: State) -> Operator:
        """The next operator; the goal is not reached yet. Raises ValueError where nothing helps."""
        want = self._want
        here = next(iter(state.facts["atlocation"]))[1]
        held = next((o for _, o in state.facts["holds"]), None)
        lies = pairs(state.facts["inreceptacle"])
        if held is not None and self._kinds[held] != want.target:
            return self._drop(held, here, state)
        if want.lamp:
            if held is None:
                return self._fetch(self._nearest(self._of(want.target, lies), lies, here, state), lies, here, state)
            lamp = self._nearest(self._of(want.lamp, lies), lies, here, state)
            return self._go(lies[lamp], here) or ("toggleobject", (self._agent, here, lamp, lies[lamp]))
        place = self._place(lies, here)
        if held is None:
            missing = [o for o in self._of(want.target, lies) if not (lies[o] == place and self._ready(o, state))]
            return self._fetch(self._nearest(missing, lies, here, state, ready_first=True), lies, here, state)
        if not self._ready(held, state):
            action = _TREATMENTS[want.treatment]
            tool = self._first([r for r in self._at if self._kinds[r] == _TOOLS[action]], here)
            return self._go(tool, here) or (action, (self._agent, here, tool, held))
        return self._go(place, here) or self._open(place, here, state) or self._put(held, place, here)

    def _of(self, kind: str, lies: dict[str, str]) -> list[str]:
        return [o for o in lies if self._kinds.get(o) == kind]

    def _ready(self, o: str, state: State) -> bool:
        return not self._want.treatment or (o,) in state.facts[self._want.treatment]

    def _place(self, lies: dict[str, str], here: str) -> str:
        """Where to bring things: the receptacle that has most of them, then one in reach, then one that need not be opened."""
        found = [r for r in self._at if self._kinds[r] == self._want.place]
        there = {r: sum(lies[o] == r for o in self._of(self._want.target, lies)) if self._want.count > 1 else 0 for r in found}
        if not found:
            raise ValueError("this game has no receptacle of the kind that its goal names")
        return min(found, key=lambda r: (-there[r], self._at[r] != here, r in self._openable, r))

    def _nearest(self, things: list[str], lies: dict[str, str], here: str, state: State, *, ready_first: bool = False) -> str:
        if not things:
            raise ValueError("this game lacks an object that its goal needs")
        return min(
            things,
            key=lambda o: (ready_first and not self._ready(o, state), self._at[lies[o]] != here, self._shut(lies[o], state), o),
        )

    def _first(self, receptacles: list[str], here: str) -> str:
        if not receptacles:
            raise ValueError("this game lacks the receptacle that its task needs")
        return min(receptacles, key=lambda r: (self._at[r] != here, r))

    def _shut(self, receptacle: str, state: State) -> bool:
        return receptacle in self._openable and (receptacle,) not in state.facts["opened"]

    def _go(self, receptacle: str, here: str) -> Operator | None:
        there = self._at[receptacle]
        return None if there == here else ("gotolocation", (self._agent, here, there, receptacle))

    def _open(self, receptacle: str, here: str, state: State) -> Operator | None:
        return ("openobject", (self._agent, here, receptacle)) if self._shut(receptacle, state) else None

    def _fetch(self, o: str, lies: dict[str, str], here: str, state: State) -> Operator:
        r = lies[o]
        return self._go(r, here) or self._open(r, here, state) or ("pickupobject", (self._agent, here, o, r))

    def _put(self, o: str, receptacle: str, here: str) -> Operator:
        return ("putobject", (self._agent, here, o, receptacle, self._kinds[o], self._kinds[receptacle]))

    def _drop(self, o: str, here: str, state: State) -> Operator:
        """Put away what is not wanted: in reach, else wherever it fits."""
        fits = [r for r in self._at if (self._kinds[r], self._kinds[o]) in self._fits]
        if not fits:
            raise ValueError("the hand holds something that fits nowhere")
        r = min(fits, key=lambda r: (self._at[r] != here, self._shut(r, state), r))
        return self._go(r, here) or self._open(r, here, state) or self._put(o, r, here)
