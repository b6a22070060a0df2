"""The environments of one worker process.

Owns: the instances, who holds which, and their reuse.
Promises: an instance is handed out again only after it was released unharmed, and answers ``step`` only after a ``reset`` by its new
holder; an exception in an environment reaches only its holder, and the instance is thrown away. Calls for different leases may come from
different threads; those for one lease come one after the other.
Does not: know about pipes.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from envs.api import EnvUnavailable, TextEnv

Make = Callable[..., TextEnv]
Key = tuple[str, str]  # environment name, its options
_MESSAGE = 2_000  # characters of an exception's message that are told


class _Lease:
    def __init__(self, key: Key, env: TextEnv):
        self.key, self.env, self.was_reset = key, env, False


class _Refused(Exception):
    """The caller broke the rules of the interface; the environment is unharmed."""


class Host:
    """Environments by lease. ``max_free`` bounds the released instances kept for reuse; the one released longest ago is closed first.

    ``slow`` holds the leases of environments whose class says ``slow = True``: their calls mostly wait for something else.
    """

    def __init__(self, make: Make, max_free: int):
        self._make, self._max_free = make, max_free
        self._leases: dict[int, _Lease] = {}
        self._free: OrderedDict[int, tuple[Key, TextEnv]] = OrderedDict()
        self._released = 0
        self._lock = threading.Lock()  # of everything here but the calls of the environments
        self.slow: set[int] = set()
        self.counts: dict[str, int] = dict.fromkeys(("made", "reused", "resets", "steps", "errors", "close_errors"), 0)

    def answer(self, op: str, lease: int, argument: Any) -> tuple[str, Any]:
        """Do one request; the verdict and the value or message."""
        try:
            return "ok", getattr(self, f"_do_{op}")(lease, argument)
        except _Refused as mistake:
            return "refused", str(mistake)
        except EnvUnavailable as missing:
            self._discard(lease)
            return "unavailable", str(missing)
        except Exception as failure:  # whatever an environment raises belongs to its episode, not to the other ones in this process
            self._count("errors")
            self._discard(lease)
            where = traceback.extract_tb(failure.__traceback__)[-1]
            said = _cut(f"{type(failure).__name__}: {failure}")
            return "error", f"{op}: {said} ({os.path.basename(where.filename)}:{where.lineno})"

    def close(self) -> None:
        """Close every instance."""
        for env in [lease.env for lease in self._leases.values()] + [env for _, env in self._free.values()]:
            self._close(env)

    def _do_lease(self, lease: int, argument: tuple[str, dict[str, Any]]) -> bool:
        """Whether the environment is a slow one."""
        name, options = argument
        key = (name, repr(sorted(options.items())))
        with self._lock:
            kept = next((number for number, (free_key, _) in reversed(self._free.items()) if free_key == key), None)
            env = None if kept is None else self._free.pop(kept)[1]
        if env is None:
            env = self._make(name, **options)
            self._count("made")
        else:
            self._count("reused")
        self._leases[lease] = _Lease(key, env)
        slow = bool(getattr(type(env), "slow", False))
        if slow:
            self.slow.add(lease)
        return slow

    def _do_reset(self, lease: int, argument: tuple[int, str]) -> Any:
        held = self._held(lease)
        observation = held.env.reset(*argument)
        held.was_reset = True
        self._count("resets")
        return observation

    def _do_step(self, lease: int, text: str) -> Any:
        held = self._held(lease)
        if not held.was_reset:
            raise _Refused("step before reset: an instance may hold another episode's state")
        step = held.env.step(text)
        self._count("steps")
        return step

    def _do_release(self, lease: int, argument: None) -> None:
        surplus: list[TextEnv] = []
        with self._lock:
            self.slow.discard(lease)
            held = self._leases.pop(lease, None)
            if held is None:
                return
            self._released += 1
            self._free[self._released] = (held.key, held.env)
            while len(self._free) > self._max_free:
                surplus.append(self._free.popitem(last=False)[1][1])
        for env in surplus:
            self._close(env)

    def _held(self, lease: int) -> _Lease:
        held = self._leases.get(lease)
        if held is None:
            raise _Refused("this lease was released, or its environment failed before")
        return held

    def _discard(self, lease: int) -> None:
        self.slow.discard(lease)
        held = self._leases.pop(lease, None)
        if held is not None:
            self._close(held.env)

    def _close(self, env: TextEnv) -> None:
        try:
            env.close()
        except Exception as failure:  # the instance is thrown away in any case; closing must not fail a request that succeeded
            self._count("close_errors")
            print(f"closing an environment failed: {failure!r}", file=sys.stderr)

    def _count(self, what: str) -> None:
        with self._lock:
            self.counts[what] += 1


def _cut(message: str) -> str:
    """A message may quote what a model or a file said: it must not fill a log."""
    return message if len(message) <= _MESSAGE else f"{message[:_MESSAGE]} [... {len(message) - _MESSAGE} characters left out]"
