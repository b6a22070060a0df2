"""The expert: it tries in a copy of the game what it then does in the real one.

Owns: ``plan``: the actions that win an episode, found by playing a copy of it (same task, seed and turns) with a player that knows the
level (``oracle``, ``policies``), again and again with other draws until a try wins.
Promises: a plan wins: an episode follows from the seed and the actions alone. None is returned where no try (of ``TRIES``)
wins, as for a level that cannot be won (a staircase behind trees).
Does not: read the text.
"""

from __future__ import annotations

import functools
import random

from envs.minihack import oracle, policies, tasks
from envs.minihack.env import MiniHackText

TRIES, TRIES_HIDING = 30, 200  # hiding from a strong monster is a matter of luck, and a try is short
_WHIMS = (0.0, 0.0, 0.1, 0.2, 0.35)  # how often a try does something else than its best guess, try by try


@functools.lru_cache(maxsize=512)
def plan(name: str, seed: int, max_turns: int) -> tuple[str, ...] | None:
    """The actions that win the episode of ``seed`` within ``max_turns``, or None. Raises ``EnvUnavailable``."""
    known = oracle.levels(name, seed)
    copy = tasks.make(name, style="full", grammar="bare", max_turns=max_turns)
    best: tuple[str, ...] | None = None
    try:
        for number in range(TRIES_HIDING if name.startswith("hidenseek") else TRIES):
            knew = len(known.things)
            found = _try(copy, name, seed, known, number)
            if found is not None and (best is None or len(found) < len(best)):
                best = found
            if best is not None and len(known.things) == knew:  # a try that first had to find a thing is worth another
                break
        return best
    finally:
        copy.close()


def _try(copy: MiniHackText, name: str, seed: int, known: oracle.Level, number: int) -> tuple[str, ...] | None:
    draw = random.Random(f"{name} {seed} {number}")
    first = copy.reset(seed)
    whim, act = _WHIMS[number % len(_WHIMS)], policies.choose(name, known, draw, number)
    done: list[str] = []
    now = first.actions
    while True:
        action = act(copy)
        if not action:
            return None
        if action not in now or (draw.random() < whim and "north" in now):
            action = now[int(draw.random() * min(8, len(now)))]
        done.append(action)
        step = copy.step(action)
        now = step.actions
        if step.done:
            return tuple(done) if step.success else None
