"""The family ``gymnax``: seven small games written in JAX, told in words and played in batches on the device.

Owns: the names, and the options:
    style      "compact" (a few words) or "full" (the same words in a sentence, with the actions)
    grammar    "bare" or "tagged"
    max_turns  turns before truncation; left out, the game's own number
``batched`` tells the pool that ``make_batch`` plays many episodes at once, in the process that holds the device: worker processes never
import jax.
Does not: know the games (``games``) or play them (``batch``, ``texts``).
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from envs.api import EnvSpec
from envs.gymnax.games import GAMES, check_installed
from envs.gymnax.texts import GymnaxText, TextBatch
from envs.options import choose
from envs.parse import Grammar
from envs.prompts import system_prompt

batched = True


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of one environment; every field may be given to ``make`` and ``spec``."""

    style: Literal["full", "compact"] = "full"
    grammar: Grammar = "tagged"
    max_turns: int = 0


def names() -> tuple[str, ...]:
    """The names of the games."""
    return tuple(GAMES)


def spec(name: str, **options: Any) -> EnvSpec:
    """Describe a game. Raises TypeError for an unknown option, ValueError for a value it cannot have."""
    chosen, game = choose(Options, options), GAMES[name]
    turns = chosen.max_turns or game.turns
    return EnvSpec(
        name=f"gymnax/{name}",
        family="gymnax",
        goal=game.goal,
        namespace=f"gymnax/{name}",
        actions=game.actions,
        max_turns=turns,
        system_prompt=system_prompt("gymnax", name, chosen.grammar, game.actions, turns),  # the rules are the same in both styles
    )


def prepare() -> None:
    """Look whether gymnax is there. Raises ``EnvUnavailable``. Imports nothing: a worker process must not hold jax."""
    check_installed()


def make(name: str, **options: Any) -> GymnaxText:
    """One game, a batch of one slot; imports jax. Raises ``EnvUnavailable`` without gymnax, TypeError and ValueError as ``spec``."""
    return GymnaxText(make_batch(name, 1, **options))


def make_batch(name: str, slots: int, **options: Any) -> TextBatch:
    """``slots`` games that are played together; imports jax. Raises as ``make``."""
    chosen = choose(Options, options)
    check_installed()
    return TextBatch(name, slots, style=chosen.style, grammar=chosen.grammar, max_turns=chosen.max_turns or GAMES[name].turns)
