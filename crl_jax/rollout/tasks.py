"""The stream of tasks a run trains on: a seeded shuffle per epoch, or draws by weight, with a position that is saved and restored.

Promises: (seed, position) fixes every later task; epochs are shuffled differently; the stored position is always a valid next position;
every ``n`` consecutive tasks of a mixture of ``n`` parts hold one of each.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from crl_jax.records import Task
from crl_jax.seeds import derive_seed


@dataclasses.dataclass(frozen=True)
class Goal:
    """One task of the training set: its environment's registry name, goal text, bank namespace, its id within the environment, and how
    often it is trained on, relative to the others."""

    env: str
    goal: str
    namespace: str
    id: str = ""
    weight: float = 1.0

    def task(self, seed: int) -> Task:
        """The task with an environment seed."""
        return Task(env=self.env, seed=seed, goal=self.goal, namespace=self.namespace, id=self.id)


@dataclasses.dataclass(frozen=True)
class TaskStream:
    """Task number ``position`` is goal ``order(epoch)[position % len(goals)]`` with an environment seed of its own. Where goals differ in
    weight, it is drawn in proportion to it instead."""

    goals: tuple[Goal, ...]
    seed: int
    name: str = "train"

    def task(self, position: int) -> Task:
        """The task at ``position`` >= 0. All K episodes of a group share it."""
        return self.goals[self._number(position)].task(derive_seed(self.seed, self.name, "env", position))

    def tasks(self, start: int, count: int) -> list[Task]:
        """Tasks ``start .. start + count - 1``."""
        return [self.task(position) for position in range(start, start + count)]

    def _number(self, position: int) -> int:
        """Of the goal."""
        if len({goal.weight for goal in self.goals}) > 1:
            sums = np.cumsum([goal.weight for goal in self.goals])
            drawn = np.random.default_rng(derive_seed(self.seed, self.name, "draw", position)).random() * sums[-1]
            return int(min(np.searchsorted(sums, drawn, side="right"), len(self.goals) - 1))
        epoch, cursor = divmod(position, len(self.goals))
        order = np.random.default_rng(derive_seed(self.seed, self.name, "epoch", epoch)).permutation(len(self.goals))
        return int(order[cursor])


@dataclasses.dataclass(frozen=True)
class Mixture:
    """Several streams in turn: task number ``position`` is task ``position // n`` of stream ``position % n``."""

    streams: tuple[TaskStream, ...]

    @property
    def goals(self) -> tuple[Goal, ...]:
        """The goals of all streams."""
        return tuple(goal for stream in self.streams for goal in stream.goals)

    def tasks(self, start: int, count: int) -> list[Task]:
        """Tasks ``start .. start + count - 1``."""
        turns = (divmod(position, len(self.streams)) for position in range(start, start + count))
        return [self.streams[which].task(cursor) for cursor, which in turns]


def fixed_tasks(goals: Sequence[Goal], count: int, seed: int, name: str) -> list[Task]:
    """An evaluation set: the goals in turn, ``count`` tasks, each with a seed that never changes between evaluations."""
    return [goals[i % len(goals)].task(derive_seed(seed, name, i)) for i in range(count)]
