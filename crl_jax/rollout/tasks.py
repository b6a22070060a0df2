"""The stream of tasks a run trains on: a seeded shuffle per epoch with a position that is saved and restored.

Promises: (seed, position) fixes every later task; epochs are shuffled differently; the stored position is always a valid next position.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from crl_jax.records import Task
from crl_jax.seeds import derive_seed


@dataclasses.dataclass(frozen=True)
class Goal:
    """One environment of the training set: its registry name, goal text and bank namespace."""

    env: str
    goal: str
    namespace: str


@dataclasses.dataclass(frozen=True)
class TaskStream:
    """Task number ``position`` is goal ``order(epoch)[position % len(goals)]`` with an environment seed of its own."""

    goals: tuple[Goal, ...]
    seed: int
    name: str = "train"

    def task(self, position: int) -> Task:
        """The task at ``position`` >= 0. All K episodes of a group share it."""
        epoch, cursor = divmod(position, len(self.goals))
        order = np.random.default_rng(derive_seed(self.seed, self.name, "epoch", epoch)).permutation(len(self.goals))
        goal = self.goals[order[cursor]]
        return Task(env=goal.env, seed=derive_seed(self.seed, self.name, "env", position), goal=goal.goal, namespace=goal.namespace)

    def tasks(self, start: int, count: int) -> list[Task]:
        """Tasks ``start .. start + count - 1``."""
        return [self.task(position) for position in range(start, start + count)]


def fixed_tasks(goals: Sequence[Goal], count: int, seed: int, name: str) -> list[Task]:
    """An evaluation set: the goals in turn, ``count`` tasks, each with a seed that never changes between evaluations."""
    return [Task(g.env, derive_seed(seed, name, i), g.goal, g.namespace) for i, g in ((i, goals[i % len(goals)]) for i in range(count))]
