"""The bank as a rollout sees it: lessons for a list of tasks, answers to questions.

Owns: nothing; it turns the manager's service into the collector's ``Bank`` protocol. Does not: decide what is shown.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from crl_jax.experience.editor import Answer as Given
from crl_jax.experience.reader import Shown
from crl_jax.records import Task
from crl_jax.rollout.agent import Answer


class Manager(Protocol):
    """The part of ``ExperienceManager`` that rollouts use; a client of another process's has it too."""

    async def retrieve(self, namespace: str, text: str, *, peek: bool = False) -> list[Shown]:
        """Experiences for a query, best first."""
        ...

    async def ask(self, namespace: str, query: str, *, episode_id: str, number: int = 0) -> Given | None:
        """The extractor's answer to a question."""
        ...


class ManagedBank:
    """The collector's view of an ``ExperienceManager``."""

    def __init__(self, manager: Manager):
        self._manager = manager

    async def retrieve(self, queries: Sequence[tuple[str, str]], *, peek: bool = False) -> list[list[tuple[str, str]]]:
        """(experience id, text) pairs for each (namespace, query), asked for together so that they share a search."""
        found = await asyncio.gather(*(self._manager.retrieve(namespace, text, peek=peek) for namespace, text in queries))
        return [[(shown.id, shown.text) for shown in lessons] for lessons in found]

    async def ask(self, task: Task, query: str, episode_id: str, number: int) -> Answer | None:
        """The extractor's answer, or None when the bank holds nothing for the question."""
        answer = await self._manager.ask(task.namespace, query, episode_id=episode_id, number=number)
        return None if answer is None else Answer(answer.text, answer.generation_id or "")
