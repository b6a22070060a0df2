"""Which entries leave a namespace that is too full.

Owns: the policies, and which entries they may not touch. Promises: pure; the newest entry always stays; equal entries go by age, oldest
first; more than the excess leaves at once from a large namespace, so that a full bank is not sorted anew for every new entry. Does not:
remove anything (the writer logs a ``RETIRE``).
"""

from __future__ import annotations

import enum

from crl_jax.experience.bank import BankState, utility
from crl_jax.records import Usage


class Eviction(enum.Enum):
    """Who goes first: the oldest, the one unseen for longest, or the one with the lowest `bank.utility`."""

    FIFO = "fifo"
    LRU = "lru"
    UTILITY = "utility"


def plan_eviction(
    state: BankState, namespace: str, *, capacity: int, policy: Eviction, protect_rare: float = 0.0, slack: float = 0.01
) -> tuple[str, ...]:
    """Ids to retire so that the namespace holds at most ``capacity`` >= 1 entries; none if it does.

    A namespace that is over its capacity is brought down to ``slack`` below it. While at most the share ``protect_rare`` of its entries
    comes from episodes that succeeded, these entries go only after all others.
    """
    space = state.space(namespace)
    if len(space) <= capacity:
        return ()
    excess = len(space) - capacity + int(slack * capacity)
    ids = list(space)
    rare = {i for i in ids if space[i].outcome} if protect_rare > 0 else set[str]()
    if len(rare) > protect_rare * len(ids):
        rare = set[str]()
    candidates = ids[:-1]
    if policy is Eviction.LRU:
        candidates.sort(key=lambda i: max(state.usage.get(i, Usage()).last_shown_step, space[i].step))
    elif policy is Eviction.UTILITY:
        candidates.sort(key=lambda i: utility(state.usage.get(i, Usage())))
    candidates.sort(key=lambda i: i in rare)
    return tuple(candidates[:excess])
