"""A process that hosts environments for someone else.

Owns: the loop that answers requests, the threads of slow environments, and the limits of memory.
Promises: the process ends when the pipe does, or when its parent dies, and what it started ends with it; a call that waits (an environment
whose class says ``slow = True``) holds up nobody else; memory past the limit costs the process its life before it costs the machine's.
Does not: import jax, or anything else the environments do not need.

Messages are pickled tuples. To the worker: a list of ``(request, op, lease, argument)``. From it: ``("ready", pid, memory_bytes)`` once,
then ``(replies, counts, busy_s, batch_done, memory_bytes)`` with replies ``(request, verdict, value)``, verdict "ok", "error" (the
environment failed), "unavailable" or "refused" (the caller's mistake). A batch is answered in parts, so that the reader sees progress; the
last part has ``batch_done`` True. Answers of slow environments come by themselves, with ``batch_done`` None.

The eight bytes of the file ``NOW``, which the reader puts into the folder for temporary files, are the number of the request being answered
(0: none), so that after a crash the reader knows whose call it was.
"""

from __future__ import annotations

import contextlib
import importlib
import mmap
import os
import pickle
import resource
import signal
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from envs.guard import under_guard
from envs.host import Host

NOW = "now"
MEMORY_EXIT = 77  # exit code of a worker that used too much memory
KILL_SHARE = 1.5  # of the memory limit: from here the worker ends itself
_DATA_SHARE = 2.0  # of the memory limit: from here the system refuses, for calls that grow faster than anybody looks
_STACKS = 512 * 2**20  # bytes besides, for the stacks of threads, which are promised but not used
_LOOK_EVERY_S = 0.05
_REPLY_EVERY_S = 0.01
_PAGE = resource.getpagesize()

Reply = tuple[int, str, Any]
Request = tuple[int, str, int, Any]


class _Sender:
    """The pipe to the reader, for several threads."""

    def __init__(self, pipe: Connection, host: Host):
        self._pipe, self._host, self._lock = pipe, host, threading.Lock()
        self._memory, self._looked = 0, -1.0

    def send(self, replies: list[Reply], busy_s: float, batch_done: bool | None) -> None:
        """Raises BrokenPipeError or ConnectionResetError when nobody reads any more."""
        with self._lock:
            if (now := time.monotonic()) - self._looked > _LOOK_EVERY_S:
                self._memory, self._looked = memory_bytes(), now
            rest = (self._host.counts, busy_s, batch_done, self._memory)
            try:
                packed = pickle.dumps((replies, *rest))
            except Exception:  # something an environment returned: its holder alone is told
                packed = pickle.dumps(([_sendable(reply) for reply in replies], *rest))
            self._pipe.send_bytes(packed)


class _Lanes:
    """A thread for each lease of a slow environment that has something to do; the calls of one lease stay in order."""

    def __init__(self, host: Host, sender: _Sender):
        self._host, self._sender = host, sender
        self._waiting: dict[int, deque[Request]] = {}
        self._lock = threading.Lock()

    def put(self, request: Request) -> None:
        """Have it answered; does not wait."""
        lease = request[2]
        with self._lock:
            if lease in self._waiting:
                self._waiting[lease].append(request)
                return
            self._waiting[lease] = deque([request])
        threading.Thread(target=self._run, args=(lease,), name=f"lease-{lease}", daemon=True).start()

    def _run(self, lease: int) -> None:
        while True:
            with self._lock:
                if not self._waiting[lease]:
                    del self._waiting[lease]
                    return
                number, op, _, argument = self._waiting[lease].popleft()
            started = time.perf_counter()
            reply = (number, *self._host.answer(op, lease, argument))
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the main thread sees it too, and ends the process
                self._sender.send([reply], time.perf_counter() - started, None)


def serve(pipe: Connection, host: Host, now: memoryview, limit_bytes: int = 0) -> None:
    """Answer batches until the pipe ends. ``now[0]`` is always the request at hand.

    ``limit_bytes`` (0: none) holds from the first batch on: by then it was compared with what the worker needs to start.
    """
    sender = _Sender(pipe, host)
    lanes = _Lanes(host, sender)
    pipe.send(("ready", os.getpid(), memory_bytes()))
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            batch: list[Request] = pipe.recv()
            if limit_bytes:
                limit_memory(limit_bytes)
                limit_bytes = 0
            replies: list[Reply] = []
            started = time.perf_counter()
            for request in batch:
                number, op, lease, argument = request
                if lease in host.slow:
                    lanes.put(request)
                    continue
                if replies and time.perf_counter() - started > _REPLY_EVERY_S:
                    sender.send(replies, time.perf_counter() - started, False)
                    replies, started = [], time.perf_counter()
                now[0] = number
                replies.append((number, *host.answer(op, lease, argument)))
            now[0] = 0
            sender.send(replies, time.perf_counter() - started, True)


def _sendable(reply: Reply) -> Reply:
    try:
        pickle.dumps(reply)
    except Exception as failure:
        return (reply[0], "error", f"what it returned cannot be sent to another process: {type(failure).__name__}: {failure}")
    return reply


def memory_bytes() -> int:
    """Resident memory of this process in bytes; 0 where the system does not tell."""
    return _statm(1)


def limit_memory(limit_bytes: int) -> None:
    """End this process when it holds more than ``KILL_SHARE`` of the limit; what grows faster than a thread can look is refused by the
    system (``MemoryError``)."""

    def look() -> None:
        while memory_bytes() <= KILL_SHARE * limit_bytes:
            time.sleep(_LOOK_EVERY_S)
        os._exit(MEMORY_EXIT)

    threading.Thread(target=look, name="memory", daemon=True).start()
    if data := _statm(5):
        most = data + int(_DATA_SHARE * limit_bytes) + _STACKS
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        resource.setrlimit(resource.RLIMIT_DATA, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def main(argv: list[str]) -> None:
    """Run a worker.

    ``argv``: the pipe's file descriptor, the parent's process id, ``module:function`` that makes environments, the number of free instances
    to keep, the memory limit in bytes (0: none), the families to load (a comma between them; "": all), the folder for temporary files, then
    the import paths. A function ``prepare`` of the module is called once, with the families, before the worker says that it is ready.
    """
    fd, parent, make, max_free, memory, families, scratch, *paths = argv
    under_guard(int(parent), folder=scratch, close_fd=int(fd))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.set_inheritable(int(fd), False)  # a program that an environment starts must not keep the pipe open
    os.dup2(2, 1)  # the level compiler prints on stdout
    sys.path[:] = paths
    tempfile.tempdir = scratch  # removed from outside, also after this process had to be killed
    name, _, function = make.partition(":")
    module = importlib.import_module(name)
    prepare: Callable[..., None] | None = getattr(module, "prepare", None)
    if prepare is not None:
        prepare(*filter(None, families.split(",")))  # before "ready": loading a game takes longer than a call may take
    host = Host(getattr(module, function), int(max_free))
    try:
        serve(Connection(int(fd)), host, _now_file(scratch), int(memory))
    finally:
        host.close()


def _now_file(folder: str) -> memoryview:
    with Path(folder, NOW).open("r+b") as file:
        return memoryview(mmap.mmap(file.fileno(), 8)).cast("q")


def _statm(field: int) -> int:
    try:
        with open("/proc/self/statm", "rb", buffering=0) as file:
            return int(file.read(256).split()[field]) * _PAGE
    except OSError:
        return 0


if __name__ == "__main__":
    main(sys.argv[1:])
