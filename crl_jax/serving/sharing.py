"""Which of the sessions that start together wait for a beginning that another of them computes.

Owns: that choice. Promises: it never costs more computed tokens, padding counted, than everyone computing all of its own; the first in
sorted order never waits, so there is always something to do. Does not: know slots or caches.

In sorted order the sessions are the leaves of a tree of beginnings, left to right. Who waits is computed later, in another dispatch, so
every level of the tree that is followed adds dispatches with padding of their own; how many levels pay is tried out.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from crl_jax.serving.limits import Limits
from crl_jax.serving.prefill import padded_tokens
from crl_jax.serving.slots import common

MAX_LEVELS = 4


class Fresh(NamedTuple):
    """A session whose input, ``ids[:end]``, is not in the cache; the first ``have`` it has, or can have at once."""

    ids: Sequence[int]
    end: int
    have: int


def waits(fresh: Sequence[Fresh], others: Sequence[int], limits: Limits) -> list[bool]:
    """For each session, in sorted order of ids, whether it waits. ``others`` are the lengths that are to be computed anyway."""
    if len(fresh) < 2:
        return [False] * len(fresh)
    shared = [0, *(min(common(a.ids, b.ids), a.end, b.end) for a, b in itertools.pairwise(fresh))]
    best, found = None, [False] * len(fresh)
    for depth in range(MAX_LEVELS + 1):
        rounds = defaultdict[int, list[int]](list, {0: list(others)})
        placed = levels(fresh, shared, depth, limits.min_shared)
        for level, left in placed:
            rounds[level].append(left)
        cost = sum(padded_tokens(lengths, limits) for lengths in rounds.values())
        if best is None or cost < best:
            best, found = cost, [level > 0 for level, _ in placed]
        if max((level for level, _ in placed), default=0) < depth:
            break  # the tree has no more levels
    return found


def levels(fresh: Sequence[Fresh], shared: Sequence[int], depth: int, min_shared: int) -> list[tuple[int, int]]:
    """(level, tokens left to compute) of each session when at most ``depth`` levels wait; level 0 starts at once.

    ``shared[i]`` is how much of its input session i has in common with the one before it.
    """
    placed: list[tuple[int, int]] = []
    path: list[tuple[int, int]] = []  # along the latest session: (so many of its tokens, the level that computes the last of them)
    for session, n in zip(fresh, shared, strict=True):
        path = _cut(path, n)
        upto, level = max((part for part in path if part[1] < depth), default=(0, 0))
        if upto - session.have >= min_shared:
            placed.append((level + 1, session.end - upto))
            path.append((session.end, level + 1))
        else:
            placed.append((0, session.end - session.have))
            path = [(session.end, 0)]
    return placed


def _cut(path: list[tuple[int, int]], n: int) -> list[tuple[int, int]]:
    """The first ``n`` tokens of ``path``."""
    kept = [part for part in path if part[0] < n]
    beyond = next((level for upto, level in path if upto >= n), None)
    return kept if beyond is None or n == 0 else [*kept, (n, beyond)]
