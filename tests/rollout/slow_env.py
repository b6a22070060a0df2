"""Environments whose game is slow to load, for the tests of the pool."""

import time

from faulty_env import FaultyEnv

loaded = []


def prepare(*families):
    """Load the game: longer than the call deadline of the test that uses it."""
    time.sleep(1)
    loaded.append(True)


def make(name, **options):
    """An environment; loads the game if nobody has."""
    if not loaded:
        prepare()
    return FaultyEnv(**options)
