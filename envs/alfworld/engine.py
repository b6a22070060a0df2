"""What an engine is, and which one is used.

Owns: the interface of both engines, the choice between them, and the game file's outer form.
Does not: play.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from pathlib import Path
from typing import Any, Literal, Protocol, TypedDict

from envs.api import EnvUnavailable

Choice = Literal["auto", "official", "native"]
NOTHING = "Nothing happens."  # the official engine's answer to whatever it does not list
INSTALL = "pip install 'crl-jax[alfworld]'"


class GameFile(TypedDict):
    """The fields of ``game.tw-pddl`` that are played."""

    pddl_domain: str
    grammar: str
    pddl_problem: str


@dataclasses.dataclass(frozen=True, slots=True)
class View:
    """What the game says, the commands it lists (sorted), and whether the goal is reached."""

    said: str
    commands: tuple[str, ...]
    won: bool


class Engine(Protocol):
    """Plays one game at a time."""

    name: str

    def start(self, path: str) -> View:
        """Begin the game in the file at ``path``; may be called again. Raises OSError, ValueError."""
        ...

    def do(self, command: str) -> View:
        """Say one command; what is not listed has the answer ``NOTHING``."""
        ...

    def close(self) -> None:
        """Free what it holds. May be called twice."""
        ...


def read_game(path: str) -> GameFile:
    """A game file. Raises OSError, and ValueError for one that is damaged."""
    try:
        game: Any = json.loads(Path(path).read_text(encoding="utf-8"))
    except json.JSONDecodeError as damage:
        raise ValueError(f"{path} is no game file ({damage}): download or generate it again") from damage
    missing = [field for field in GameFile.__annotations__ if not isinstance(game, dict) or not isinstance(game.get(field), str)]
    if missing:
        raise ValueError(f"{path} has no {', '.join(missing)}: it is no ALFWorld game file")
    return GameFile(**{field: game[field] for field in GameFile.__annotations__})


def resolve(choice: Choice) -> Literal["official", "native"]:
    """Which engine ``choice`` means here: "auto" is the official one where it is installed."""
    if choice != "auto":
        return choice
    return "official" if official_installed() else "native"


def official_installed() -> bool:
    """Whether textworld and its planner can be imported (without importing them)."""
    return all(importlib.util.find_spec(package) is not None for package in ("textworld", "fast_downward"))


def make_engine(choice: Choice) -> Engine:
    """A fresh engine. Raises ``EnvUnavailable`` when the official one is wanted and not installed."""
    if resolve(choice) == "native":
        from envs.alfworld.native import NativeEngine

        return NativeEngine()
    if not official_installed():
        raise EnvUnavailable(f"engine 'official' needs textworld and fast-downward-textworld: {INSTALL}; or use engine='native'")
    from envs.alfworld.official import OfficialEngine

    return OfficialEngine()
