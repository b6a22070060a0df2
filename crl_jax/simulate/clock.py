"""Simulated time.

Owns: ``Clock``, which runs processes in the order of their events, and ``Meter``.
Promises: what happens at one instant happens in the order in which it was asked for, so a simulation is a function of its inputs; time only
goes forward. Work (computing) is kept apart from waiting (latency): when more than ``capacity`` parts compute, all of them slow down alike.
Does not: know what is simulated.

A process is a generator. It yields seconds to wait, ``Work(seconds, meter)`` to compute, or an ``Event`` to wait for, and gets the event's
value back.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

Process = Generator[Any, Any, Any]


class Meter:
    """How many of something there are now, and for how long there were how many."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._since = clock, clock.now
        self.level, self.area, self.busy_s = 0, 0.0, 0.0  # area: level times seconds; busy_s: while the level was above 0

    def change(self, by: int) -> None:
        """Adds ``by`` to the level, from now on."""
        self.settle()
        self.level += by

    def settle(self) -> None:
        """Accounts for the time until now."""
        passed, self._since = self._clock.now - self._since, self._clock.now
        self.area += self.level * passed
        self.busy_s += passed if self.level else 0.0


class Work(NamedTuple):
    """So many seconds of computing at full speed by the part that ``meter`` watches."""

    seconds: float
    meter: Meter


class Event:
    """Something that happens once."""

    def __init__(self) -> None:
        self.happened, self.value, self.waiting = False, None, list[Process]()


class Clock:
    """``now`` is the simulated time (s), ``work`` what a part that always computes would have done by now (s)."""

    def __init__(self, capacity: float = 0.0) -> None:
        self.now, self.work = 0.0, 0.0
        self._capacity, self._computing, self._number = capacity, 0, 0
        self._by_time: list[tuple[float, int, Callable[[], None]]] = []
        self._by_work: list[tuple[float, int, Callable[[], None]]] = []

    def start(self, process: Process) -> Event:
        """Begins ``process`` now; the event happens with what it returns."""
        done = Event()
        self.after(0.0, lambda: self._go_on(_ending(process, done, self), None))
        return done

    def happen(self, event: Event, value: Any = None) -> None:
        """Everyone who waits for ``event`` goes on."""
        event.happened, event.value = True, value
        waiting, event.waiting = event.waiting, []
        for process in waiting:
            self._go_on_soon(process, value)

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        """``call`` in so many seconds."""
        self._number += 1
        heapq.heappush(self._by_time, (self.now + seconds, self._number, call))

    def after_work(self, seconds: float, call: Callable[[], None]) -> None:
        """``call`` when a computing part has done so many seconds of work. The part counts itself with ``compute``."""
        self._number += 1
        heapq.heappush(self._by_work, (self.work + seconds, self._number, call))

    def compute(self, parts: int) -> None:
        """So many parts more (or fewer) compute from now on."""
        self._computing += parts

    def run(self, until: Event) -> None:
        """Lets time pass until ``until`` happens. Raises RuntimeError when nothing is left that could make it happen."""
        while not until.happened:
            if not self._by_time and not self._by_work:
                raise RuntimeError(f"everyone waits for someone else at {self.now:.3f} s of simulated time")
            rate = 1.0 if not self._capacity or self._computing <= self._capacity else self._capacity / self._computing
            planned = self._by_time[0][0] if self._by_time else float("inf")
            worked = self.now + (self._by_work[0][0] - self.work) / rate if self._by_work else float("inf")
            if worked < planned:
                self.now, (self.work, _, call) = max(self.now, worked), heapq.heappop(self._by_work)
            else:
                self.work, (self.now, _, call) = self.work + (planned - self.now) * rate, heapq.heappop(self._by_time)
            call()

    def _go_on_soon(self, process: Process, value: Any) -> None:
        self.after(0.0, lambda: self._go_on(process, value))

    def _go_on(self, process: Process, value: Any) -> None:
        try:
            wanted = process.send(value)
        except StopIteration:
            return
        if isinstance(wanted, Event):
            if wanted.happened:
                self._go_on_soon(process, wanted.value)
            else:
                wanted.waiting.append(process)
        elif isinstance(wanted, Work):
            self._begin(process, wanted)
        else:
            self.after(float(wanted), lambda: self._go_on(process, None))

    def _begin(self, process: Process, work: Work) -> None:
        def end() -> None:
            work.meter.change(-1)
            self.compute(-1)
            self._go_on(process, None)

        work.meter.change(1)
        self.compute(1)
        self.after_work(work.seconds, end)


def all_of(events: Sequence[Event]) -> Process:
    """Waits until all have happened; returns their values in order."""
    values: list[Any] = []
    for event in events:
        values.append((yield event))
    return values


def _ending(process: Process, done: Event, clock: Clock) -> Process:
    clock.happen(done, (yield from process))
