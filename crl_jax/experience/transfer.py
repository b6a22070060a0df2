"""Does experience help, and does it help where it was not made?

Owns: the comparison of success rates by who wrote what an episode read. Promises: pure; rates are posterior means from a uniform prior, so
that few episodes say little; no verdict before there are enough episodes on both sides. Does not: rank (``retrieve``) or count (``bank``).
"""

from __future__ import annotations

from typing import NamedTuple

from crl_jax.experience.bank import BankState, Tally


class Lift(NamedTuple):
    """Differences of success rates in one namespace; None where one side has no episode.

    ``own`` is with its own experience less without any, ``foreign`` with other families' experience less with its own.
    """

    own: float | None
    foreign: float | None


def rate(tally: Tally) -> float:
    """Posterior mean of success from a uniform prior."""
    return (tally.succeeded + 1) / (tally.episodes + 2)


def lifts(state: BankState) -> dict[str, Lift]:
    """The lift of every namespace that has read anything."""
    readers = dict.fromkeys(reader for reader, source in state.transfer if source)
    return {reader: Lift(_difference(state, reader, own=True), _difference(state, reader, own=False)) for reader in readers}


def _difference(state: BankState, reader: str, *, own: bool) -> float | None:
    mine = state.transfer.get((reader, reader), Tally())
    if own:
        left, right = mine, state.transfer.get((reader, ""), Tally())
    else:
        foreign = [tally for (who, source), tally in state.transfer.items() if who == reader and source not in ("", reader)]
        left, right = Tally(sum(t.episodes for t in foreign), sum(t.succeeded for t in foreign)), mine
    return rate(left) - rate(right) if left.episodes and right.episodes else None


def harmful(state: BankState, reader: str, source: str, *, min_episodes: int) -> bool:
    """Whether ``reader`` succeeds less with entries of ``source`` than with its own (or, before it has any, than without), each counted in
    at least ``min_episodes`` episodes."""
    if source == reader:
        return False
    theirs = state.transfer.get((reader, source), Tally())
    mine = state.transfer.get((reader, reader), Tally())
    if mine.episodes < min_episodes:
        mine = state.transfer.get((reader, ""), Tally())
    return min(theirs.episodes, mine.episodes) >= min_episodes and rate(theirs) < rate(mine)
