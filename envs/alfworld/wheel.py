"""What the ``alfworld`` package ships: 120 scenes, what fits where, goals, the domain and the grammar.

Owns: reading them by path. The package is never imported: that would make folders, set a variable of the process and ask for packages that
playing does not need.
Promises: a missing package is ``EnvUnavailable`` with the line that installs it.
Does not: ship anything of it.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import runpy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from envs.api import EnvUnavailable

VERSION = "0.4.2"  # the generated games follow from its files
INSTALL = f"pip install --no-deps alfworld=={VERSION}"

_ROOMS = {0: "kitchen", 2: "living room", 3: "bedroom", 4: "bathroom"}  # by the hundreds of the scene number
_LAMPS = ("Desk", "SideTable", "Dresser")  # the tables leave out lamps, which nobody carries; the scenes have them on these


@dataclasses.dataclass(frozen=True)
class Scene:
    """A room: its receptacles with where one stands to reach them (x, z, rotation, horizon), and the kinds of objects it has."""

    number: int
    receptacles: Mapping[str, tuple[float, float, int, int]]
    objects: tuple[str, ...]

    @property
    def room(self) -> str:
        """Its kind of room."""
        return _ROOMS[self.number // 100]


@dataclasses.dataclass(frozen=True)
class Household:
    """Facts about all scenes: kinds of receptacles and objects, and what can be done with them."""

    receptacles: frozenset[str]  # kinds that stay where they are
    movable: frozenset[str]  # kinds of objects that can hold others
    objects: frozenset[str]
    openable: frozenset[str]
    fits: Mapping[str, frozenset[str]]  # kind of receptacle to kinds of objects
    able: Mapping[str, frozenset[str]]  # "Cleanable" and so on to kinds of objects
    goals: Mapping[str, Mapping[str, Any]]  # task type to its goal in PDDL ("pddl") and in words ("templates")


def numbers() -> tuple[int, ...]:
    """The numbers of all scenes."""
    return tuple(hundreds * 100 + n for hundreds in _ROOMS for n in range(1, 31))


@functools.cache
def household() -> Household:
    """The tables. Raises ``EnvUnavailable``."""
    tables = runpy.run_path(str(_folder() / "gen" / "constants.py"))
    goals = runpy.run_path(str(_folder() / "gen" / "goal_library.py"))["gdict"]
    movable = frozenset(tables["MOVABLE_RECEPTACLES"])
    static = frozenset(tables["RECEPTACLES"]) - movable
    fits = {
        kind: frozenset(tables["VAL_RECEPTACLE_OBJECTS"].get(kind, ())) | (frozenset({"DeskLamp"}) if kind in _LAMPS else frozenset())
        for kind in static
    }
    able = {name: frozenset(kinds) for name, kinds in tables["VAL_ACTION_OBJECTS"].items()}
    return Household(
        static, movable, frozenset(tables["OBJECTS_SET"]) - static, frozenset(tables["OPENABLE_CLASS_LIST"]), fits, able, goals
    )


@functools.cache
def scene(number: int) -> Scene:
    """A scene. Raises ``EnvUnavailable``, and KeyError for a number that no scene has."""
    if number not in numbers():
        raise KeyError(f"no scene {number}: kitchens are 1-30, living rooms 201-230, bedrooms 301-330, bathrooms 401-430")
    layouts, house = _folder() / "gen" / "layouts", household()
    places = json.loads((layouts / f"FloorPlan{number}-openable.json").read_text(encoding="utf-8"))
    objects = json.loads((layouts / f"FloorPlan{number}-objects.json").read_text(encoding="utf-8"))
    fixed = {name: tuple(place) for name, place in sorted(places.items()) if kind_of(name) in house.receptacles}
    return Scene(number, fixed, tuple(sorted({kind for kind in objects if kind in house.objects})))


def kind_of(receptacle: str) -> str:
    """The kind of a receptacle: ``Sink|..|SinkBasin`` is a SinkBasin."""
    first, *_, last = receptacle.split("|")
    return last if last.isalpha() else first


@functools.cache
def domain() -> str:
    """The PDDL domain of all games."""
    return (_folder() / "data" / "alfred.pddl").read_text(encoding="utf-8")


@functools.cache
def grammar() -> str:
    """The grammar of all games; its goal is still UNKNOWN GOAL."""
    return (_folder() / "data" / "alfred.twl2").read_text(encoding="utf-8")


@functools.cache
def _folder() -> Path:
    found = importlib.util.find_spec("alfworld")
    for folder in () if found is None else found.submodule_search_locations or ():
        if (Path(folder) / "data" / "alfred.pddl").is_file():  # any folder of that name could have been found
            return Path(folder)
    raise EnvUnavailable(
        f"the scenes of ALFWorld come with its package: {INSTALL}; for the official engine too: pip install 'crl-jax[alfworld]'"
    )
