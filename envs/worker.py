"""A process that hosts environments for someone else.

Owns: the instances of one worker process, their reuse, and the loop that answers requests.
Promises: an instance is handed out again only after it was released unharmed, and answers ``step`` only after a ``reset`` by its new
holder; an exception in an environment reaches only its holder, and the instance is thrown away; the process ends when the pipe does, or
when its parent dies.
Does not: import jax, or anything else the environments do not need.

Messages are pickled tuples. To the worker: a list of ``(request, op, lease, argument)``. From it: ``("ready",)`` once, then
``(replies, counts, busy_s, batch_done)`` with replies ``(request, verdict, value)``, verdict "ok", "error" (the environment failed),
"unavailable" or "refused" (the caller's mistake). A batch is answered in parts, so that the reader sees progress.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import sys
import tempfile
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from envs.api import EnvUnavailable, TextEnv

_REPLY_EVERY_S = 0.01
_PR_SET_PDEATHSIG = 1

Make = Callable[..., TextEnv]
Key = tuple[str, str]  # environment name, its options


class _Lease:
    def __init__(self, key: Key, env: TextEnv):
        self.key, self.env, self.was_reset = key, env, False


class _Refused(Exception):
    """The caller broke the rules of the interface; the environment is unharmed."""


class Host:
    """Environments by lease. ``max_free`` bounds the released instances kept for reuse; the one released longest ago is closed first."""

    def __init__(self, make: Make, max_free: int):
        self._make, self._max_free = make, max_free
        self._leases: dict[int, _Lease] = {}
        self._free: OrderedDict[int, tuple[Key, TextEnv]] = OrderedDict()
        self._released = 0
        self.counts = dict.fromkeys(("made", "reused", "resets", "steps", "errors", "close_errors"), 0)

    def answer(self, op: str, lease: int, argument: Any) -> tuple[str, Any]:
        """Do one request; the verdict and the value or message."""
        try:
            return "ok", getattr(self, f"_do_{op}")(lease, argument)
        except _Refused as mistake:
            return "refused", str(mistake)
        except EnvUnavailable as missing:
            return "unavailable", str(missing)
        except Exception as failure:  # whatever an environment raises belongs to its episode, not to the other ones in this process
            self.counts["errors"] += 1
            self._discard(lease)
            where = traceback.extract_tb(failure.__traceback__)[-1]
            return "error", f"{op}: {type(failure).__name__}: {failure} ({os.path.basename(where.filename)}:{where.lineno})"

    def close(self) -> None:
        """Close every instance."""
        for env in [lease.env for lease in self._leases.values()] + [env for _, env in self._free.values()]:
            self._close(env)

    def _do_lease(self, lease: int, argument: tuple[str, dict[str, Any]]) -> None:
        name, options = argument
        key = (name, repr(sorted(options.items())))
        kept = next((number for number, (free_key, _) in reversed(self._free.items()) if free_key == key), None)
        if kept is not None:
            env = self._free.pop(kept)[1]
            self.counts["reused"] += 1
        else:
            env = self._make(name, **options)
            self.counts["made"] += 1
        self._leases[lease] = _Lease(key, env)

    def _do_reset(self, lease: int, argument: tuple[int, str]) -> Any:
        held = self._held(lease)
        observation = held.env.reset(*argument)
        held.was_reset = True
        self.counts["resets"] += 1
        return observation

    def _do_step(self, lease: int, text: str) -> Any:
        held = self._held(lease)
        if not held.was_reset:
            raise _Refused("step before reset: an instance may hold another episode's state")
        step = held.env.step(text)
        self.counts["steps"] += 1
        return step

    def _do_release(self, lease: int, argument: None) -> None:
        held = self._leases.pop(lease, None)
        if held is None:
            return
        self._released += 1
        self._free[self._released] = (held.key, held.env)
        while len(self._free) > self._max_free:
            self._close(self._free.popitem(last=False)[1][1])

    def _held(self, lease: int) -> _Lease:
        if lease not in self._leases:
            raise _Refused("this lease was released, or its environment failed before")
        return self._leases[lease]

    def _discard(self, lease: int) -> None:
        held = self._leases.pop(lease, None)
        if held is not None:
            self._close(held.env)

    def _close(self, env: TextEnv) -> None:
        try:
            env.close()
        except Exception as failure:  # the instance is thrown away in any case; closing must not fail a request that succeeded
            self.counts["close_errors"] += 1
            print(f"closing an environment failed: {failure!r}", file=sys.stderr)


def serve(pipe: Connection, host: Host) -> None:
    """Answer batches until the pipe ends."""
    pipe.send(("ready",))
    while True:
        try:
            batch = pipe.recv()
        except EOFError:
            return
        replies: list[tuple[int, str, Any]] = []
        started = sent = time.perf_counter()
        for i, (request, op, lease, argument) in enumerate(batch):
            replies.append((request, *host.answer(op, lease, argument)))
            now = time.perf_counter()
            last = i == len(batch) - 1
            if last or now - sent > _REPLY_EVERY_S:
                try:
                    pipe.send((replies, host.counts, now - started, last))
                except (BrokenPipeError, ConnectionResetError):
                    return
                replies, started, sent = [], now, now


def main(argv: list[str]) -> None:
    """Run a worker.

    ``argv``: the pipe's file descriptor, the parent's process id, ``module:function`` that makes environments, the number of free instances
    to keep, the folder for temporary files, then the import paths. If the module has a function ``prepare``, it is called once before the
    worker says that it is ready.
    """
    fd, parent, make, max_free, scratch, *paths = argv
    _die_with_parent(int(parent))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides when to stop
    os.dup2(2, 1)  # the level compiler prints on stdout
    sys.path[:] = paths
    tempfile.tempdir = scratch  # the parent removes it, also after it had to kill this process
    name, _, function = make.partition(":")
    module = importlib.import_module(name)
    if hasattr(module, "prepare"):
        module.prepare()  # before "ready": loading a game takes longer than a call may take
    host = Host(getattr(module, function), int(max_free))
    try:
        serve(Connection(int(fd)), host)
    finally:
        host.close()


def _die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent dies, even in the middle of an environment's C code (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above
        os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
