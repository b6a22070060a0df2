"""One NetHack instance behind MiniHack.

Owns: seeding, the clock of the game, and what is on the screen when the game ends.
Promises: (1) a seed fixes the whole episode: the three random streams of the game, and the effects it would otherwise take from the
calendar (moon phase, night). (2) ``screen`` after the last step is the true last screen: NLE blanks its arrays while it leaves the game, so
they are copied before that. (3) An ending is told as what it is: some levels end "successfully" on what they forbid, which is a FAILURE.
Does not: put anything into words, or count turns.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import importlib
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int, UInt8

from envs.api import EnvUnavailable

_KEYS = ("glyphs", "chars", "blstats", "message", "screen_descriptions", "inv_strs", "inv_letters")
_NO_LIMIT = 10**9  # NLE reports its own time limit as a death; turns are limited outside
_ESCAPE, _IN_QUESTION = 27, 1  # a key; the place in NLE's "internal" that says that a single key is awaited as an answer
_BLSTATS = {"x": 0, "y": 1, "hp": 10, "max_hp": 11, "time": 20}


class Ending(enum.IntEnum):
    """The verdict after a step: NLE's ``end_status``, and FAILURE for a level that ended as done with a reward below 0 (Memento)."""

    ABORTED = -1
    RUNNING = 0
    DEATH = 1
    SUCCESS = 2
    FAILURE = 3


@dataclasses.dataclass(frozen=True)
class Screen:
    """What the player sees. The arrays belong to the game and change at the next step, except after the last one. Rows are y, columns x."""

    glyphs: Int[np.ndarray, "21 79"]
    chars: UInt8[np.ndarray, "21 79"]
    descriptions: UInt8[np.ndarray, "21 79 80"]
    message: str
    inventory: tuple[str, ...]
    x: int
    y: int
    hp: int
    max_hp: int
    time: int  # game turns that have passed
    asking: bool = False  # the game waits for the answer to the question in ``message``


def load_minihack() -> Any:
    """The ``minihack`` package. Raises ``EnvUnavailable`` with the install line when it or NLE is missing."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", "pkg_resources is deprecated", UserWarning
            )  # minihack's own; the pin on setuptools answers it
            return importlib.import_module("minihack")
    except ModuleNotFoundError as missing:
        hint = " (it needs 'setuptools<81')" if missing.name == "pkg_resources" else ""
        raise EnvUnavailable(f"MiniHack is not installed{hint}: pip install 'crl-jax[minihack]'") from missing


class Game:
    """A running NetHack. ``environment`` is a MiniHack environment class; ``options`` are its keyword arguments."""

    def __init__(self, environment: type[Any], **options: Any):
        build = _compiling_once(environment)
        self._env = build(observation_keys=_KEYS, max_episode_steps=_NO_LIMIT, penalty_step=0.0, fix_moon_phase=True, **options)
        self._index = {key: self._env._observation_keys.index(key) for key in (*_KEYS, "program_state", "internal")}
        self._last: tuple[np.ndarray, ...] | None = None
        self._press = self._env.nethack.step
        self._env.nethack.step = self._press_and_watch
        self._env._quit_game = lambda observation, done: self._keep(
            observation
        )  # the next reset ends the old game: no need to leave it politely
        self.commands = tuple(self._env.actions)

    def reset(self, seed: int) -> Screen:
        """Start the game that ``seed`` names."""
        self._last = None
        self._env.seed(core=seed, disp=seed, reseed=False, lgen=seed)
        self._env.reset()
        return self.screen()

    def step(self, command: int) -> tuple[Screen, Ending]:
        """Send the command with this index in ``commands``."""
        _, reward, *_, info = self._env.step(command)
        ending = Ending(int(info["end_status"]))
        if ending == Ending.SUCCESS and reward < 0:
            ending = Ending.FAILURE
        if ending != Ending.RUNNING and self._last is None:
            self._last = self._env._previous_obs  # it died without a death screen: show the one before (a copy that MiniHack made)
        return self.screen(), ending

    def decline(self) -> Screen:
        """Leave the question that the game asks, as a player does with Escape; the screen still shows the question."""
        question = self.screen().message
        self._env.last_observation, _ = self._env.nethack.step(_ESCAPE)
        return dataclasses.replace(self.screen(), message=question)

    def screen(self) -> Screen:
        """The present screen, or the last one of a finished game."""
        arrays = self._env.last_observation if self._last is None else self._last
        at = {key: arrays[i] for key, i in self._index.items()}
        inventory = tuple(
            f"{chr(letter)}: {_text(line)}" for letter, line in zip(at["inv_letters"], at["inv_strs"], strict=True) if letter and line[0]
        )
        stats = {name: int(at["blstats"][i]) for name, i in _BLSTATS.items()}
        asking = self._last is None and bool(at["internal"][_IN_QUESTION])
        return Screen(at["glyphs"], at["chars"], at["screen_descriptions"], _text(at["message"]), inventory, **stats, asking=asking)

    def close(self) -> None:
        """End the game and remove its temporary files."""
        self._env.close()

    def _press_and_watch(self, key: int) -> tuple[tuple[np.ndarray, ...], bool]:
        """One raw key press. Keeps the first screen of a game that is over, which the presses that leave the game would blank."""
        observation, done = self._press(key)
        if observation[self._index["program_state"]][0] and observation[self._index["blstats"]].any():
            self._keep(observation)
        return observation, done

    def _keep(self, observation: tuple[np.ndarray, ...]) -> None:
        if self._last is None:
            self._last = tuple(array.copy() for array in observation)


@functools.cache
def _compiling_once(environment: type[Any]) -> type[Any]:
    """A subclass that runs the level compiler once per level description in this process, and copies its result after that."""
    compiled: dict[str, bytes] = {}  # about 120 KiB a level

    def patch_nhdat(self: Any, des_file: str) -> None:
        data = Path(self.nethack._vardir, "nhdat")
        if des_file in compiled:
            data.unlink()  # a link to the file of the installed package, which must not be written to
            data.write_bytes(compiled[des_file])
        else:
            environment._patch_nhdat(self, des_file)
            compiled[des_file] = data.read_bytes()

    return type(environment.__name__, (environment,), {"_patch_nhdat": patch_nhdat})


def _text(line: UInt8[np.ndarray, " n"]) -> str:
    return line.tobytes().split(b"\0", 1)[0].decode("latin-1")
