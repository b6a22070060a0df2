"""When namespaces are merged, and which entries are redundant.

Owns: the running merges, those that are due, the measure of redundancy. Promises: one merge of a namespace at a time; a periodic merge that
falls due while another runs comes after it, and is counted as deferred, never dropped; ``in_turn`` one namespace after the other, in the
order of their names. Does not: merge (``editor``).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from crl_jax.experience.index import Index, has_direction
from crl_jax.scopes import long_scope

Spawn = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]


@dataclasses.dataclass(frozen=True)
class MergePolicy:
    """``every_steps`` 0 switches periodic merging off, ``redundancy`` 0 the adaptive one: merge when more than this share of (at most
    ``sample``) entries has a neighbour of cosine ``cosine`` or more. ``chunk`` entries are merged by one generation."""

    every_steps: int = 5
    chunk: int = 5
    redundancy: float = 0.0
    cosine: float = 0.85
    sample: int = 256


class Redundancy(NamedTuple):
    """The share of the entries looked at that have a near neighbour, and groups of entries that are near each other."""

    share: float
    clusters: tuple[tuple[str, ...], ...]


def redundancy(index: Index, vectors: Mapping[str, np.ndarray], *, namespace: str, cosine: float, largest: int) -> Redundancy:
    """Group the entries of ``vectors`` (id -> embedding [d]) with their neighbours in the namespace, at most ``largest`` to a group and
    each entry in one group only, the first entries first."""
    usable = [i for i, vector in vectors.items() if has_direction(vector)]
    if len(usable) < 2:
        return Redundancy(0.0, ())
    found = index.search(np.stack([vectors[i] for i in usable]), max(2, largest), namespace=namespace)
    near = {i: [hit.id for hit in hits if hit.id != i and hit.similarity >= cosine] for i, hits in zip(usable, found, strict=True)}
    taken: set[str] = set()
    clusters: list[tuple[str, ...]] = []
    for i, neighbours in near.items():
        free = [n for n in neighbours if n not in taken]
        if i not in taken and free:
            clusters.append((i, *free)[:largest])
            taken.update(clusters[-1])
    return Redundancy(sum(bool(n) for n in near.values()) / len(usable), tuple(clusters))


class Merging:
    """Mutable, on one event loop. ``merge`` runs a whole pass over a namespace, ``merge_redundant`` one over its clusters if it has
    enough of them."""

    def __init__(
        self,
        policy: MergePolicy,
        *,
        spawn: Spawn,
        counts: Counter[str],
        namespaces: Callable[[], Iterable[str]],
        merge: Callable[[str], Awaitable[int]],
        merge_redundant: Callable[[str], Awaitable[int]],
        in_turn: bool = False,
    ) -> None:
        self._turn = asyncio.Lock() if in_turn else contextlib.nullcontext()
        self._policy = policy
        self._spawn = spawn
        self._counts = counts
        self._namespaces = namespaces
        self._passes = {True: merge, False: merge_redundant}
        self._running: dict[str, asyncio.Task[None]] = {}
        self._due: set[str] = set()

    def __len__(self) -> int:
        return len(self._running)

    def on_step(self, step: int) -> None:
        """Begin the merges of this training step in the background."""
        p = self._policy
        whole = bool(p.every_steps) and step > 0 and step % p.every_steps == 0
        if whole or p.redundancy > 0:
            for namespace in sorted(self._namespaces()):
                self._begin(namespace, whole)

    def tasks(self) -> Sequence[asyncio.Task[None]]:
        """The merges that run now."""
        return list(self._running.values())

    async def settled(self, timeout_s: float) -> None:
        """Wait for the merges that run now. Raises TimeoutError."""
        if running := self.tasks():
            _, late = await asyncio.wait(running, timeout=timeout_s)
            if late:
                raise TimeoutError(f"{len(late)} merges took longer than {timeout_s:g} s: raise run.collect_timeout_s or bank.merge_every")

    def _begin(self, namespace: str, whole: bool) -> None:
        if namespace not in self._running:
            self._running[namespace] = self._spawn(self._run(namespace, whole))
        elif whole:
            self._due.add(namespace)
            self._counts["merges_deferred"] += 1

    async def _run(self, namespace: str, whole: bool) -> None:
        try:
            async with self._turn:
                with long_scope("merge"):
                    await self._passes[whole](namespace)
        finally:
            del self._running[namespace]
        if namespace in self._due:
            self._due.discard(namespace)
            self._begin(namespace, whole=True)
