"""Which of the similar experiences to show: diversity re-ranking (paper Eq. 6).

Owns: the order of candidates given their similarity ranks and how often and how recently each was shown. Promises: pure functions; the
same input gives the same picks; recency is counted in training steps, never in seconds. Does not: search, count usage, or know what a
query is.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np


class Candidate(NamedTuple):
    """One search hit: entry id and cosine similarity in [-1, 1] (higher is more similar)."""

    id: str
    similarity: float


@dataclasses.dataclass(frozen=True)
class Diversity:
    """How picks are made. ``oversample`` is N of the N*k candidates asked from the index (paper Eq. 6: ``lambda_count``, and
    ``recent_steps``, 0 switches recency off). The rest is not in the paper and off by default:

    ``utility_weight`` moves an entry by so many ranks per unit of success above one half; ``min_utility`` drops entries of less success;
    ``explore_p`` is the share of queries whose first pick is the candidate shown least; ``dropout_p`` the chance that a recent winner goes
    to the end. With ``contrast`` the picks begin with the best entry that comes from a success and the best that comes from a failure.
    An entry of another family goes ``foreign_penalty`` ranks back once ``foreign_min_episodes`` episodes say that it hurts (``transfer``).
    """

    k: int = 1
    oversample: int = 16
    lambda_count: float = 0.4
    recent_steps: int = 1
    min_similarity: float = -1.0
    dropout_p: float = 0.0
    utility_weight: float = 0.0
    min_utility: float = 0.0
    explore_p: float = 0.0
    contrast: bool = False
    foreign_penalty: float = 16.0
    foreign_min_episodes: int = 16


class Standing(NamedTuple):
    """What is known of a candidate beside its similarity: episodes it was handed to, when last (-1: never), the posterior mean of their
    success, whether it comes from a success (None: neither), and ranks it is put back."""

    shown: int = 0
    last_shown_step: int = -1
    utility: float = 0.5
    outcome: bool | None = None
    penalty: float = 0.0


_UNKNOWN = Standing()
_similarity = operator.attrgetter("similarity")


def rerank(
    candidates: Sequence[Candidate],
    standings: Mapping[str, Standing],
    *,
    step: int,
    how: Diversity,
    rng: np.random.Generator | None = None,
) -> list[Candidate]:
    """The ``k`` best by ``s_rank - lambda * log(1 + c) - 1[recent]`` with ``s_rank = -rank`` (rank 0 = most similar); paper Eq. 6, and
    what ``how`` adds to it.

    ``recent`` means shown less than ``recent_steps`` steps before ``step``. Ties keep the similarity order. Candidates below
    ``min_similarity`` or ``min_utility`` are dropped first. Raises ValueError for k < 1, or for a chance (``dropout_p``, ``explore_p``)
    without ``rng``.
    """
    if how.k < 1:
        raise ValueError(f"k={how.k}: ask for at least one experience")
    if (how.dropout_p > 0 or how.explore_p > 0) and rng is None:
        raise ValueError("dropout_p or explore_p > 0 needs a seeded rng")
    known = {c.id: standings.get(c.id, _UNKNOWN) for c in candidates}
    kept = [c for c in candidates if c.similarity >= how.min_similarity and known[c.id].utility >= how.min_utility]
    kept.sort(key=_similarity, reverse=True)
    scores = [sum(score(rank, known[c.id], step=step, how=how)) for rank, c in enumerate(kept)]
    ranked = [kept[rank] for rank in sorted(range(len(kept)), key=scores.__getitem__, reverse=True)]  # equal ones keep their order
    if how.contrast:
        ranked = _contrasted(ranked, known)
    if rng is not None:
        ranked = _chanced(ranked, known, step, how, rng)
    return ranked[: how.k]


class Score(NamedTuple):
    """The parts of an entry's score, which add up to it: similarity rank, times shown, shown recently (paper Eq. 6), success, penalty."""

    rank: float
    showings: float
    recent: float
    utility: float
    penalty: float


def score(rank: int, standing: Standing, *, step: int, how: Diversity) -> Score:
    """What an entry of this similarity rank (0 = most similar) scores at ``step``; the highest sum is shown first."""
    s = standing
    recent = _recent(s, step, how)
    return Score(-rank, -how.lambda_count * math.log1p(s.shown), -float(recent), how.utility_weight * (s.utility - 0.5), -s.penalty)


def _recent(standing: Standing, step: int, how: Diversity) -> bool:
    """A step that is still to come says nothing: it is that of another run, whose entries or usage were brought in or are shared."""
    return standing.last_shown_step >= 0 and 0 <= step - standing.last_shown_step < how.recent_steps


def _contrasted(ranked: list[Candidate], known: Mapping[str, Standing]) -> list[Candidate]:
    """The best of a success and the best of a failure first, in their order; the rest as it was."""
    first = [next((c for c in ranked if known[c.id].outcome is outcome), None) for outcome in (True, False)]
    pair = [c for c in ranked if c in first]
    return [*pair, *(c for c in ranked if c not in pair)]


def _chanced(
    ranked: list[Candidate], known: Mapping[str, Standing], step: int, how: Diversity, rng: np.random.Generator
) -> list[Candidate]:
    """One draw for each chance that is on, whatever the candidates are, so that a query's draws do not depend on the bank."""
    explore = how.explore_p > 0 and rng.random() < how.explore_p
    drop = how.dropout_p > 0 and rng.random() < how.dropout_p
    if len(ranked) < 2:
        return ranked
    if drop and _recent(known[ranked[0].id], step, how):
        ranked = [*ranked[1:], ranked[0]]
    if explore:
        novel = min(ranked, key=lambda c: known[c.id].shown)
        ranked = [novel, *(c for c in ranked if c is not novel)]
    return ranked


def nearest(candidates: Sequence[Candidate], *, k: int, min_similarity: float = -1.0) -> list[Candidate]:
    """The ``k`` most similar candidates: what a question reads. Depends on no counter and changes none."""
    return sorted((c for c in candidates if c.similarity >= min_similarity), key=lambda c: -c.similarity)[:k]


class Reservations:
    """Mutable: entries handed to episodes that have not finished yet, so that a burst of equal queries spreads over the bank.

    An entry counts as *shown* only when its episode finishes; until then it is reserved. The ranking sees shown + reserved, so the picks
    depend on the order of the queries and not on how they happened to be cut into micro-batches. Reservations of episodes that never
    finish are dropped after ``max_age_steps``.
    """

    def __init__(self, max_age_steps: int = 8) -> None:
        self._max_age_steps = max_age_steps
        self._by_step: dict[int, Counter[str]] = {}
        self._all: Counter[str] = Counter()  # over all steps
        self._open: Counter[str] = Counter()  # the same, but an episode that takes long is not forgotten

    @property
    def unfinished(self) -> list[str]:
        """Entries that an episode was handed which has not been released, however long ago."""
        return list(self._open)

    def count(self, experience_id: str) -> int:
        """Unfinished episodes that were handed this entry."""
        return self._all.get(experience_id, 0)

    def take(self, experience_id: str, *, step: int) -> None:
        """Reserve an entry for an episode that starts at training step ``step``."""
        self._by_step.setdefault(step, Counter())[experience_id] += 1
        self._all[experience_id] += 1
        self._open[experience_id] += 1

    def release(self, experience_id: str) -> None:
        """Give back the oldest reservation of this entry; nothing happens if there is none."""
        self._open[experience_id] -= 1
        if self._open[experience_id] <= 0:
            del self._open[experience_id]
        for step in sorted(self._by_step):
            if self._by_step[step][experience_id] > 0:
                self._by_step[step][experience_id] -= 1
                self._all[experience_id] -= 1
                return

    def forget_before(self, step: int) -> None:
        """Drop reservations older than ``max_age_steps`` at ``step``."""
        self._by_step = {made: counter for made, counter in self._by_step.items() if step - made <= self._max_age_steps}
        self._all = sum(self._by_step.values(), Counter[str]())

    def clear(self) -> None:
        """Drop every reservation."""
        self._by_step.clear()
        self._all.clear()
        self._open.clear()
