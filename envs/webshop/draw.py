"""Random choices that are the same on every Python.

Owns: ``Draw``. Promises: its stream depends on the words it was made from alone; it uses only ``random.Random.random``, the method whose
stream Python keeps. Does not: touch the global generator.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class Draw:
    """A stream of choices named by ``words``."""

    def __init__(self, *words: str | int) -> None:
        self._random = random.Random("/".join(map(str, words))).random

    def below(self, limit: int) -> int:
        """A whole number in [0, limit)."""
        return int(self._random() * limit)

    def between(self, low: float, high: float) -> float:
        """A number in [low, high)."""
        return low + self._random() * (high - low)

    def chance(self, share: float) -> bool:
        """True in ``share`` of the cases."""
        return self._random() < share

    def pick(self, items: Sequence[T]) -> T:
        """One of ``items``."""
        return items[self.below(len(items))]

    def sample(self, items: Sequence[T], count: int) -> list[T]:
        """``count`` different ones of ``items``, in drawn order; all of them when there are fewer."""
        left = list(items)
        return [left.pop(self.below(len(left))) for _ in range(min(count, len(left)))]
