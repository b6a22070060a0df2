"""The games of gymnax that are told in words.

Owns: the table (which class, with which parameters, its actions in words, when it is won, how many turns), and importing gymnax.
Promises: nothing is imported before ``load``. A game is won by reaching its goal, whatever gymnax pays on the way.
Does not: step anything.

The parameters differ from gymnax' own where they make text worth reading: start and goal of the four rooms are drawn; the chain has three
bits to remember, of which one is asked for; four passers-by distract on the way to the umbrella.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from envs.api import EnvUnavailable
from envs.gymnax import words

INSTALL = "gymnax is not installed: pip install 'crl-jax'"


@dataclasses.dataclass(frozen=True)
class Game:
    """One game. ``settings`` go to the class, ``params`` replace its default parameters.

    ``won_by``: "reward" when one step's reward is above ``enough``; "end" when that step also ended the game; "sum" when the sum of all
    rewards is. A game that is won is over, also where gymnax would go on.
    """

    module: str
    cls: str
    goal: str
    actions: tuple[str, ...]
    turns: int
    tell: words.Words
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    params: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    won_by: Literal["reward", "end", "sum"] = "reward"
    enough: float = 0.5
    alike: bool = False  # episodes read alike whatever the seed: the secret is always the same, or lies where random play rarely gets

    def won(self, reward: float, total: float, ended: bool) -> bool:
        """Whether a step that paid ``reward`` won the game; ``total`` is the sum with it."""
        if self.won_by == "sum":
            return total > self.enough
        return reward > self.enough and (ended or self.won_by == "reward")


_COMPASS = ("up", "right", "down", "left")

GAMES: dict[str, Game] = {
    "four_rooms": Game(
        "misc.rooms",
        "FourRooms",
        "walk through the four rooms to the goal",
        _COMPASS,
        40,
        words.four_rooms,
        params={"resample_init_pos": True, "resample_goal_pos": True},
    ),
    "meta_maze": Game("misc.meta_maze", "MetaMaze", "find the hidden goal of the maze", _COMPASS, 40, words.meta_maze, alike=True),
    "deep_sea": Game("bsuite.deep_sea", "DeepSea", "dive to the treasure of the deep sea", ("red", "blue"), 8, words.deep_sea, alike=True),
    "memory_chain": Game(
        "bsuite.memory_chain",
        "MemoryChain",
        "remember the bits and say the one that is asked for",
        ("zero", "one"),
        8,
        words.memory_chain,
        settings={"num_bits": 3},
    ),
    "catch": Game("bsuite.catch", "Catch", "catch the ball with the paddle", ("left", "stay", "right"), 10, words.catch),
    "umbrella_chain": Game(
        "bsuite.umbrella_chain",
        "UmbrellaChain",
        "arrive with what the weather asks for",
        ("leave", "take"),
        12,
        words.umbrella_chain,
        settings={"n_distractor": 4},
        won_by="end",
    ),
    "breakout": Game(
        "minatar.breakout",
        "MinBreakout",
        "break two bricks and keep the ball in play",
        ("stay", "left", "right"),
        40,
        words.breakout,
        won_by="sum",
        enough=1.5,
    ),
}


def check_installed() -> None:
    """Raises ``EnvUnavailable`` with the install line when gymnax or jax is missing. Imports neither."""
    if any(importlib.util.find_spec(package) is None for package in ("jax", "gymnax")):
        raise EnvUnavailable(INSTALL)


def load(name: str) -> tuple[Any, Any]:
    """The environment object of a game and its parameters. Imports jax. Raises ``EnvUnavailable``, KeyError."""
    game = GAMES[name]
    try:
        with _without_seaborn():
            module = importlib.import_module(f"gymnax.environments.{game.module}")
    except ModuleNotFoundError as missing:
        raise EnvUnavailable(f"{INSTALL} (no module {missing.name!r})") from missing
    env = getattr(module, game.cls)(**game.settings)
    return env, env.default_params.replace(**game.params)


@contextlib.contextmanager
def _without_seaborn() -> Iterator[None]:
    """Gymnax imports seaborn (and with it pandas and SciPy, two thirds of its loading time) to draw one game that is not used here: an
    empty module stands in while gymnax is loaded, unless seaborn is there already."""
    stand_in = types.ModuleType("seaborn")
    if sys.modules.setdefault("seaborn", stand_in) is not stand_in:
        yield
        return
    try:
        yield
    finally:
        del sys.modules["seaborn"]
