"""Which of the similar experiences to show: diversity re-ranking (paper Eq. 6).

Owns: the order of candidates given their similarity ranks and how often and how recently each was shown. Promises: pure functions; the
same input gives the same picks; recency is counted in training steps, never in seconds. Does not: search, count usage, or know what a
query is.
"""

from __future__ import annotations

import dataclasses
import math
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
    """Settings of Eq. 6. ``oversample`` is N of the N*k candidates asked from the index; ``recent_steps`` 0 switches the recency term
    off."""

    k: int = 1
    oversample: int = 16
    lambda_count: float = 0.4
    recent_steps: int = 1
    min_similarity: float = -1.0
    dropout_p: float = 0.0


def rerank(
    candidates: Sequence[Candidate],
    shown_counts: Mapping[str, int],
    last_shown_step: Mapping[str, int],
    *,
    step: int,
    lambda_count: float,
    recent_steps: int,
    k: int,
    min_similarity: float = -1.0,
    dropout_p: float = 0.0,
    rng: np.random.Generator | None = None,
) -> list[Candidate]:
    """The ``k`` best by ``s_rank - lambda * log(1 + c) - 1[recent]`` with ``s_rank = -rank`` (rank 0 = most similar); paper Eq. 6.

    ``recent`` means shown less than ``recent_steps`` steps before ``step``. Ties keep the similarity order. Candidates below
    ``min_similarity`` are dropped first. With ``dropout_p`` > 0 a recent winner moves to the end of the list with that probability (draws
    from ``rng``). Raises ValueError for k < 1 or for dropout without ``rng``.
    """
    if k < 1:
        raise ValueError(f"k={k}: ask for at least one experience")
    if dropout_p > 0 and rng is None:
        raise ValueError("dropout_p > 0 needs a seeded rng")
    kept = sorted((c for c in candidates if c.similarity >= min_similarity), key=lambda c: -c.similarity)

    def recent(candidate: Candidate) -> bool:
        last = last_shown_step.get(candidate.id, -1)
        return last >= 0 and step - last < recent_steps

    def score(rank: int) -> float:
        return -rank - lambda_count * math.log1p(shown_counts.get(kept[rank].id, 0)) - float(recent(kept[rank]))

    ranked = [kept[rank] for rank in sorted(range(len(kept)), key=lambda rank: -score(rank))]
    if rng is not None and dropout_p > 0 and len(ranked) > 1 and recent(ranked[0]) and rng.random() < dropout_p:
        ranked = [*ranked[1:], ranked[0]]
    return ranked[:k]


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

    def count(self, experience_id: str) -> int:
        """Unfinished episodes that were handed this entry."""
        return sum(counter[experience_id] for counter in self._by_step.values())

    def take(self, experience_id: str, *, step: int) -> None:
        """Reserve an entry for an episode that starts at training step ``step``."""
        self._by_step.setdefault(step, Counter())[experience_id] += 1

    def release(self, experience_id: str) -> None:
        """Give back the oldest reservation of this entry; nothing happens if there is none."""
        for step in sorted(self._by_step):
            if self._by_step[step][experience_id] > 0:
                self._by_step[step][experience_id] -= 1
                return

    def forget_before(self, step: int) -> None:
        """Drop reservations older than ``max_age_steps`` at ``step``."""
        self._by_step = {made: counter for made, counter in self._by_step.items() if step - made <= self._max_age_steps}

    def clear(self) -> None:
        """Drop every reservation."""
        self._by_step.clear()
