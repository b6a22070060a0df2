"""One worker process of the environment pool, seen from the event loop.

Owns: the process and its pipe, the requests under way, deadlines, and whose call a worker was at when it was lost.
Promises: requests that arrive together travel in one message; a call that takes longer than ``call_timeout_s`` inside the process costs the
process its life, but one of a slow environment (whose calls wait in threads of their own) fails alone and the worker takes no more
environments; nothing waits without a deadline.
Does not: replace itself (see the pool).

One thread per worker reads its pipe; everything else runs on the event loop. A batch is sent only to a worker that waits for one, so
sending never blocks the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import envs
from crl_jax.rollout import scratch
from envs.api import EnvError, EnvUnavailable
from envs.worker import KILL_SHARE, MEMORY_EXIT, NOW

MIB = 2**20
_END_S = 15.0  # for a worker's guard to kill all that the worker started
_EXIT_S = 1.0  # between the end of a worker's pipe and the end of its process
_WINDOW = 32  # episodes; a worker in whose newest ones more than half failed is sick

Key = tuple[str, str]  # environment name, its options


@dataclasses.dataclass(frozen=True)
class Launch:
    """How to start a worker process and how long to wait for it. ``memory_mib``: see ``EnvPool``."""

    make: str
    max_free: int
    families: tuple[str, ...]  # to load at the start; empty: all
    memory_mib: int
    call_timeout_s: float
    start_timeout_s: float

    def start(self, scratch: str) -> tuple[subprocess.Popen[bytes], Connection]:
        """The process and this side of its pipe; its temporary files go into ``scratch``."""
        ours, theirs = socket.socketpair()
        home = os.path.dirname(os.path.dirname(os.path.abspath(envs.__file__)))
        paths = [home, *(os.path.abspath(path) for path in sys.path)]
        command = f"import sys; sys.path.insert(0, {home!r}); from envs.worker import main; main(sys.argv[1:])"
        numbers = [theirs.fileno(), os.getpid(), self.make, self.max_free, self.memory_mib * MIB, ",".join(self.families)]
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-c", command, *map(str, numbers), scratch, *paths],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        return process, Connection(ours.detach())


class _Call(NamedTuple):
    future: asyncio.Future[Any]
    lease: int
    alarm: asyncio.TimerHandle | None  # of a slow environment's call


class Worker:
    """All methods but ``stop`` and ``_read`` run on the loop.

    ``on_gone(worker, reason)`` is called when the process is lost, ``on_sick(worker, reason)`` when it should take no more environments,
    ``on_blame(keys, reason)`` when calls of these environments cost a worker. ``window``: episodes over which failures are counted.
    """

    def __init__(
        self,
        launch: Launch,
        on_gone: Callable[[Worker, str], None],
        on_sick: Callable[[Worker, str], None],
        on_blame: Callable[[list[Key], str], None],
        window: int = _WINDOW,
    ):
        self._loop = asyncio.get_running_loop()
        self._launch, self._on_gone, self._on_sick, self._on_blame = launch, on_gone, on_sick, on_blame
        self._scratch = scratch.make()
        self._now = os.open(os.path.join(self._scratch, NOW), os.O_RDWR | os.O_CREAT)  # kept open: the guard removes the folder
        os.write(self._now, bytes(8))
        self._process, self._pipe = launch.start(self._scratch)
        self._calls: dict[int, _Call] = {}
        self._outbox: list[tuple[int, str, int, Any]] = []
        self._requests = 0
        self._counts: dict[str, int] = {}
        self._judged: dict[str, int] = {}  # the counts when the window began
        self._waiting = False  # True while the process waits for a batch
        self._flush_planned = False
        self._overdue_slow = False
        self.window = window
        self.lost = self.messages = 0
        self.busy_s, self.memory_bytes = 0.0, 0
        self.keys: dict[int, Key] = {}  # the leases it has; only ``EnvPool`` and ``forget`` change them
        self.slow: set[int] = set()
        self.pid = 0
        self.draining = False
        self.answered = self.blamed = False  # a call was answered; it was lost through one
        self.tries = 0  # workers before it in this place that were of no use
        self.reason: str | None = None  # why it is gone
        self.ready: asyncio.Future[None] = self._loop.create_future()
        self._deadline = self._loop.time() + launch.start_timeout_s
        self._alarm: asyncio.TimerHandle | None = self._loop.call_at(self._deadline, self._check_deadline)
        self._reader = threading.Thread(target=self._read, name="env-pool-reader", daemon=True)
        self._reader.start()

    @property
    def came_up(self) -> bool:
        """Whether it was ever ready."""
        return self.pid > 0

    @property
    def counts(self) -> dict[str, int]:
        """What the process counted (see ``envs.host``)."""
        return self._counts

    def call(self, op: str, lease: int, argument: Any) -> asyncio.Future[Any]:
        """Ask the process; the answer, ``EnvError``, ``EnvUnavailable`` or RuntimeError arrives in the future."""
        future: asyncio.Future[Any] = self._loop.create_future()
        if self.reason is not None:
            future.set_exception(EnvError(f"the environment's worker is gone: {self.reason}"))
            return future
        self._requests += 1
        number, alarm = self._requests, None
        if self.slow and lease in self.slow:
            alarm = self._loop.call_later(self._launch.call_timeout_s, self._overdue, number)
        self._calls[number] = _Call(future, lease, alarm)
        self._outbox.append((number, op, lease, argument))
        self._plan_flush()
        return future

    def forget(self, lease: int) -> None:
        """The lease is over; a draining worker ends with its last one."""
        self.keys.pop(lease, None)
        self.slow.discard(lease)
        if self.draining and not self.keys:
            self._gone("it was drained")

    def drain(self) -> None:
        """Take no more leases, and end with the last one."""
        self.draining = True
        if not self.keys:
            self._gone("it was drained")

    def hang_up(self, reason: str) -> None:
        """End the pipe: the process closes its environments and exits. Every pending call fails. Does nothing the second time."""
        if self.reason is not None:
            return
        self.reason = reason
        if self._alarm is not None:
            self._alarm.cancel()
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self._pipe.fileno())) as ours:  # the other side may be gone already
            ours.shutdown(socket.SHUT_WR)
        error = EnvError(f"the environment's worker is gone: {reason}")
        for call in self._calls.values():
            if call.alarm is not None:
                call.alarm.cancel()
            if not call.future.done():
                self.lost += 1
                call.future.set_exception(error)
                call.future.exception()  # a dropped release has no reader; that is no news
        self._calls.clear()
        self._outbox.clear()
        if not self.ready.done():
            self.ready.set_exception(error)
            self.ready.exception()

    def stop(self, timeout_s: float) -> None:
        """Wait for the process to end, or have it killed with all it started; then remove what it left. Runs in any thread."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.terminate()
            try:
                self._process.wait(_END_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                with contextlib.suppress(subprocess.TimeoutExpired):  # it waits for a device: nothing ends it, and nobody waits for it
                    self._process.wait(_EXIT_S)
        self._reader.join(_END_S)
        self._pipe.close()
        os.close(self._now)
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _plan_flush(self) -> None:
        if self._waiting and self._outbox and not self._flush_planned:
            self._flush_planned = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_planned = False
        if self.reason is not None or not self._waiting or not self._outbox:
            return
        batch, self._outbox = self._outbox, []
        self._waiting = False
        self.messages += 1
        self._progress()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the reader sees the end of the pipe and fails these calls
            self._pipe.send(batch)

    def _progress(self) -> None:
        self._deadline = self._loop.time() + self._launch.call_timeout_s
        if self._alarm is not None and self._alarm.when() > self._deadline:
            self._alarm.cancel()
            self._alarm = None
        if self._alarm is None and not self._waiting:
            self._alarm = self._loop.call_at(self._deadline, self._check_deadline)

    def _check_deadline(self) -> None:
        """The alarm rings at the first deadline it was set for; progress since then moves it on."""
        self._alarm = None
        if self._waiting or self.reason is not None:
            return
        if self._loop.time() < self._deadline:
            self._alarm = self._loop.call_at(self._deadline, self._check_deadline)
            return
        self._process.terminate()  # its guard kills it
        self._accuse(self._late())
        self._gone(self._late() if self.came_up else f"it did not start in time ({self._launch.start_timeout_s:g} s)")

    def _overdue(self, number: int) -> None:
        """A call of a slow environment is late. Its thread cannot be stopped, so the worker takes no more environments."""
        call = self._calls.pop(number)
        if not call.future.done():
            self.lost += 1
            call.future.set_exception(EnvError(self._late()))
            call.future.exception()
        self._overdue_slow = True
        if key := self.keys.get(call.lease):
            self._on_blame([key], self._late())
        self._on_sick(self, self._late())
        self.forget(call.lease)

    def _late(self) -> str:
        limit = f"{self._launch.call_timeout_s:g} s"
        return f"a call ran into its deadline of {limit} (raise env.call_timeout_s if this machine is that slow)"

    def _read(self) -> None:
        """Reader thread: hand every message to the loop, until the pipe ends."""
        try:
            while True:
                self._tell_loop(self._on_message, pickle.loads(self._pipe.recv_bytes()))
        except (EOFError, OSError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_EXIT_S)
            self._tell_loop(self._on_exit)

    def _tell_loop(self, callback: Any, *arguments: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the program is ending and nobody waits
            self._loop.call_soon_threadsafe(callback, *arguments)

    def _on_exit(self) -> None:
        if self.reason is None:
            reason = _ending(self._process.poll(), self._launch.memory_mib)
            self._accuse(reason)
            self._gone(reason)

    def _on_message(self, message: tuple[Any, ...]) -> None:
        if self.reason is not None:
            return
        if message[0] == "ready":
            _, self.pid, self.memory_bytes = message
            self._waiting = True
            if not self.ready.done():
                self.ready.set_result(None)
            self._plan_flush()
            return
        replies, self._counts, busy_s, batch_done, self.memory_bytes = message
        self.busy_s += busy_s
        if batch_done is not None:
            self._waiting = batch_done
            self._progress()
        for number, verdict, value in replies:
            call = self._calls.pop(number, None)
            if call is None:  # its time was over
                continue
            self.answered = True
            if call.alarm is not None:
                call.alarm.cancel()
            if not call.future.done():
                _settle(call.future, verdict, value)
        self._plan_flush()
        self._judge()

    def _judge(self) -> None:
        """Whether the worker should take no more environments."""
        if self.draining:
            return
        limit = self._launch.memory_mib
        if 0 < limit < self.memory_bytes / MIB:
            self._on_sick(self, f"it holds {self.memory_bytes / MIB:.0f} MiB, more than worker_memory_mib={limit}")
            return
        errors, began = (self._counts[what] - self._judged.get(what, 0) for what in ("errors", "resets"))
        if max(errors, began) < self.window:
            return
        if errors > began / 2:
            self._on_sick(self, f"{errors} failures in its newest {max(errors, began)} episodes")
        self._judged = dict(self._counts)

    def _gone(self, reason: str) -> None:
        if self.reason is None:
            self.hang_up(reason)
            self._on_gone(self, reason)

    def _accuse(self, reason: str) -> None:
        """Say whose call it was: that of the request at hand, else those of slow environments, who share the blame."""
        if self._overdue_slow:  # said already; a call that never gives way stops all the others
            return
        at = self._calls.get(int.from_bytes(os.pread(self._now, 8, 0), sys.byteorder))
        suspects = [at.lease] if at is not None else [call.lease for call in self._calls.values() if call.alarm is not None]
        keys = [self.keys[lease] for lease in suspects if lease in self.keys]
        self.blamed = bool(keys)
        self._on_blame(keys, reason)


def _settle(future: asyncio.Future[Any], verdict: str, value: Any) -> None:
    if verdict == "ok":
        future.set_result(value)
        return
    kinds = {"error": EnvError, "unavailable": EnvUnavailable, "refused": RuntimeError}
    future.set_exception(kinds[verdict](value))


def _ending(code: int | None, memory_mib: int) -> str:
    """An exit code in words."""
    if code == MEMORY_EXIT and memory_mib:
        return f"it held more than {KILL_SHARE:g} times worker_memory_mib={memory_mib}"
    if code is not None and code > 128 and code - 128 in {*signal.Signals}:
        return f"it was killed by {signal.Signals(code - 128).name}"
    return "it exited" if code is None else f"it exited with code {code}"
