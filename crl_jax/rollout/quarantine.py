"""Environments that are not tried again.

Owns: the tally of workers that each environment (its name and options) has cost, and the message for who asks for it afterwards.
Promises: where several calls were under way, they share the blame; a worker is forgiven every ``FORGIVEN_AFTER`` leases, so that a run of
weeks does not end by a mishap a day; what was refused once is refused until the pool ends.
Does not: know how a worker is lost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

FORGIVEN_AFTER = 1000  # leases of the environment

Key = tuple[str, str]  # environment name, its options


def key_of(env: str, options: Mapping[str, Any]) -> Key:
    """The same for equal options in any order."""
    return env, repr(sorted(options.items()))


class Quarantine:
    """``after``: workers that an environment may cost before nobody gets it any more."""

    def __init__(self, after: int):
        if after < 1:
            raise ValueError(f"quarantine_after={after}: use 1 or more workers")
        self._after = after
        self._cost: dict[Key, float] = {}
        self._last: dict[Key, str] = {}
        self._lent: dict[Key, int] = {}  # leases of those that cost something

    def blame(self, keys: Sequence[Key], reason: str) -> None:
        """A worker was lost while calls of these environments were under way."""
        for key in keys:
            self._cost[key] = self._cost.get(key, 0.0) + 1 / len(keys)
            self._last[key] = reason

    def lent(self, key: Key) -> None:
        """Somebody got the environment."""
        if key in self._cost:
            self._lent[key] = self._lent.get(key, 0) + 1
            if self._lent[key] % FORGIVEN_AFTER == 0:
                self._cost[key] = max(0.0, self._cost[key] - 1)

    def refusal(self, key: Key) -> str:
        """Why the environment is not lent any more; empty when it is."""
        cost = self._cost.get(key, 0.0)
        if cost < self._after - 1e-9:
            return ""
        name, options = key
        shown = name if options == "[]" else f"{name} with {options}"
        return (
            f"environment {shown} is in quarantine: its calls cost {cost:.3g} workers their lives (the last one: {self._last[key]}). "
            f"Find out why with `crl envs check {name}`, then start again, or leave it out of env.names"
        )

    @property
    def known(self) -> tuple[Key, ...]:
        """The environments that are refused."""
        return tuple(key for key in self._cost if self.refusal(key))
