"""The recall of a namespace while it serves: which queries are checked, and the running estimate.

Owns: the sample of real queries and the results of checking them. Promises: sampling costs a search next to nothing and never waits; at
most ``SHARE`` of the time goes into checks, however many queries there are; the estimate covers the last `WINDOW` checked queries. Does
not: search, or decide what is done about low recall.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from crl_jax.experience.index_rows import Vectors
from crl_jax.experience.scann_build import RECALL_GOAL

BATCH = 32  # queries of one check
WINDOW = 128  # checked queries the estimate covers
ENOUGH = 32  # checked queries below which nothing is concluded
SHARE = 0.02  # of one core's time, at most, for checks


class RecallWatch:
    """Mutable, for one namespace; called by searching threads (`offer`) and by the thread that checks (the rest)."""

    def __init__(self, *, every: int, seed: int) -> None:
        self._every = every
        self._random = random.Random(seed)
        self._until = self._gap()
        self._lock = threading.Lock()
        self._waiting: deque[Float[np.ndarray, " d"]] = deque(maxlen=BATCH)
        self._checked: deque[float] = deque(maxlen=WINDOW)
        self._recent: deque[Float[np.ndarray, " d"]] = deque(maxlen=WINDOW)
        self._rest_until = float("-inf")
        self._busy = False

    def offer(self, unit: Vectors, now: float) -> bool:
        """Take a seeded share of these real queries, at most one of a call. True, once, when a check is due; end it with `settle`."""
        self._until -= len(unit)  # threads may lose a count to each other: the share is not exact
        if self._until > 0:
            return False
        with self._lock:
            self._until = self._gap()
            self._waiting.append(unit[self._random.randrange(len(unit))].copy())
            due = len(self._waiting) == BATCH and now >= self._rest_until and not self._busy
            self._busy = self._busy or due
            return due

    def take(self) -> list[Float[np.ndarray, " d"]]:
        """The queries to check."""
        with self._lock:
            taken = list(self._waiting)
            self._waiting.clear()
            self._recent.extend(taken)
            return taken

    def recent(self) -> list[Float[np.ndarray, " d"]]:
        """The last real queries that were taken: what a new build is measured with."""
        with self._lock:
            return [*self._recent]

    def settle(self, recalls: Sequence[float], *, took_s: float, now: float) -> None:
        """The results of one check (none if it came to nothing), and what it cost."""
        with self._lock:
            self._checked.extend(recalls)
            self._rest_until = now + took_s / SHARE
            self._busy = False

    def restart(self, recalls: Sequence[float]) -> None:
        """The estimate begins anew: another searcher or setting, measured like this."""
        with self._lock:
            self._checked.clear()
            self._checked.extend(recalls)

    def estimate(self) -> float:
        """Mean recall over the window; 1 while nothing was checked."""
        with self._lock:
            return sum(self._checked) / len(self._checked) if self._checked else 1.0

    def low(self) -> bool:
        """Whether recall is below the goal over enough queries."""
        return len(self._checked) >= ENOUGH and self.estimate() < RECALL_GOAL

    def _gap(self) -> int:
        return self._random.randint(1, 2 * self._every - 1)
