"""The reading side of the bank: which experiences a query is shown.

Owns: which namespaces a query reads (``Routing``), reservations of entries handed out, the draws of a step. Promises: training picks are
made in the order of the queries and every one is reserved until its episode is released; evaluation (``peek``) ranks the same way, draws
nothing and changes nothing. Does not: search (``search``), rank (``retrieve``), or count usage (``writer``).
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, cast

import numpy as np

from crl_jax.experience.bank import BankState, utility
from crl_jax.experience.retrieve import Candidate, Diversity, Reservations, Score, Standing, nearest, rerank, score
from crl_jax.experience.search import SearchService
from crl_jax.experience.transfer import harmful
from crl_jax.records import Episode, Experience
from crl_jax.seeds import derive_seed

SHARED = "shared"  # the namespace of everybody


class Routing(enum.Enum):
    """Where experience of a task is written, and what its queries read: its own family; one namespace for all; or its own written, all
    read."""

    TASK = "task"
    SHARED = "shared"
    MIXED = "mixed"

    def home(self, namespace: str) -> str:
        """The namespace in which what a task of ``namespace`` teaches is written."""
        return SHARED if self is Routing.SHARED else namespace


class Shown(NamedTuple):
    """One experience for a prompt, with its cosine similarity to the query."""

    id: str
    text: str
    similarity: float


class Ranked(NamedTuple):
    """A candidate of a query with what its place is made of. ``score`` is None for one below a floor, which is never shown."""

    shown: Shown
    standing: Standing
    score: Score | None


class Reader:
    """Mutable, on the event loop of its ``search``. ``state``, ``step`` and ``decay`` are functions because all move on between two
    queries."""

    def __init__(
        self,
        *,
        search: SearchService,
        state: Callable[[], BankState],
        step: Callable[[], int],
        diversity: Diversity,
        seed: int,
        routing: Routing = Routing.TASK,
        decay: Callable[[], float] = lambda: 1.0,
    ) -> None:
        self._search = search
        self._state = state
        self._step = step
        self._decay = decay
        self._diversity = diversity
        self._still = dataclasses.replace(diversity, dropout_p=0.0, explore_p=0.0)
        self._seed = seed
        self._routing = routing
        self._reserved = Reservations()
        self._picks = 0  # in this step: names the draws
        self.demoted = 0  # candidates of other families that were put back, for metrics

    async def retrieve(self, namespace: str, text: str, *, peek: bool) -> list[Shown]:
        """The experiences for a query, best first, re-ranked (paper Eq. 6). They are reserved, unless ``peek``: the same ranking with the
        counters as they stand, nothing drawn and nothing changed."""
        pick = functools.partial(self._pick, namespace, peek)
        wanted = self._diversity.k * self._diversity.oversample
        return cast(list[Shown], await self._search.query(self._sources(namespace), text, wanted, pick))

    async def nearest(self, namespace: str, text: str) -> Shown | None:
        """The most similar entry, which is not reserved; None if there is none."""
        spare = 1 + self._diversity.oversample  # entries being replaced at this moment are found, but are not in the state
        found = cast(
            list[Shown], await self._search.query(self._sources(namespace), text, spare, functools.partial(self._nearest, namespace))
        )
        return found[0] if found else None

    async def explain(self, namespace: str, text: str) -> list[Ranked]:
        """All candidates of a query as evaluation ranks them, best first, those below a floor last. Nothing is drawn or changed."""
        pick = functools.partial(self._explain, namespace)
        wanted = self._diversity.k * self._diversity.oversample
        return cast(list[Ranked], await self._search.query(self._sources(namespace), text, wanted, pick))

    def _sources(self, namespace: str) -> tuple[str, ...]:
        home = self._routing.home(namespace)
        if self._routing is not Routing.MIXED:
            return (home,)
        return (home, *sorted(name for name in self._state().spaces if name != home))

    def release(self, episodes: Sequence[Episode]) -> None:
        """Give back what finished episodes had reserved."""
        for episode in episodes:
            for experience_id in episode.handed:
                self._reserved.release(experience_id)

    @property
    def unfinished(self) -> list[str]:
        """Entries handed to episodes that are not released."""
        return self._reserved.unfinished

    def begin_step(self, step: int) -> None:
        """Training step ``step`` begins: dropout draws start anew, reservations of lost episodes are dropped."""
        self._picks = 0
        self._reserved.forget_before(step)

    def clear(self) -> None:
        """Forget every reservation and draw: what comes next is what came after the checkpoint the bank went back to."""
        self._picks = 0
        self._reserved.clear()

    def _nearest(self, namespace: str, candidates: list[Candidate]) -> list[Shown]:
        entries = self._entries(namespace, candidates)
        live = [c for c in candidates if c.id in entries]
        return _shown(nearest(live, k=1, min_similarity=self._diversity.min_similarity), entries)

    def _pick(self, namespace: str, peek: bool, candidates: list[Candidate]) -> list[Shown]:
        how = self._still if peek else self._diversity
        step = self._step()
        self._picks += not peek
        chance = how.dropout_p > 0 or how.explore_p > 0
        rng = np.random.default_rng(derive_seed(self._seed, step, self._picks)) if chance else None
        entries = self._entries(namespace, candidates)
        live = [c for c in candidates if c.id in entries]
        picked = rerank(live, self._standings(namespace, entries, peek), step=step, how=how, rng=rng)
        for candidate in () if peek else picked:
            self._reserved.take(candidate.id, step=step)
        return _shown(picked, entries)

    def _explain(self, namespace: str, candidates: list[Candidate]) -> list[Ranked]:
        entries = self._entries(namespace, candidates)
        if not entries:
            return []
        found = sorted((c for c in candidates if c.id in entries), key=lambda c: -c.similarity)
        standings, step = self._standings(namespace, entries, peek=True), self._step()
        order = rerank(found, standings, step=step, how=dataclasses.replace(self._still, k=len(found)))
        kept = [c for c in found if c in order]  # in the order of similarity
        texts = {shown.id: shown for shown in _shown(found, entries)}
        ranked = [Ranked(texts[c.id], standings[c.id], score(kept.index(c), standings[c.id], step=step, how=self._still)) for c in order]
        return ranked + [Ranked(texts[c.id], standings[c.id], None) for c in found if c not in kept]

    def _entries(self, namespace: str, candidates: Sequence[Candidate]) -> dict[str, Experience]:
        """The candidates that are still in the bank."""
        state = self._state()
        find = state.find if self._routing is Routing.MIXED else state.space(self._routing.home(namespace)).get
        return {c.id: entry for c in candidates if (entry := find(c.id)) is not None}

    def _standings(self, reader: str, entries: Mapping[str, Experience], peek: bool) -> dict[str, Standing]:
        state, step, decay = self._state(), self._step(), self._decay()
        penalty = self._penalties(reader, entries, state)
        standings: dict[str, Standing] = {}
        for i, entry in entries.items():
            put_back = penalty.get(entry.namespace, 0.0) if penalty else 0.0
            self.demoted += put_back > 0 and not peek
            reserved = 0 if peek else self._reserved.count(i)
            usage = state.usage.get(i)
            if usage is None:
                standings[i] = Standing(reserved, outcome=entry.outcome, penalty=put_back)
            else:
                worth = utility(usage, decay=decay, age=max(0, step - usage.last_shown_step) if usage.shown else 0)
                standings[i] = Standing(usage.shown + reserved, usage.last_shown_step, worth, entry.outcome, put_back)
        return standings

    def _penalties(self, reader: str, entries: Mapping[str, Experience], state: BankState) -> dict[str, float]:
        """Ranks by which the entries of other families go back, by family."""
        if self._routing is not Routing.MIXED:
            return {}
        foreign = {entry.namespace for entry in entries.values()} - {self._routing.home(reader)}
        least, ranks = self._diversity.foreign_min_episodes, self._diversity.foreign_penalty
        return {name: ranks * harmful(state, reader, name, min_episodes=least) for name in foreign}


def _shown(candidates: Sequence[Candidate], entries: Mapping[str, Experience]) -> list[Shown]:
    return [Shown(c.id, entries[c.id].text, c.similarity) for c in candidates]
