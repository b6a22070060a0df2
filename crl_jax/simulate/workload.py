"""What a simulated run is made of: how many of everything, and how long each thing takes.

Owns: ``Workload`` and its parts, ``load_workload``. Promises: values that cannot be simulated are refused with the fix; draws follow from
the seed and the name of what is drawn, never from the order in which things happen, so that a synchronous and an asynchronous run of one
workload play the same episodes. Does not: simulate.

All times are in seconds.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
import random
from collections.abc import Iterator, Sequence
from typing import Any

from crl_jax.config.load import load_as
from crl_jax.config.parse import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spread:
    """A log-normal distribution by its mean and its coefficient of variation; ``cv`` 0 is the constant ``mean``."""

    mean: float = 0.0
    cv: float = 0.0

    def draw(self, rng: random.Random) -> float:
        """One value. Takes one draw of ``rng`` whatever the parameters."""
        z = rng.gauss(0.0, 1.0)
        if not self.cv or not self.mean:
            return self.mean
        variance = math.log1p(self.cv * self.cv)
        return self.mean * math.exp(math.sqrt(variance) * z - variance / 2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Engine:
    """A sampler. A token of every active slot takes ``decode_s + decode_slot_s * active``; a turn's new input takes ``prefill_s``, during
    which no slot decodes; requests without a slot wait, first come, first served."""

    slots: int = 64
    prefill_s: float = 0.0
    decode_s: float = 0.0
    decode_slot_s: float = 0.0

    def token_s(self, active: int) -> float:
        """Seconds of one token in each of ``active`` slots."""
        return self.decode_s + self.decode_slot_s * active


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """A run. The defaults are of no particular machine: 64 environments, a learner as slow as the rollout, slow environments at times."""

    seed: int = 0
    steps: int = 8
    environments: int = 64  # episodes of one batch, which all play at once
    max_lag: int = 1
    sync: bool = False
    capacity: float = 0.0  # how many of sampler, learner and their extractor's counterparts compute at full speed at once; 0 = all of them

    turns: Spread = dataclasses.field(default_factory=lambda: Spread(mean=7.0, cv=0.5))  # of an episode, rounded, at least 1
    reply_tokens: Spread = dataclasses.field(default_factory=lambda: Spread(mean=12.0, cv=0.5))  # of a turn, rounded, at least 1
    env_s: Spread = dataclasses.field(default_factory=lambda: Spread(mean=0.05, cv=1.0))  # a reset or a step
    env_workers: int = 0  # how many environments can step at once; 0 = all
    actor: Engine = dataclasses.field(default_factory=lambda: Engine(slots=64, prefill_s=0.002, decode_s=0.01))

    learner_s: float = 0.2  # one update of the actor ...
    learner_episode_s: float = 0.02  # ... and more for each episode of its batch
    publish_s: float = 0.05

    guided: float = 0.5  # share of the episodes that read the bank
    written: float = 0.8  # share of the distillations that leave an entry
    bank_s: float = 0.0  # counting a batch's usage
    bank_entries: int = 256  # the newest so many can be read
    warmup_steps: int = 1
    lesson_tokens: Spread = dataclasses.field(default_factory=lambda: Spread(mean=40.0, cv=0.3))
    extractor: Engine = dataclasses.field(default_factory=lambda: Engine(slots=64, prefill_s=0.004, decode_s=0.01))
    concurrency: int = 64  # distillations at once
    merge_every: int = 0  # steps
    merge_s: float = 0.0
    extractor_batch: int = 32
    extractor_update_s: float = 0.5  # with its publish
    buffer_capacity: int = 512
    max_age_steps: int = 16

    eval_every: int = 0  # steps
    eval_episodes: int = 64
    save_every: int = 0  # steps
    save_s: float = 0.0  # the part the run waits for
    other_s: float = 0.0  # of each step

    def __post_init__(self) -> None:
        for name, value in _numbers(self):
            if value < 0:
                raise ConfigError(f"{name} is {value}: give 0 or more")
        small = [name for name in ("steps", "environments", "concurrency", "extractor_batch", "bank_entries") if getattr(self, name) < 1]
        small += [f"{name}.slots" for name in ("actor", "extractor") if getattr(self, name).slots < 1]
        if small:
            raise ConfigError(f"{', '.join(small)}: give 1 or more")
        if self.sync and self.max_lag:
            raise ConfigError("a synchronous run is on-policy: set max_lag=0, or sync=false")
        if self.extractor_batch > self.buffer_capacity:
            raise ConfigError(f"buffer_capacity {self.buffer_capacity} must hold extractor_batch {self.extractor_batch}")

    def at(self, environments: int, *, sync: bool | None = None) -> Workload:
        """The same with another number of environments, in turn or not."""
        in_turn = self.sync if sync is None else sync
        return dataclasses.replace(self, environments=environments, sync=in_turn, max_lag=0 if in_turn else max(1, self.max_lag))

    def rng(self, *name: object) -> random.Random:
        """The source of what is called ``name``."""
        return random.Random("/".join(map(str, (self.seed, *name))))

    @property
    def update_s(self) -> float:
        """One update of the actor."""
        return self.learner_s + self.learner_episode_s * self.environments


def _numbers(of: Any, within: str = "") -> Iterator[tuple[str, float]]:
    """Every number in a dataclass, with its name as in an override."""
    for field in dataclasses.fields(of):
        value, name = getattr(of, field.name), f"{within}{field.name}"
        if dataclasses.is_dataclass(value):
            yield from _numbers(value, f"{name}.")
        elif isinstance(value, int | float):
            yield name, value


def load_workload(path: pathlib.Path | None, overrides: Sequence[str] = (), *, start: Workload | None = None) -> Workload:
    """``start`` (None: the defaults) changed by YAML and ``key=value`` words, e.g. ``env_s.mean=0.2 actor.slots=128``. Raises
    ConfigError."""
    return load_as(Workload, path, overrides, start=start)
