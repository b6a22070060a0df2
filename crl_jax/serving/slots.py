"""Which slot holds what: slots to take, the prefixes that their caches hold, and rows moved to the host.

Owns: the free slots, the idle sessions that may lose theirs, an index of cached prefixes over all slots (free ones too), and the sessions
whose row is on the host. Promises: a slot is free or belongs to exactly one session; an indexed prefix is in the cache of its slot, under
the current weights. Does not: touch a cache. What has to be copied is in ``moves``, in the order in which it must be done, before
anything else is written.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple


@dataclasses.dataclass(eq=False)
class HostRow:
    """The first ``n`` positions of a cache row, on the host. ``data`` is None before the copy is made; ``dropped`` rows are not copied."""

    n: int
    data: Any = None
    dropped: bool = False

    @property
    def room(self) -> int:
        """Positions it takes up: ``n``, padded to a power of two so that few programs copy rows."""
        return 1 << (self.n - 1).bit_length()


class Move(NamedTuple):
    """Copy ``row`` out of ``slot``, or (``load``) into it."""

    slot: int
    row: HostRow
    load: bool


@dataclasses.dataclass(eq=False)
class Place:
    """Where a session's keys and values are: the first ``cached`` ids in ``slot``, or in ``host``. A ``fresh`` one has not had its whole
    input in the cache since it got its slot or since the weights changed, so it may take a beginning from another.
    """

    cached: int = 0
    slot: int | None = None
    host: HostRow | None = None
    fresh: bool = True


class Slots:
    """``host_tokens`` is the room on the host, in positions of a row; 0 keeps nothing there."""

    def __init__(self, max_slots: int, host_tokens: int, counts: Counter[str]) -> None:
        self.free: OrderedDict[int, None] = OrderedDict((i, None) for i in range(max_slots))  # longest free first
        self.idle: OrderedDict[str, Place] = OrderedDict()  # sessions with a slot and no request, longest idle first
        self.moves: list[Move] = []
        self._hosted: OrderedDict[str, Place] = OrderedDict()  # longest there first
        self._host_tokens = host_tokens
        self._host_room = host_tokens
        self._counts = counts
        self._prefixes: list[tuple[tuple[int, ...], int]] = []  # (ids, slot), sorted
        self._of_slot: dict[int, tuple[int, ...]] = {}

    def take(self, name: str, place: Place, ids: Sequence[int], min_shared: int) -> bool:
        """Gives the session ``name`` a slot and what it can have of its ``ids`` without computing. False when every slot is in use.

        A free slot that holds the beginning of the ids is taken as it is; else the longest free one; else the slot of the session that has
        been idle longest, whose row moves to the host if there is room and is lost otherwise.
        """
        if not (self.free or self.idle):
            return False
        row = self._leave_host(name, place)
        slot, n = self.longest(ids) if row is None else (None, 0)
        if slot is not None and slot in self.free and n >= min_shared:
            self._counts["shared_tokens"] += n
            place.cached = n
        else:
            slot = next(iter(self.free)) if self.free else self._evict()
        self.free.pop(slot, None)
        self.forget(slot)
        place.slot, place.fresh = slot, row is None
        if row is not None:
            self._counts["restored_tokens"] += row.n
            place.cached = row.n
            self.moves.append(Move(slot, row, load=True))
        return True

    def give_back(self, name: str, place: Place, ids: Sequence[int]) -> None:
        """The session ends. What its slot holds can still be shared until the slot is taken again."""
        self.idle.pop(name, None)
        self._drop_host(name, place)
        if place.slot is not None:
            self.remember(place.slot, ids[: place.cached])
            self.free[place.slot] = None
            place.slot = None

    def remember(self, slot: int, ids: Sequence[int]) -> None:
        """The cache of ``slot`` holds ``ids``."""
        self.forget(slot)
        key = tuple(ids)
        if key:
            self._of_slot[slot] = key
            bisect.insort(self._prefixes, (key, slot))

    def forget(self, slot: int) -> None:
        """Nothing is known to be in the cache of ``slot``."""
        key = self._of_slot.pop(slot, None)
        if key is not None:
            del self._prefixes[bisect.bisect_left(self._prefixes, (key, slot))]

    def longest(self, ids: Sequence[int]) -> tuple[int | None, int]:
        """The slot that holds the longest beginning of ``ids``, and its length; (None, 0) when no slot holds any.

        In sorted order the longest common beginning is that of a neighbour.
        """
        key = tuple(ids)
        at = bisect.bisect_left(self._prefixes, (key, -1))
        best: tuple[int | None, int] = (None, 0)
        for held, slot in self._prefixes[max(0, at - 1) : at + 1]:
            n = common(held, key)
            if n > best[1]:
                best = slot, n
        return best

    def swap(self, places: Sequence[Place]) -> None:
        """New weights: nothing that was computed is of use."""
        self._prefixes.clear()
        self._of_slot.clear()
        for name, place in list(self._hosted.items()):
            self._drop_host(name, place)
        for place in places:
            place.cached, place.fresh = 0, True

    def _evict(self) -> int:
        name, victim = self.idle.popitem(last=False)
        slot = victim.slot
        assert slot is not None
        row = HostRow(victim.cached)
        victim.slot, victim.cached = None, 0
        if not row.n or row.room > self._host_tokens:
            self._counts["evictions"] += 1
            return slot
        while row.room > self._host_room:
            self._counts["evictions"] += 1
            self._drop_host(*next(iter(self._hosted.items())))
        victim.host = row
        self._hosted[name] = victim
        self._host_room -= row.room
        self._counts["offloads"] += 1
        self.moves.append(Move(slot, row, load=False))
        return slot

    def _leave_host(self, name: str, place: Place) -> HostRow | None:
        row, place.host = place.host, None
        if row is not None:
            del self._hosted[name]
            self._host_room += row.room
        return row

    def _drop_host(self, name: str, place: Place) -> None:
        row = self._leave_host(name, place)
        if row is not None:
            row.dropped, row.data = True, None


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many ids ``a`` and ``b`` begin with in common. Both are tuples, or both lists."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low
