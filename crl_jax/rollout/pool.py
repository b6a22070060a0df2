"""Environments in worker processes, for an asyncio program.

Owns: which lease lives on which worker, the replacement of workers, the deadline of episodes, quarantine and counters.
Promises: a worker that is lost is replaced, and every lease it held fails with ``EnvError``; one that holds too much memory, or whose
environments keep failing, gets no more leases and is replaced when the last one ends; an environment that cost ``quarantine_after`` workers
is not tried again, and the error says so; nothing waits without a deadline; after ``close`` (or the death of this process) no worker and
nothing a worker started is left, nor any of its files.
Does not: know what an environment is, or retry an episode.

Workers are fresh interpreters (not forks, and without ``multiprocessing``'s re-import of ``__main__``), so they start the same from a
script, a notebook or stdin and never import jax. See ``pool_worker`` for the calls and ``envs.guard`` for how they end.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from crl_jax.rollout import scratch
from crl_jax.rollout.pool_worker import MIB, Launch, Worker
from crl_jax.rollout.quarantine import Key, Quarantine, key_of
from envs.api import EnvError, Observation, Step

_CLOSE_TIMEOUT_S = 2.0  # for a worker to close its environments before it is killed
_TRIES = 3  # workers in one place that may be of no use before the place is given up


@dataclasses.dataclass(frozen=True)
class PoolStats:
    """Counters since the pool started.

    ``errors`` are failures of environments (``close_errors``: of thrown-away ones while they were closed), ``restarts`` workers replaced
    (``drained``: of them those that could end in peace), ``lost`` calls that failed with a worker, ``overdue`` episodes that took too long,
    ``quarantined`` leases that were refused because their environment cost too many workers.
    """

    made: int = 0
    reused: int = 0
    resets: int = 0
    steps: int = 0
    errors: int = 0
    close_errors: int = 0
    lost: int = 0
    overdue: int = 0
    quarantined: int = 0
    restarts: int = 0
    drained: int = 0
    messages: int = 0
    busy_s: float = 0.0  # time the workers spent inside environments, summed
    memory_mib: float = 0.0  # of the present workers together, as they told last

    def __add__(self, other: PoolStats) -> PoolStats:
        return PoolStats(**{field.name: getattr(self, field.name) + getattr(other, field.name) for field in dataclasses.fields(self)})


class Quarantined(EnvError):
    """The environment cost too many workers and is not lent any more."""


class EnvPool:
    """``async with EnvPool(workers=2) as pool: ...`` on a running event loop.

    ``make`` is ``module:function``; the function takes the environment's name and its options as keywords. ``families`` are loaded before
    the first lease, all if none is named. ``max_free`` is the number of released instances each worker keeps for reuse (a NetHack takes
    about 3.5 MiB). ``episode_timeout_s`` bounds an episode from its reset to its end, the model's thinking included (0: not at all).
    ``worker_memory_mib`` is what a worker may hold (0: any amount): above it, it is replaced; at 1.5 times it is killed.
    """

    def __init__(
        self,
        workers: int = 1,
        call_timeout_s: float = 20.0,
        make: str = "envs.registry:make",
        *,
        families: Sequence[str] = (),
        max_free: int = 256,
        start_timeout_s: float = 60.0,
        episode_timeout_s: float = 0.0,
        worker_memory_mib: int = 0,
        quarantine_after: int = 3,
    ):
        if workers < 1:
            raise ValueError(f"workers={workers}: a pool needs at least 1")
        self.episode_timeout_s = episode_timeout_s
        self._launch = Launch(make, max_free, tuple(families), worker_memory_mib, call_timeout_s, start_timeout_s)
        self._count = workers
        self._workers: list[Worker] = []
        self._draining: list[Worker] = []
        self._leases = 0
        self._stopping: set[asyncio.Future[None]] = set()
        self._past = PoolStats()  # of workers that are gone
        self._quarantine = Quarantine(quarantine_after)
        self._broken = ""
        self._open = self._closing = False

    async def __aenter__(self) -> Self:
        await asyncio.to_thread(scratch.sweep)
        self._workers = [self._start() for _ in range(self._count)]
        try:
            await asyncio.gather(*(worker.ready for worker in self._workers))
            self._check_limit()
        except BaseException:
            await self.close()
            raise
        self._open = True
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    async def lease(self, env: str, options: Mapping[str, Any] | None = None) -> Lease:
        """Borrow an environment, on the worker with the fewest leases.

        Raises ``EnvUnavailable``, ``EnvError`` when it cannot be made, or ``Quarantined``.
        """
        if self._closing or self._broken or not self._workers:
            raise EnvError(self._broken or "the pool is not open: use it inside 'async with'")
        key = key_of(env, options or {})
        if refusal := self._quarantine.refusal(key):
            self._past += PoolStats(quarantined=1)
            raise Quarantined(refusal)
        self._quarantine.lent(key)
        worker = min(self._workers, key=lambda candidate: len(candidate.keys))
        self._leases += 1
        number = self._leases
        worker.keys[number] = key
        try:
            if await worker.call("lease", number, (env, dict(options or {}))):
                worker.slow.add(number)
        except asyncio.CancelledError:
            self._drop(worker, number)
            raise
        except Exception:
            worker.forget(number)
            raise
        return Lease(self, worker, number)

    def stats(self) -> PoolStats:
        """The counters, of present and past workers together."""
        total = self._past
        for worker in [*self._workers, *self._draining]:
            total += _stats(worker)
        return total

    async def close(self) -> None:
        """Stop all workers; calls under way fail with ``EnvError``. Takes at most a few seconds; may be called twice."""
        self._closing = True
        workers, self._workers, self._draining = [*self._workers, *self._draining], [], []
        for worker in workers:
            worker.hang_up("the pool was closed")
        await asyncio.gather(*(asyncio.to_thread(worker.stop, _CLOSE_TIMEOUT_S) for worker in workers), *self._stopping)
        for worker in workers:
            self._bury(worker)

    def _start(self, window: int | None = None, tries: int = 0) -> Worker:
        more = {} if window is None else {"window": window}
        worker = Worker(self._launch, self._lost, self._drain, self._blame, **more)
        worker.tries = tries
        return worker

    def _lost(self, worker: Worker, reason: str) -> None:
        """A worker is gone: count, and start another in its place, unless the ones before it there were of no use either."""
        if worker in self._draining:
            self._draining.remove(worker)
            self._bury(worker)
            self._stop(worker, _CLOSE_TIMEOUT_S)
        if worker not in self._workers:
            return
        self._workers.remove(worker)
        self._bury(worker, restarts=1)
        self._stop(worker, 0.0)
        tries = 0 if worker.answered or worker.blamed else worker.tries + 1
        if self._closing:
            return
        if self._open and tries < _TRIES:
            self._workers.append(self._start(tries=tries))
        elif not self._workers:
            often = f", {tries} times one after the other" if tries > 1 else ""
            self._broken = f"an environment worker did not start{often}: {reason}; its messages are on stderr"

    def _drain(self, worker: Worker, reason: str) -> None:
        """Put another worker in the place of one that is not well. It ends with its last lease."""
        if worker not in self._workers or self._closing:
            return
        self._workers.remove(worker)
        self._draining.append(worker)
        self._past += PoolStats(restarts=1, drained=1)
        self._workers.append(self._start(2 * worker.window))  # if the next ones are no better, replacing them does not help
        worker.drain()

    def _blame(self, keys: Sequence[Key], reason: str) -> None:
        self._quarantine.blame(keys, reason)

    def _bury(self, worker: Worker, restarts: int = 0) -> None:
        self._past += dataclasses.replace(_stats(worker), restarts=restarts, memory_mib=0.0)

    def _stop(self, worker: Worker, timeout_s: float) -> None:
        stopping = asyncio.get_running_loop().run_in_executor(None, worker.stop, timeout_s)
        self._stopping.add(stopping)
        stopping.add_done_callback(self._stopping.discard)

    def _check_limit(self) -> None:
        """Raises ``EnvError`` when the memory limit would have every worker replaced at once."""
        limit, needed = self._launch.memory_mib, max(worker.memory_bytes for worker in self._workers) / MIB
        if 0 < limit < needed:
            raise EnvError(f"worker_memory_mib={limit}, but a worker needs {needed:.0f} MiB before its first environment: use more")

    def _late_episode(self, lease: Lease) -> EnvError:
        self._past += PoolStats(overdue=1)
        self._drop(lease._worker, lease._number)
        limit = f"{self.episode_timeout_s:g} s"
        return EnvError(f"an episode ran into its deadline of {limit} (raise env.episode_timeout_s; 0 means none)")

    @staticmethod
    def _drop(worker: Worker, number: int) -> None:
        """Give a lease back without waiting for the answer."""
        worker.forget(number)
        if worker.reason is None:
            worker.call("release", number, None)


class Lease:
    """One borrowed environment. After an ``EnvError`` it is dead: release it and lease another."""

    def __init__(self, pool: EnvPool, worker: Worker, number: int):
        self._pool, self._worker, self._number = pool, worker, number
        self._ends_at: float | None = None  # of the loop's clock

    async def reset(self, seed: int, task: str = "") -> Observation:
        """Start the episode of ``seed`` and ``task``. Raises ``EnvError``."""
        if self._pool.episode_timeout_s:
            self._ends_at = asyncio.get_running_loop().time() + self._pool.episode_timeout_s
        return await self._call("reset", (seed, task))

    async def step(self, text: str) -> Step:
        """Play one turn. Raises ``EnvError`` when the environment failed, RuntimeError for a step before ``reset``."""
        return await self._call("step", text)

    async def release(self) -> None:
        """Give the environment back. May be called twice, and on a dead lease."""
        if self._number in self._worker.keys:
            self._pool._drop(self._worker, self._number)

    async def _call(self, op: str, argument: Any) -> Any:
        answer = self._worker.call(op, self._number, argument)
        if self._ends_at is None:
            return await answer
        try:
            async with asyncio.timeout_at(self._ends_at):
                return await answer
        except TimeoutError:
            raise self._pool._late_episode(self) from None


def _stats(worker: Worker) -> PoolStats:
    """A worker's counters."""
    return PoolStats(
        **worker.counts, lost=worker.lost, messages=worker.messages, busy_s=worker.busy_s, memory_mib=worker.memory_bytes / MIB
    )
