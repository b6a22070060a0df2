"""A small environment that fails on demand, for the tests of the pool. Its worker process imports this module."""

import os
import sys
import time

from envs.api import EnvUnavailable, Observation, Step


class FaultyEnv:
    """Echoes what it was told since the reset; some words make it fail."""

    def __init__(self, tag="", boxed=None):
        self.tag, self.boxed, self.seed, self.told = tag, boxed or [], None, []

    def reset(self, seed, task=""):
        self.seed, self.told = seed, []
        return Observation(f"{self.tag}{self.boxed}:{seed}", ("say",))

    def step(self, text):
        match text.split():
            case ["index"]:
                return [][1]
            case ["hang", seconds]:
                time.sleep(float(seconds))
            case ["crash"]:
                os._exit(3)
            case ["jax"]:
                text = str("jax" in sys.modules)
            case ["pid"]:
                text = str(os.getpid())
        self.told.append(text)
        return Step(f"{self.seed}:{','.join(self.told)}", 0.0, False, False, False, True, {})

    def close(self):
        pass


class Unclosable(FaultyEnv):
    def close(self):
        raise OSError("still in use")


def make(name, **options):
    """``unavailable`` and ``broken`` cannot be made; any other name can. ``unclosable`` cannot be closed."""
    if name == "unavailable":
        raise EnvUnavailable("faulty: pip install nothing")
    if name == "broken":
        raise ValueError("no such level")
    return Unclosable(**options) if name == "unclosable" else FaultyEnv(**options)
