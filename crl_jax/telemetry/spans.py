"""A phase clock for one thread.

Owns: ``Spans``: how much wall time each named phase took since the last ``take``.
Promises: times are exclusive (a nested phase's time is not counted in the phase around it) and, with ``other``, add up to the elapsed
wall time exactly, because every instant belongs to exactly one phase. Phases close when left by an exception, and have their name in a
profiler trace.
Does not: follow other threads; give each thread its own clock.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from crl_jax.scopes import scope

OTHER = "other"


class Spans:
    """Use as ``with spans("rollout"): ...``; ``take()`` at the end of each step."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._stack: list[str] = [OTHER]
        self._seconds: dict[str, float] = {}
        self._mark = clock()

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Charges the time inside to ``name``. Raises ValueError for the reserved name ``other``."""
        if name == OTHER:
            raise ValueError(f"{OTHER!r} is the remainder outside all phases: choose another name")
        self._charge()
        self._stack.append(name)
        try:
            with scope("phase", name):
                yield
        finally:
            self._charge()
            self._stack.pop()

    def so_far(self, name: str) -> None:
        """What has been charged to no phase until now was ``name``: for a beginning that no block can hold."""
        self._charge()
        self._seconds[name] = self._seconds.get(name, 0.0) + self._seconds.pop(OTHER, 0.0)

    def take(self) -> dict[str, float]:
        """Seconds by phase since the last take (or the start), ``other`` last, and starts over. Phases that are open stay open."""
        self._charge()
        taken, self._seconds = self._seconds, {}
        taken[OTHER] = taken.pop(OTHER, 0.0)
        return taken

    def _charge(self) -> None:
        now = self._clock()
        phase = self._stack[-1]
        self._seconds[phase] = self._seconds.get(phase, 0.0) + (now - self._mark)
        self._mark = now
