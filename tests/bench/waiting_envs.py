"""Environments that take their time, and ``crl train`` on them.

Usage:  CRL_BENCH_WAIT_S=0.233 python tests/bench/waiting_envs.py CONFIG [key=value ...]

Every reset and step of an environment takes as long as before and a wait on top, in which nothing is computed: what a web page, a test run
or a physics step on another machine costs. Waits are log-normal with the mean of the variable and a standard deviation as large, cut at
``LONGEST`` means. Nobody waits in an evaluation, which is not what is measured.

Owns: the waits. Promises: they follow from the episode's seed, how many episodes of that seed the worker has begun, and the turn, so two
runs that play the same episodes wait the same; while one environment waits others go on; 0 is an ordinary ``crl train``. Does not: change
what an environment says, or know evaluations from training where both are played at once.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import pathlib
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from envs import registry
from envs.api import Observation, Step, TextEnv

VARIABLE = "CRL_BENCH_WAIT_S"
SPREAD = math.sqrt(math.log(2))  # of the logarithm, so that the standard deviation equals the mean
LONGEST = 10.0  # means


def wait_s(mean_s: float, seed: int, number: int, turn: int) -> float:
    """Seconds to wait at ``turn`` of the ``number``-th episode of ``seed``."""
    draw = random.Random(f"{seed}/{number}/{turn}").gauss(-SPREAD * SPREAD / 2, SPREAD)
    return mean_s * min(math.exp(draw), LONGEST)


class Waiting:
    """A ``TextEnv`` around another. Calls of several from several threads enter the games one at a time and wait side by side."""

    slow = True  # the worker gives each a thread
    _one_at_a_time = threading.Lock()
    _episodes: ClassVar[Counter[int]] = Counter()  # begun so far, by seed

    def __init__(self, env: TextEnv, mean_s: float, sleep: Callable[[float], None] = time.sleep):
        self._env, self._mean_s, self._sleep = env, mean_s, sleep
        self._seed = self._number = self._turn = 0

    def reset(self, seed: int, task: str = "") -> Observation:
        """As ``TextEnv.reset``, later."""
        with self._one_at_a_time:
            seen = self._env.reset(seed, task)
            self._seed, self._number, self._turn = seed, self._episodes[seed], 0
            self._episodes[seed] += 1
        self._wait()
        return seen

    def step(self, text: str) -> Step:
        """As ``TextEnv.step``, later."""
        with self._one_at_a_time:
            done = self._env.step(text)
        self._turn += 1
        self._wait()
        return done

    def close(self) -> None:
        """As ``TextEnv.close``."""
        with self._one_at_a_time:
            self._env.close()

    def _wait(self) -> None:
        if self._mean_s:
            self._sleep(wait_s(self._mean_s, self._seed, self._number, self._turn))


def make(name: str, *, wait: bool = True, **options: Any) -> TextEnv:
    """An environment of the registry that waits as the variable says, or not at all."""
    return Waiting(registry.make(name, **options), float(os.environ[VARIABLE]) if wait else 0.0)


prepare = registry.prepare


def main(arguments: list[str]) -> int:
    """``crl train`` with these environments."""
    from crl_jax import cli
    from crl_jax.rollout import pools
    from crl_jax.rollout.collector import Collector

    if float(os.environ.get(VARIABLE, "0")) > 0:
        pools.EnvPool = functools.partial(pools.EnvPool, make="waiting_envs:make")
        Collector.evaluate = without_waits(Collector.evaluate)
    return cli.main(["train", *arguments])


def without_waits(evaluate: Callable[..., Any]) -> Callable[..., Any]:
    """``Collector.evaluate`` in environments that do not wait."""

    async def quick(self: Any, *args: Any, **kwargs: Any) -> Any:
        settings = self.settings
        envs = {name: dataclasses.replace(env, options={**env.options, "wait": False}) for name, env in settings.envs.items()}
        self.settings = dataclasses.replace(settings, envs=envs)
        try:
            return await evaluate(self, *args, **kwargs)
        finally:
            self.settings = settings

    return quick


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
