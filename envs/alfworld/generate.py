"""Household games made from the scenes that ship with ALFWorld.

Owns: filling a scene with objects, the goal, and the game's files in the layout of the original data.
Promises: a game follows from (task type, scene, seed) alone, on every machine and Python version; its goal is not reached at the start; its
file holds a plan that wins it.
Does not: choose which games are used (see ``games``, and ``python -m envs.alfworld.generate`` for how ``games.jsonl`` was made).
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from envs.alfworld import wheel
from envs.alfworld.wheel import Scene, kind_of

T = TypeVar("T")

KINDS = (
    "pick_and_place_simple",
    "look_at_obj_in_light",
    "pick_clean_then_place_in_recep",
    "pick_heat_then_place_in_recep",
    "pick_cool_then_place_in_recep",
    "pick_two_obj_and_place",
)
FORMAT = 1  # raise it when a game changes: made games are kept under this number

_TOOLS = {
    "pick_clean_then_place_in_recep": ("Cleanable", "SinkBasin"),
    "pick_heat_then_place_in_recep": ("Heatable", "Microwave"),
    "pick_cool_then_place_in_recep": ("Coolable", "Fridge"),
}
_LOOK, _TWO = "look_at_obj_in_light", "pick_two_obj_and_place"
_LAMP = "DeskLamp"
_FIXED = (_LAMP, "FloorLamp")  # objects that nobody carries
_DISTRACTORS = 18  # kinds of other objects, at most
_MANGLED = (("-", "_minus_"), ("#", "-"), ("|", "_bar_"), ("+", "_plus_"), (".", "_dot_"), (",", "_comma_"))


@dataclasses.dataclass(frozen=True)
class Game:
    """A game before it is a file. ``objects``: id to the receptacle it lies in."""

    kind: str
    scene: Scene
    seed: int
    target: str  # kind of the object
    place: str  # kind of receptacle it must go to; empty where it must not
    goal: str  # in words
    objects: dict[str, str]
    start: str  # where the agent stands

    @property
    def id(self) -> str:
        """As the folders of the original data are named."""
        return f"{self.kind}-{self.target}-None-{self.place or _LAMP}-{self.scene.number}/trial_gen_{self.seed:06d}"


def design(kind: str, number: int, seed: int) -> Game | None:
    """The game of (kind, scene, seed), or None where the scene has nothing to do it with. Raises ``EnvUnavailable``, KeyError."""
    house, scene = wheel.household(), wheel.scene(number)
    draw = _Draw(f"{kind}/{number}/{seed}")
    kinds = {kind_of(receptacle) for receptacle in scene.receptacles}
    homes = {o: [r for r in scene.receptacles if o in house.fits[kind_of(r)]] for o in scene.objects}
    chosen = _choose(kind, {o: where for o, where in homes.items() if where}, kinds, draw)
    if chosen is None:
        return None
    target, place = chosen
    objects: dict[str, str] = {}

    def put(what: str, *, outside: str = "") -> None:
        where = [r for r in homes[what] if kind_of(r) != outside]
        spot = "|".join(f"{draw.between(-300, 300) / 100:+06.2f}" for _ in range(3))
        if where:
            objects[f"{what}|{spot}"] = draw.pick(where)

    for _ in range(draw.between(2, 3) if kind == _TWO else draw.between(1, 2)):
        put(target, outside=place)
    if kind == _LOOK:
        put(_LAMP)
    others = draw.shuffled([o for o, where in homes.items() if where and o != target and o not in _FIXED])
    for other in others[:_DISTRACTORS]:
        for _ in range(draw.between(1, 2)):
            put(other)
    words = draw.pick(house.goals[kind]["templates"])
    goal = words.format(obj=target.lower(), recep=place.lower(), toggle=_LAMP.lower(), mrecep="")
    start = f"loc|{draw.between(-8, 8)}|{draw.between(40, 48)}|{draw.between(0, 3)}|30"
    return Game(kind, scene, seed, target, place, goal, objects, start)


def contents(game: Game, walkthrough: Sequence[str] = ()) -> dict[str, str]:
    """The game's files by name. ``walkthrough``: a plan that wins it."""
    traj: dict[str, Any] = {
        "task_id": game.id.split("/")[1],
        "task_type": game.kind,
        "pddl_params": {
            "object_target": game.target,
            "parent_target": game.place,
            "toggle_target": _LAMP if game.kind == _LOOK else "",
            "mrecep_target": "",
            "object_sliced": False,
        },
        "scene": {"floor_plan": f"FloorPlan{game.scene.number}", "scene_num": game.scene.number},
        "turk_annotations": {"anns": [{"task_desc": game.goal, "high_descs": [], "votes": [1]}]},
        "plan": {},
    }
    played = {
        "pddl_domain": wheel.domain(),
        "grammar": wheel.grammar().replace("UNKNOWN GOAL", game.goal),
        "pddl_problem": _problem(game),
        "solvable": bool(walkthrough),
        "walkthrough": list(walkthrough),
    }
    return {"game.tw-pddl": json.dumps(played), "traj_data.json": json.dumps(traj), "initial_state.pddl": played["pddl_problem"]}


def write(folder: Path, game: Game, walkthrough: Sequence[str] = ()) -> None:
    """Put the game's files into ``folder``, which exists."""
    for name, text in contents(game, walkthrough).items():
        (folder / name).write_text(text, encoding="utf-8")


def _choose(kind: str, homes: dict[str, list[str]], kinds: set[str], draw: _Draw) -> tuple[str, str] | None:
    """What to bring, and to which kind of receptacle."""
    house = wheel.household()
    able, tool = _TOOLS.get(kind, ("", ""))
    targets = [o for o in sorted(homes) if o not in _FIXED and (not able or o in house.able[able])]
    if (tool and tool not in kinds) or (kind == _LOOK and _LAMP not in homes):
        return None
    if kind == _LOOK:
        return (draw.pick(targets), "") if targets else None
    pairs = [
        (o, place)
        for o in targets
        for place in sorted({kind_of(r) for r in homes[o]} - {tool})
        if any(kind_of(r) != place for r in homes[o])  # it must be able to lie elsewhere
    ]
    return draw.pick(pairs) if pairs else None


def _problem(game: Game) -> str:
    """The game in PDDL, in the vocabulary of the original files."""
    house, receptacles, objects = wheel.household(), game.scene.receptacles, game.objects
    place = {r: f"loc|{at[0] * 4:.0f}|{at[1] * 4:.0f}|{at[2] // 90}|{at[3]}" for r, at in receptacles.items()}
    kind = {o: o.split("|")[0] for o in objects} | {r: kind_of(r) for r in receptacles}
    declared = [
        "agent1 # agent",
        *(f"{o}Type # otype" for o in sorted(house.objects)),
        *(f"{r}Type # rtype" for r in sorted(house.receptacles)),
        *(f"{o} # object" for o in sorted(objects)),
        *(f"{r} # receptacle" for r in sorted(receptacles)),
        *(f"{l} # location" for l in sorted({*place.values(), game.start})),
    ]
    present = {kind[o] for o in objects}
    facts = [
        *(f"receptacleType {r} {kind[r]}Type" for r in sorted(receptacles)),
        *(f"objectType {o} {kind[o]}Type" for o in sorted(objects)),
        *(f"canContain {r}Type {o}Type" for r in sorted({kind[r] for r in receptacles}) for o in sorted(house.fits[r] & present)),
        *(f"pickupable {o}" for o in sorted(objects) if kind[o] not in _FIXED),
        *(f"isReceptacleObject {o}" for o in sorted(objects) if kind[o] in house.movable),
        *(f"openable {r}" for r in sorted(receptacles) if kind[r] in house.openable),
        f"atLocation agent1 {game.start}",
        *(f"{able.lower()} {o}" for able in sorted(house.able) for o in sorted(objects) if kind[o] in house.able[able]),
        *(f"inReceptacle {o} {r}" for o, r in sorted(objects.items())),
        *(f"objectAtLocation {o} {place[r]}" for o, r in sorted(objects.items())),
        *(f"receptacleAtLocation {r} {place[r]}" for r in sorted(receptacles)),
    ]
    goal = house.goals[game.kind]["pddl"].format(obj=game.target, recep=game.place, toggle=_LAMP, mrecep="")
    text = "\n".join(["(define (problem plan_gen)", "(:domain alfred)", "(:objects", *declared, ")", "(:init"])
    text = "\n".join([text, *(f"({fact})" for fact in facts), ")", goal])
    for plain, mangled in _MANGLED:
        text = text.replace(plain, mangled)
    return text


class _Draw:
    """Choices from ``random.Random.random``, the one method whose stream Python promises to keep."""

    def __init__(self, seed: str) -> None:
        self._random = random.Random(seed).random

    def between(self, low: int, high: int) -> int:
        return low + int(self._random() * (high - low + 1))

    def pick(self, things: Sequence[T]) -> T:
        return things[int(self._random() * len(things))]

    def shuffled(self, things: Iterable[T]) -> list[T]:
        left, found = list(things), []
        while left:
            found.append(left.pop(int(self._random() * len(left))))
        return found
