"""What the parts of a run share: a sampler's slots, and places of which there are so many.

Owns: ``Sampler`` and ``Places``. Promises: first come, first served; every token asked for is decoded once; no slot stays free while
somebody waits. Does not: know who asks.
"""

from __future__ import annotations

import heapq
from collections import deque

from crl_jax.simulate.clock import Clock, Event, Meter, Process
from crl_jax.simulate.workload import Engine


class Places:
    """``count`` places (0 = as many as wanted): ``yield from enter()``, then ``leave()``. ``waited_s`` adds up over all who waited."""

    def __init__(self, clock: Clock, count: int) -> None:
        self._clock, self._count = clock, count
        self._queue: deque[Event] = deque()
        self.taken, self.waited_s = Meter(clock), 0.0

    def enter(self) -> Process:
        """Takes a place, when it is one's turn."""
        if self._count and self.taken.level >= self._count:
            since = self._clock.now
            self._queue.append(turn := Event())
            yield turn  # whoever leaves hands the place over
            self.waited_s += self._clock.now - since
        else:
            self.taken.change(1)

    def leave(self) -> None:
        """Gives the place to who waits longest, or back."""
        if self._queue:
            self._clock.happen(self._queue.popleft())
        else:
            self.taken.change(-1)


class Sampler:
    """Slots that decode together. Between two events every slot gets tokens at the same pace, so the end of a reply is known in tokens:
    ``_decoded`` counts those that a slot active since the beginning would have got."""

    def __init__(self, clock: Clock, engine: Engine) -> None:
        self._clock, self._engine = clock, engine
        self.slots = Places(clock, engine.slots)
        self.tokens = 0  # asked for
        self._inputs: deque[tuple[int, Event]] = deque()  # (tokens to decode, when done) whose input is not computed yet
        self._ends: list[tuple[float, int, Event]] = []  # of decoding slots, in _decoded
        self._decoded, self._since, self._plan, self._number = 0.0, 0.0, 0, 0
        self._prefilling = False

    def reply(self, tokens: int) -> Process:
        """One turn of so many tokens, its wait for a slot included."""
        yield from self.slots.enter()
        self.tokens += tokens
        done = Event()
        self._advance()
        self._inputs.append((tokens, done))
        if not self._prefilling and not self._ends and len(self._inputs) == 1:
            self._clock.compute(1)
        self._go_on()
        yield done
        self.slots.leave()

    def _advance(self) -> None:
        """Accounts for what was decoded since the last event."""
        if self._ends and not self._prefilling:
            self._decoded += (self._clock.work - self._since) / max(self._engine.token_s(len(self._ends)), 1e-12)
        self._since = self._clock.work

    def _go_on(self) -> None:
        """Plans the next event; plans made before are void."""
        if self._prefilling:
            return
        self._plan += 1
        if self._inputs:
            self._prefilling = True
            self._clock.after_work(self._engine.prefill_s, self._prefilled)
        elif self._ends:
            plan, left = self._plan, max(0.0, self._ends[0][0] - self._decoded)
            self._clock.after_work(left * self._engine.token_s(len(self._ends)), lambda: self._ended(plan))
        else:
            self._clock.compute(-1)

    def _prefilled(self) -> None:
        tokens, done = self._inputs.popleft()
        self._number += 1
        heapq.heappush(self._ends, (self._decoded + tokens, self._number, done))
        self._prefilling, self._since = False, self._clock.work
        self._go_on()

    def _ended(self, plan: int) -> None:
        if plan != self._plan:
            return
        end = self._ends[0][0]  # exactly, so that replies that end together do
        self._decoded, self._since = end, self._clock.work
        while self._ends and self._ends[0][0] <= end:
            self._clock.happen(heapq.heappop(self._ends)[2])
        self._go_on()
