"""Environments in worker processes, for an asyncio program.

Owns: the worker processes, which lease lives where, deadlines, restarts and counters.
Promises: requests that arrive together travel in one message; a call that takes longer than ``call_timeout_s`` inside its worker costs that
worker its life, a new one takes its place, and every lease it held fails with ``EnvError``; nothing waits without a deadline; after
``close`` (or the death of this process) no worker is left, nor, once the next pool has started, any of its files.
Does not: know what an environment is, or retry an episode.

Workers are fresh interpreters (not forks, and without ``multiprocessing``'s re-import of ``__main__``), so they start the same from a
script, a notebook or stdin and never import jax. One thread per worker reads its pipe; everything else runs on the event loop. A batch is
sent only to a worker that waits for one, so sending never blocks the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import pickle
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self

import envs
from crl_jax.rollout import scratch
from envs.api import EnvError, EnvUnavailable, Observation, Step

_CLOSE_TIMEOUT_S = 2.0  # for a worker to close its environments before it is killed


@dataclasses.dataclass(frozen=True)
class PoolStats:
    """Counters since the pool started.

    ``errors`` are failures of environments (``close_errors``: of thrown-away ones while they were closed), ``restarts`` workers replaced,
    ``lost`` calls that failed with a worker.
    """

    made: int = 0
    reused: int = 0
    resets: int = 0
    steps: int = 0
    errors: int = 0
    close_errors: int = 0
    lost: int = 0
    restarts: int = 0
    messages: int = 0
    busy_s: float = 0.0  # time the workers spent inside environments, summed

    def __add__(self, other: PoolStats) -> PoolStats:
        return PoolStats(**{field.name: getattr(self, field.name) + getattr(other, field.name) for field in dataclasses.fields(self)})


class EnvPool:
    """``async with EnvPool(workers=2) as pool: ...`` on a running event loop.

    ``make`` is ``module:function``; the function takes the environment's name and its options as keywords. ``max_free`` is the number of
    released instances each worker keeps for reuse (a NetHack takes about 3.5 MiB).
    """

    def __init__(
        self,
        workers: int = 1,
        call_timeout_s: float = 20.0,
        make: str = "envs.registry:make",
        *,
        max_free: int = 256,
        start_timeout_s: float = 60.0,
    ):
        if workers < 1:
            raise ValueError(f"workers={workers}: a pool needs at least 1")
        self._call_timeout_s, self._start_timeout_s = call_timeout_s, start_timeout_s
        self._launch = _Launch(make, max_free)
        self._count = workers
        self._workers: list[_Worker] = []
        self._leases = 0
        self._stopping: list[asyncio.Future[None]] = []
        self._past = PoolStats()  # of workers that are gone
        self._broken = ""
        self._closing = False

    async def __aenter__(self) -> Self:
        await asyncio.to_thread(scratch.sweep)
        self._workers = [self._start() for _ in range(self._count)]
        try:
            await asyncio.gather(*(worker.ready for worker in self._workers))
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    async def lease(self, env: str, options: Mapping[str, Any] | None = None) -> Lease:
        """Borrow an environment, on the worker with the fewest leases.

        Raises ``EnvUnavailable``, or ``EnvError`` when it cannot be made.
        """
        if self._closing or self._broken or not self._workers:
            raise EnvError(self._broken or "the pool is not open: use it inside 'async with'")
        worker = min(self._workers, key=lambda candidate: len(candidate.leases))
        self._leases += 1
        number = self._leases
        worker.leases.add(number)
        try:
            await worker.call("lease", number, (env, dict(options or {})))
        except asyncio.CancelledError:
            self._drop(worker, number)
            raise
        except Exception:
            worker.leases.discard(number)
            raise
        return Lease(self, worker, number)

    def stats(self) -> PoolStats:
        """The counters, of present and past workers together."""
        total = self._past
        for worker in self._workers:
            total = _add(total, worker.stats())
        return total

    async def close(self) -> None:
        """Stop all workers; calls under way fail with ``EnvError``. Takes at most a few seconds; may be called twice."""
        self._closing = True
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.hang_up("the pool was closed")
        await asyncio.gather(*(asyncio.to_thread(worker.stop, _CLOSE_TIMEOUT_S) for worker in workers), *self._stopping)
        for worker in workers:
            self._past = _add(self._past, worker.stats())

    def _start(self) -> _Worker:
        return _Worker(self._launch, self._call_timeout_s, self._start_timeout_s, self._replace)

    def _replace(self, worker: _Worker, reason: str) -> None:
        """A worker is gone: count, and start another in its place, unless it never came up (the next one would not either)."""
        if worker not in self._workers:
            return
        self._past = _add(self._past, dataclasses.replace(worker.stats(), restarts=1))
        self._workers.remove(worker)
        self._stopping.append(asyncio.get_running_loop().run_in_executor(None, worker.stop, 0.0))
        if worker.came_up and not self._closing:
            self._workers.append(self._start())
        else:
            self._broken = f"an environment worker did not start: {reason}; its messages are on stderr"

    @staticmethod
    def _drop(worker: _Worker, number: int) -> None:
        """Give a lease back without waiting for the answer."""
        worker.leases.discard(number)
        if worker.reason is None:
            worker.call("release", number, None)


class Lease:
    """One borrowed environment. After an ``EnvError`` it is dead: release it and lease another."""

    def __init__(self, pool: EnvPool, worker: _Worker, number: int):
        self._pool, self._worker, self._number = pool, worker, number

    async def reset(self, seed: int, task: str = "") -> Observation:
        """Start the episode of ``seed`` and ``task``. Raises ``EnvError``."""
        return await self._worker.call("reset", self._number, (seed, task))

    async def step(self, text: str) -> Step:
        """Play one turn. Raises ``EnvError`` when the environment failed, RuntimeError for a step before ``reset``."""
        return await self._worker.call("step", self._number, text)

    async def release(self) -> None:
        """Give the environment back. May be called twice, and on a dead lease."""
        if self._number in self._worker.leases:
            self._pool._drop(self._worker, self._number)


@dataclasses.dataclass(frozen=True)
class _Launch:
    """How to start a worker process."""

    make: str
    max_free: int

    def start(self, scratch: str) -> tuple[subprocess.Popen[bytes], Connection]:
        """The process and this side of its pipe; its temporary files go into ``scratch``."""
        ours, theirs = socket.socketpair()
        home = os.path.dirname(os.path.dirname(os.path.abspath(envs.__file__)))
        paths = [home, *(os.path.abspath(path) for path in sys.path)]
        command = f"import sys; sys.path.insert(0, {home!r}); from envs.worker import main; main(sys.argv[1:])"
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-c", command, str(theirs.fileno()), str(os.getpid()), self.make, str(self.max_free), scratch, *paths],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        return process, Connection(ours.detach())


class _Worker:
    """One worker process, seen from the event loop. All methods but ``stop`` and ``_read`` run on the loop."""

    def __init__(self, launch: _Launch, call_timeout_s: float, start_timeout_s: float, on_gone: Callable[[_Worker, str], None]):
        self._loop = asyncio.get_running_loop()
        self._call_timeout_s, self._on_gone = call_timeout_s, on_gone
        self._scratch = scratch.make()
        self._process, self._pipe = launch.start(self._scratch)
        self._pending: dict[int, asyncio.Future[Any]] = {}
        self._outbox: list[tuple[int, str, int, Any]] = []
        self._requests = 0
        self._counts: dict[str, int] = {}
        self._lost = self._messages = 0
        self._busy_s = 0.0
        self._waiting = False  # True while the process waits for a batch
        self._flush_planned = False
        self.leases: set[int] = set()
        self.came_up = False
        self.reason: str | None = None  # why it is gone
        self.ready: asyncio.Future[None] = self._loop.create_future()
        self._deadline = self._loop.time() + start_timeout_s
        self._alarm: asyncio.TimerHandle | None = self._loop.call_at(self._deadline, self._check_deadline)
        self._reader = threading.Thread(target=self._read, name="env-pool-reader", daemon=True)
        self._reader.start()

    def call(self, op: str, lease: int, argument: Any) -> asyncio.Future[Any]:
        """Ask the process; the answer, ``EnvError``, ``EnvUnavailable`` or RuntimeError arrives in the future."""
        future: asyncio.Future[Any] = self._loop.create_future()
        if self.reason is not None:
            future.set_exception(EnvError(f"the environment's worker is gone: {self.reason}"))
            return future
        self._requests += 1
        self._pending[self._requests] = future
        self._outbox.append((self._requests, op, lease, argument))
        self._plan_flush()
        return future

    def stats(self) -> PoolStats:
        """This worker's counters."""
        return PoolStats(**self._counts, lost=self._lost, messages=self._messages, busy_s=self._busy_s)

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
        for future in self._pending.values():
            if not future.done():
                self._lost += 1
                future.set_exception(error)
                future.exception()  # a dropped release has no reader; that is no news
        self._pending.clear()
        self._outbox.clear()
        if not self.ready.done():
            self.ready.set_exception(error)
            self.ready.exception()

    def stop(self, timeout_s: float) -> None:
        """Wait for the process to end, or kill it; then remove what it left. Runs in any thread."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join()
        self._pipe.close()
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
        self._messages += 1
        self._progress()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the reader sees the end of the pipe and fails these calls
            self._pipe.send(batch)

    def _progress(self) -> None:
        self._deadline = self._loop.time() + self._call_timeout_s
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
        self._process.kill()
        late = f"a call ran into its deadline of {self._call_timeout_s:g} s (raise env.call_timeout_s if this machine is that slow)"
        self._gone(late if self.came_up else "it did not start in time")

    def _read(self) -> None:
        """Reader thread: hand every message to the loop, until the pipe ends."""
        try:
            while True:
                self._tell_loop(self._on_message, pickle.loads(self._pipe.recv_bytes()))
        except (EOFError, OSError):
            self._tell_loop(self._gone, "it exited")

    def _tell_loop(self, callback: Any, *arguments: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the program is ending and nobody waits
            self._loop.call_soon_threadsafe(callback, *arguments)

    def _on_message(self, message: tuple[Any, ...]) -> None:
        if self.reason is not None:
            return
        if message == ("ready",):
            self.came_up = self._waiting = True
            if not self.ready.done():
                self.ready.set_result(None)
            self._plan_flush()
            return
        replies, self._counts, busy_s, batch_done = message
        self._busy_s += busy_s
        self._waiting = batch_done
        self._progress()
        for request, verdict, value in replies:
            future = self._pending.pop(request)
            if not future.done():
                _settle(future, verdict, value)
        self._plan_flush()

    def _gone(self, reason: str) -> None:
        if self.reason is None:
            self.hang_up(reason)
            self._on_gone(self, reason)


def _settle(future: asyncio.Future[Any], verdict: str, value: Any) -> None:
    if verdict == "ok":
        future.set_result(value)
        return
    kinds = {"error": EnvError, "unavailable": EnvUnavailable, "refused": RuntimeError}
    future.set_exception(kinds[verdict](value))


def _add(a: PoolStats, b: PoolStats) -> PoolStats:
    return PoolStats(**{field.name: getattr(a, field.name) + getattr(b, field.name) for field in dataclasses.fields(PoolStats)})
