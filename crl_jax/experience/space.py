"""The entries of one namespace, as an immutable mapping in the order they were written.

Owns: ``Space``. Promises: adding or removing one entry costs the logarithm of the size and leaves every older ``Space`` as it was, so a
reader holds on to a state for as long as it likes and a log of a million operations replays in seconds. Does not: check ids, or know
what an operation is.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping

import immutables

from crl_jax.records import Experience


class Space(Mapping[str, Experience]):
    """Entries by id. Iteration sorts: ids begin with the revision that wrote them, in eight digits, so their order is that of writing."""

    __slots__ = ("_entries",)

    def __init__(self, entries: immutables.Map[str, Experience] | None = None) -> None:
        self._entries: immutables.Map[str, Experience] = immutables.Map() if entries is None else entries

    def __getitem__(self, experience_id: str) -> Experience:
        return self._entries[experience_id]

    def get(self, experience_id: str, default: Experience | None = None) -> Experience | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The entry or ``default``; on the path of every query, so not through ``Mapping``'s exceptions."""
        return self._entries.get(experience_id, default)

    def __contains__(self, experience_id: object) -> bool:
        return experience_id in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._entries))

    def newest(self, n: int) -> list[Experience]:
        """The ``n`` entries written last, newest first, without sorting the others."""
        return [self._entries[i] for i in heapq.nlargest(n, self._entries)]

    def replaced(self, gone: Iterable[str], written: Experience | None) -> Space:
        """This space without the ids ``gone`` (KeyError if one is not there) and with ``written``."""
        draft = self._entries.mutate()
        for experience_id in gone:
            del draft[experience_id]
        if written is not None:
            draft[written.id] = written
        return Space(draft.finish())
