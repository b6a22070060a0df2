"""The reading side of the bank: which experiences a query is shown.

Owns: reservations of entries handed out, the dropout draws of a step. Promises: training picks are made in the order of the queries and
every one is reserved until its episode is released; evaluation (``peek``) reads the most similar entries and changes nothing. Does not:
search (``search``), rank (``retrieve``), or count usage (``writer``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import numpy as np

from crl_jax.experience.bank import BankState
from crl_jax.experience.retrieve import Candidate, Diversity, Reservations, nearest, rerank
from crl_jax.experience.search import SearchService
from crl_jax.records import Episode, Usage
from crl_jax.seeds import derive_seed


class Shown(NamedTuple):
    """One experience for a prompt, with its cosine similarity to the query."""

    id: str
    text: str
    similarity: float


class Reader:
    """Mutable, on the event loop of its ``search``. ``state`` and ``step`` are functions because both move on between two queries."""

    def __init__(
        self, *, search: SearchService, state: Callable[[], BankState], step: Callable[[], int], diversity: Diversity, seed: int
    ) -> None:
        self._search = search
        self._state = state
        self._step = step
        self._diversity = diversity
        self._seed = seed
        self._reserved = Reservations()
        self._picks = 0  # in this step: names the dropout draw

    async def retrieve(self, namespace: str, text: str, *, peek: bool) -> list[Shown]:
        """The experiences for a query, best first, re-ranked (paper Eq. 6). They are reserved, unless ``peek``: the same ranking with the
        counters as they stand, nothing drawn and nothing changed."""
        pick = functools.partial(self._pick, namespace, peek)
        wanted = self._diversity.k * self._diversity.oversample
        return cast(list[Shown], await self._search.query(namespace, text, wanted, pick))

    async def nearest(self, namespace: str, text: str) -> Shown | None:
        """The most similar entry, which is not reserved; None if the namespace has none."""
        spare = 1 + self._diversity.oversample  # entries being replaced at this moment are found, but are not in the state
        found = cast(list[Shown], await self._search.query(namespace, text, spare, functools.partial(self._nearest, namespace)))
        return found[0] if found else None

    def release(self, episodes: Sequence[Episode]) -> None:
        """Give back what finished episodes had reserved."""
        for episode in episodes:
            for experience_id in episode.shown:
                self._reserved.release(experience_id)

    def begin_step(self, step: int) -> None:
        """Training step ``step`` begins: dropout draws start anew, reservations of lost episodes are dropped."""
        self._picks = 0
        self._reserved.forget_before(step)

    def clear(self) -> None:
        """Forget every reservation."""
        self._reserved.clear()

    def _nearest(self, namespace: str, candidates: list[Candidate]) -> list[Shown]:
        space = self._state().space(namespace)
        live = [c for c in candidates if c.id in space]
        return self._texts(namespace, nearest(live, k=1, min_similarity=self._diversity.min_similarity))

    def _pick(self, namespace: str, peek: bool, candidates: list[Candidate]) -> list[Shown]:
        d = self._diversity
        state, step = self._state(), self._step()
        live = [c for c in candidates if c.id in state.space(namespace)]
        usage = {c.id: state.usage.get(c.id, Usage()) for c in live}
        self._picks += not peek
        dropout_p = 0.0 if peek else d.dropout_p
        picked = rerank(
            live,
            {c.id: usage[c.id].shown + (0 if peek else self._reserved.count(c.id)) for c in live},
            {c.id: usage[c.id].last_shown_step for c in live},
            step=step,
            lambda_count=d.lambda_count,
            recent_steps=d.recent_steps,
            k=d.k,
            min_similarity=d.min_similarity,
            dropout_p=dropout_p,
            rng=np.random.default_rng(derive_seed(self._seed, step, self._picks)) if dropout_p > 0 else None,
        )
        for candidate in () if peek else picked:
            self._reserved.take(candidate.id, step=step)
        return self._texts(namespace, picked)

    def _texts(self, namespace: str, candidates: Sequence[Candidate]) -> list[Shown]:
        space = self._state().space(namespace)
        return [Shown(c.id, space[c.id].text, c.similarity) for c in candidates if c.id in space]
