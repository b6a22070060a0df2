"""Environments that are stepped as one batch on the device, for an asyncio program.

Owns: the batches (one per environment and options), which lease has which slot, deadlines and counters.
Promises: what waits when the device is free goes in one dispatch, from a thread of the batch's own, so the event loop never blocks; a
mistake by one holder reaches only that holder; when the device fails or runs into a deadline, every lease of that batch fails with
``EnvError`` and the next lease gets a fresh batch; nothing waits without a deadline; slots grow in powers of two up to ``max_slots``.
Does not: know what a game is, or retry an episode.

The interface is ``EnvPool``'s. Everything but ``Batch`` methods runs on the loop.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from crl_jax.experience.thread import DaemonThread
from crl_jax.rollout.pool import PoolStats
from envs.api import EnvError, EnvUnavailable, Observation, Step

_CLOSE_TIMEOUT_S = 2.0  # for a call on the device to end


class Batch(Protocol):
    """What a family with ``batched = True`` gives as ``make_batch(name, slots, **options)``. Called from one thread."""

    @property
    def slots(self) -> int:
        """How many episodes there is room for."""
        ...

    def grow(self, slots: int) -> None:
        """Make room for more, and compile what that needs; episodes under way go on."""
        ...

    def advance(self, resets: Mapping[int, tuple[int, str]], steps: Mapping[int, str]) -> Mapping[int, Observation | Step | Exception]:
        """Start episodes (slot: seed and task) and play turns (slot: reply) together. An exception in a slot's place is its holder's; one
        that is raised is everybody's."""
        ...


MakeBatch = Callable[..., Batch]  # (environment's registry name, slots, **options)


class DevicePool:
    """Leases of slots, on a running event loop. ``make_batch(env, slots, **options)`` may take ``start_timeout_s`` (it compiles).
    ``episode_timeout_s`` as for ``EnvPool``."""

    def __init__(
        self,
        make_batch: MakeBatch,
        call_timeout_s: float = 20.0,
        *,
        start_timeout_s: float = 180.0,
        start_slots: int = 8,
        max_slots: int = 1024,
        episode_timeout_s: float = 0.0,
    ):
        if not 1 <= start_slots <= max_slots:
            raise ValueError(f"start_slots={start_slots}: use 1 to max_slots={max_slots}")
        self._make_batch, self._slots = make_batch, (start_slots, max_slots)
        self._timeouts = (call_timeout_s, start_timeout_s)
        self._episode_timeout_s = episode_timeout_s
        self._lanes: dict[str, _Lane] = {}
        self._past = PoolStats()
        self._closed = False

    async def lease(self, env: str, options: Mapping[str, Any] | None = None) -> DeviceLease:
        """Borrow a slot. Raises ``EnvUnavailable``, or ``EnvError`` when the batch cannot be made or has no room."""
        if self._closed:
            raise EnvError("the pool is not open: it was closed")
        chosen = dict(options or {})
        key = f"{env} {sorted(chosen.items())!r}"
        lane = self._lanes.get(key)
        if lane is None:
            lane = self._lanes[key] = _Lane(lambda slots: self._make_batch(env, slots, **chosen), *self._slots, *self._timeouts)
            lane.on_gone = lambda: self._forget(key)
        return DeviceLease(lane, await lane.take(), self._episode_timeout_s)

    def stats(self) -> PoolStats:
        """The counters of all batches: ``made`` slots leased for the first time, ``messages`` dispatches, ``busy_s`` time spent in them."""
        total = self._past
        for lane in self._lanes.values():
            total = total + lane.stats
        return total

    async def close(self) -> None:
        """Calls under way fail with ``EnvError``. Takes at most a few seconds; may be called twice."""
        self._closed = True
        lanes = list(self._lanes.values())
        for lane in lanes:
            lane.fail(EnvError("the pool was closed"), restarts=0)
        await asyncio.gather(*(asyncio.to_thread(lane.thread.join, _CLOSE_TIMEOUT_S) for lane in lanes))

    def _forget(self, key: str) -> None:
        self._past = self._past + self._lanes.pop(key).stats


class DeviceLease:
    """One borrowed slot. After an ``EnvError`` it is dead: release it and lease another."""

    def __init__(self, lane: _Lane, slot: int, episode_timeout_s: float):
        self._lane, self._slot, self._episode_timeout_s = lane, slot, episode_timeout_s
        self._ends_at: float | None = None  # of the loop's clock
        self._was_reset = self._dead = False

    async def reset(self, seed: int, task: str = "") -> Observation:
        """Start the episode of ``seed`` and ``task``. Raises ``EnvError``."""
        if self._episode_timeout_s:
            self._ends_at = asyncio.get_running_loop().time() + self._episode_timeout_s
        answer = await self._ask((seed, task))
        self._was_reset = True
        return answer

    async def step(self, text: str) -> Step:
        """Play one turn. Raises ``EnvError`` when the environment failed, RuntimeError for a step before ``reset``."""
        if not self._was_reset:
            raise RuntimeError("step before reset: a slot may hold another episode's state")
        return await self._ask(text)

    async def release(self) -> None:
        """Give the slot back. May be called twice, and on a dead lease."""
        if self._slot >= 0:
            slot, self._slot = self._slot, -1
            self._lane.give(slot)

    async def _ask(self, argument: tuple[int, str] | str) -> Any:
        if self._slot < 0 or self._dead:
            raise RuntimeError("this lease was released, or its environment failed before")
        try:
            async with asyncio.timeout_at(self._ends_at):
                return await self._lane.ask(self._slot, argument)
        except EnvError:
            self._dead = True
            raise
        except TimeoutError:
            self._dead = True
            self._lane.stats += PoolStats(overdue=1)
            limit = f"{self._episode_timeout_s:g} s"
            raise EnvError(f"an episode ran into its deadline of {limit} (raise env.episode_timeout_s; 0 means none)") from None


@dataclasses.dataclass(eq=False)
class _Request:
    slot: int
    argument: tuple[int, str] | str  # of a reset, or a step's reply
    answer: asyncio.Future[Any]


class _Lane:
    """One batch and its thread. Jobs (make, grow, advance) run one after the other."""

    def __init__(self, make: Callable[[int], Batch], start_slots: int, max_slots: int, call_timeout_s: float, start_timeout_s: float):
        self._loop = asyncio.get_running_loop()
        self._make, self._start_slots, self._max_slots = make, start_slots, max_slots
        self._call_timeout_s, self._start_timeout_s = call_timeout_s, start_timeout_s
        self.thread = DaemonThread("env-device")
        self._batch: Batch | None = None
        self._room = 0  # slots of the batch
        self._free: list[int] = []
        self._used_before: set[int] = set()
        self._takers: list[asyncio.Future[int]] = []
        self._waiting: list[_Request] = []
        self._sent: list[_Request] = []
        self._runner: asyncio.Task[None] | None = None
        self._failed: Exception | None = None
        self.on_gone: Callable[[], None] = lambda: None
        self.stats = PoolStats()

    async def take(self) -> int:
        """A free slot, after making room where there is none."""
        if self._failed is not None:
            raise _copy(self._failed)
        taker: asyncio.Future[int] = self._loop.create_future()
        self._takers.append(taker)
        self._run()
        try:
            return await taker
        except asyncio.CancelledError:
            if taker.done() and not taker.cancelled() and taker.exception() is None:
                self.give(taker.result())
            raise

    def give(self, slot: int) -> None:
        """Take a slot back; what its holder still waits for is nobody's now."""
        if self._failed is None:
            self._free.append(slot)
            if self._takers:
                self._run()

    async def ask(self, slot: int, argument: tuple[int, str] | str) -> Any:
        """The answer for one slot."""
        if self._failed is not None:
            raise _copy(self._failed)
        request = _Request(slot, argument, self._loop.create_future())
        self._waiting.append(request)
        self._run()
        return await request.answer

    def fail(self, error: Exception, *, restarts: int) -> None:
        """The batch is lost: so is every call under way. Does nothing the second time."""
        if self._failed is not None:
            return
        self._failed = error
        lost = [request.answer for request in (*self._sent, *self._waiting) if not request.answer.done()]
        self.stats = self.stats + PoolStats(lost=len(lost), restarts=restarts)
        for future in (*lost, *(taker for taker in self._takers if not taker.done())):
            future.set_exception(_copy(error))
            future.exception()  # its holder may be gone
        self._waiting, self._sent, self._takers, self._batch = [], [], [], None
        self.thread.shutdown()
        if self._runner is not None and self._runner is not asyncio.current_task():
            self._runner.cancel()
        self.on_gone()

    def _run(self) -> None:
        if self._runner is None or self._runner.done():
            self._runner = self._loop.create_task(self._work())  # begins after all that is ready now has been asked

    async def _work(self) -> None:
        """Jobs, until nothing waits. The only door for whatever a device or a game raises: it belongs to the holders of this batch."""
        try:
            while self._takers or self._waiting:
                if self._takers:
                    await self._make_room()
                if self._waiting:
                    await self._dispatch()
        except EnvUnavailable as missing:
            self.fail(missing, restarts=0)
        except TimeoutError:
            late = f"a call on the device ran into its deadline of {self._call_timeout_s:g} s, or {self._start_timeout_s:g} s to compile"
            self.fail(EnvError(f"{late} (raise env.call_timeout_s if this machine is that slow)"), restarts=1)
        except Exception as failure:  # whatever the device raises ends the batch: every holder is told, and it is counted as a restart
            self.fail(EnvError(f"the batch on the device failed: {type(failure).__name__}: {failure}"), restarts=1)

    async def _make_room(self) -> None:
        self._takers = [taker for taker in self._takers if not taker.done()]
        needed = self._room - len(self._free) + len(self._takers)
        if needed > self._room and self._room < self._max_slots:
            slots = max(self._start_slots, self._room)
            while slots < min(needed, self._max_slots):
                slots *= 2
            slots = min(slots, self._max_slots)
            if self._batch is None:
                self._batch = await self._in_thread(self._start_timeout_s, self._make, slots)
            else:
                await self._in_thread(self._start_timeout_s, self._batch.grow, slots)
            self._free += range(self._room, slots)
            self._room = slots
        takers, self._takers = self._takers, []
        for taker in takers:
            if taker.done():
                continue
            if not self._free:
                taker.set_exception(EnvError(f"all {self._room} slots of this environment are leased: release some, or raise max_slots"))
                continue
            slot = self._free.pop()
            known = slot in self._used_before
            self._used_before.add(slot)
            self.stats = self.stats + PoolStats(made=not known, reused=known)
            taker.set_result(slot)

    async def _dispatch(self) -> None:
        assert self._batch is not None
        batch: dict[int, _Request] = {}
        later: list[_Request] = []
        for request in self._waiting:
            if request.answer.done():  # its holder has gone
                continue
            if request.slot in batch:  # a slot has one request in a dispatch
                later.append(request)
            else:
                batch[request.slot] = request
        self._waiting, self._sent = later, list(batch.values())
        if not batch:
            return
        resets = {slot: asked.argument for slot, asked in batch.items() if not isinstance(asked.argument, str)}
        steps = {slot: asked.argument for slot, asked in batch.items() if isinstance(asked.argument, str)}
        started = time.perf_counter()
        answers = await self._in_thread(self._call_timeout_s, self._batch.advance, resets, steps)
        busy_s = time.perf_counter() - started
        self._sent = []
        failed = [slot for slot in batch if isinstance(answers[slot], Exception)]
        good = [slot for slot in batch if slot not in set(failed)]
        counts = {"resets": sum(slot in resets for slot in good), "steps": sum(slot in steps for slot in good), "errors": len(failed)}
        self.stats = self.stats + PoolStats(messages=1, busy_s=busy_s, **counts)
        for slot, request in batch.items():
            answer = answers[slot]
            if request.answer.done():
                continue
            if isinstance(answer, Exception):
                request.answer.set_exception(EnvError(f"{type(answer).__name__}: {answer}"))
            else:
                request.answer.set_result(answer)

    async def _in_thread(self, timeout_s: float, call: Callable[..., Any], *arguments: Any) -> Any:
        """The call's result. Raises TimeoutError; a call that hangs keeps its thread, which ends with the process."""
        async with asyncio.timeout(timeout_s):
            return await asyncio.wrap_future(self.thread.submit(call, *arguments))


def _copy(error: Exception) -> Exception:
    """Each holder gets an exception of its own: tracebacks grow when one object is raised in many places."""
    return type(error)(*error.args)
