"""An experience manager whose every change can be asked for again.

Owns: the answers of requests, the inbox of episodes, the training step on disk. Promises: the answer of a request is stored in the
transaction of its effect, so a repeated request changes nothing twice, also after a killed process; a submitted episode is on disk before
`submit_once` returns, and is distilled at the latest after the next start; what a refused commit had changed in memory is undone. Does
not: know messages or connections (``service``).

Kept on disk with each observation, batch and step: the training buffer. Evidence of a response that could not be read is kept with the
next of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Container, Iterator, Sequence
from typing import Any

from crl_jax.bank_service import codec
from crl_jax.bank_service.limits import Refused
from crl_jax.bank_service.once import Once
from crl_jax.bank_service.run_steps import RunSteps, prefix_of
from crl_jax.experience.bank import Author
from crl_jax.experience.manager import Answer, ExperienceManager
from crl_jax.experience.store import Store, StoreError
from crl_jax.experience.writer import Written
from crl_jax.records import BankOp, Episode

KEPT_REQUESTS = 100_000  # answers on disk; older ones are forgotten
_STEP, _STEPS = "service_step", "service_run_steps"  # rows of ``meta``
_EMPTY = json.dumps({"waiting": [], "trained": [], "counts": {}})


class DurableManager(ExperienceManager):
    """Mutable service. The ``..._once`` methods take a key that names the request. ``learns`` is False without an extractor: episodes are
    not taken, and those in the inbox stay there."""

    def __init__(self, *, store: Store, learns: bool = True, **parts: Any) -> None:
        super().__init__(store=store, **parts)
        self.learns = learns
        self._once: Once[str] = Once(self._answered, self.counts)
        self._waiting: deque[Episode] = deque()  # in the inbox, not yet in the queue
        self._promised = 0  # episodes of calls that are being taken
        self._again: set[str] = set()  # ids that may be submitted again: their run went back while they waited
        self._steps = RunSteps()
        self._fullest, self._moved_s = 0, 0.0  # episodes in hand when one was taken or left last, and when that was
        self._wake = asyncio.Event()
        self._feeder: asyncio.Task[None] | None = None
        self._answers = 0

    async def start(self) -> None:
        """Load the bank, begin the tasks, take up the episodes that wait in the inbox."""
        await super().start()
        self.step, self._steps = await self._thread.run(self._store.read, _steps_of)
        await self._thread.run(self._store.forget_requests, KEPT_REQUESTS)
        inbox = await self._thread.run(self._store.inbox)
        self.counts["inbox_at_start"] = len(inbox)
        self._again = set(inbox)  # with the server their run may have been killed
        self._fullest, self._moved_s = len(inbox), asyncio.get_running_loop().time()
        if self.learns:
            self._waiting.extend(map(codec.episode_from_text, inbox.values()))
            self._feeder = self._spawn(self._feed())

    async def drain(self, deadline_s: float) -> int:
        """As `ExperienceManager.drain`, and the inbox is empty."""
        left_s = await self._fed(deadline_s)
        return await super().drain(left_s) + len(self._waiting)

    async def aclose(self, deadline_s: float = 30.0) -> int:
        """Finish what was begun, then stop. Returns how many episodes are not distilled: they stay in the inbox for the next start."""
        left_s = await self._fed(deadline_s)
        if self._feeder is not None:
            self._feeder.cancel()
        await self._once.settled(left_s)
        return len(self._waiting) + await super().aclose(left_s)

    def stats(self) -> dict[str, float]:
        """Also ``inbox``: episodes that were taken and are not distilled."""
        return {**super().stats(), "inbox": self._in_hand, "learns": float(self.learns)}

    # ------------------------------------------------------------------------------------------------------------ changes, once

    async def write_once(self, key: str, namespace: str, ops: Sequence[BankOp]) -> dict[str, Any]:
        """Operations of a person or another agent, as one batch without a generation: ids written and retired, duplicates, evicted,
        problems."""

        async def work() -> str:
            author = Author("", 0, self.step)
            done = await self._thread.run(
                self._writer.write,
                ops,
                namespace=self._o.routing.home(namespace),
                author=author,
                request=lambda written: (key, _summary(written)),
            )
            self.counts["entries_by_hand"] += len(done.written)
            return _summary(done)

        return json.loads(await self._do(key, work))

    async def observe_once(self, key: str, episodes: Sequence[Episode]) -> None:
        """As `observe`."""

        async def work() -> str:
            await self.observe(episodes, request=(key, "{}"), also=self._keep_buffer)
            return "{}"

        await self._do(key, work)

    async def ask_once(self, key: str, namespace: str, query: str, *, episode_id: str, number: int) -> Answer | None:
        """As `ask`."""

        async def work() -> str:
            answer = await self.ask(namespace, query, episode_id=episode_id, number=number, request=lambda found: (key, json.dumps(found)))
            return json.dumps(answer)

        found = json.loads(await self._do(key, work))
        return None if found is None else Answer(*found)

    async def submit_once(self, key: str, episodes: Sequence[Episode], *, timeout_s: float) -> None:
        """Put episodes into the inbox. Raises Refused when it has no room for all of them until the deadline, or has one of their ids; at
        once when nothing has left it for ``timeout_s``: the extractor is away, and a caller with many episodes must not wait for each."""

        async def work() -> str:
            if len({episode.id for episode in episodes}) < len(episodes):
                raise Refused("INVALID_ARGUMENT", "two episodes of the call have the same id: give each its own")
            await self._room(len(episodes), timeout_s)
            self._promised += len(episodes)
            try:
                items = {episode.id: codec.episode_to_text(episode) for episode in episodes}
                taken: set[str] = set()
                await self._thread.run(self._store.transaction, lambda db: taken.update(_take(db, key, items, self._again)))
                self.counts["submitted_again"] += len(items) - len(taken)
                self._waiting.extend(episode for episode in episodes if episode.id in taken)
            finally:
                self._promised -= len(episodes)
            self._wake.set()
            return "{}"

        await self._do(key, work)

    def step_of(self, run: str) -> int:
        """The newest step ``run`` began, 0 if none since it started or went back; for "" the newest of all."""
        return self._steps.newest(run) if run else self.step

    async def step_once(self, key: str, step: int, *, run: str = "") -> None:
        """As `on_step` if ``run`` has not come that far yet; the step outlives the process."""

        async def work() -> str:
            if self._steps.is_new(run, step):
                self.on_step(step)
                self._steps.begin(run, step)
            else:
                self.counts["steps_repeated"] += 1
            await self._thread.run(self._store.transaction, lambda db: self._keep(db, key, "{}", step=self.step))
            return "{}"

        await self._do(key, work)

    async def pop_once(self, key: str) -> list[dict[str, Any]] | None:
        """As `pop_batch`: for each sample ``generation_id`` and ``values`` (`codec.sample_values`)."""

        async def work() -> str:
            self._check()
            return await self._thread.run(self._pop, key)

        return json.loads(await self._do(key, work))

    async def record_once(self, key: str, generation_ids: Sequence[str], step: int) -> None:
        """The extractor was trained at ``step`` on these generations."""

        async def work() -> str:
            await self._thread.run(self._record, key, list(generation_ids), step)
            return "{}"

        await self._do(key, work)

    async def restore_once(self, key: str, saved: dict[str, Any] | None, *, rewind: bool, timeout_s: float, run: str = "") -> None:
        """As `restore`; None: as `restart`. With ``rewind`` episodes that wait are dropped, and what is being distilled is waited for;
        without it ``run`` may submit those of its own that wait again, to no effect, and the training buffer stays as it is: what other
        jobs and runs have brought and taken meanwhile counts."""
        record = saved or {"revision": 0, "step": 0, "buffer": _EMPTY}

        def keep(db: sqlite3.Connection) -> None:
            if rewind:
                db.execute("DELETE FROM inbox")
            else:
                self._again.update(i for (i,) in db.execute("SELECT id FROM inbox") if i.startswith(prefix_of(run)))
            self._keep(db, key, "{}", step=self.step, buffer=str(record["buffer"]) if rewind else None)

        async def work() -> str:
            self._steps.forget(run)
            if rewind:
                self._waiting.clear()
                if left := await super(DurableManager, self).drain(timeout_s):
                    late = f"{left} episodes are still being distilled after {timeout_s:.0f} s"
                    raise Refused("FAILED_PRECONDITION", f"{late}: restore when nothing runs, or give the call more time")
            step, buffer = self.step, self.buffer.to_json()
            await self.restore(record, rewind=rewind, **({"also": keep} if rewind else {}))
            if not rewind:
                self.step = step
                self.buffer.restore(buffer)
                await self._thread.run(self._store.transaction, keep)
            return "{}"

        await self._do(key, work)

    # ------------------------------------------------------------------------------------------------------------ inside

    @property
    def _in_hand(self) -> int:
        return len(self._waiting) + self._promised + self._pipeline.pending

    async def _do(self, key: str, work: Callable[[], Awaitable[str]]) -> str:
        self._check()
        answer = await self._once.do(key, work)
        self._answers += 1
        if self._answers % 1000 == 0:
            await self._thread.run(self._store.forget_requests, KEPT_REQUESTS)
        return answer

    async def _answered(self, key: str) -> str | None:
        return await self._thread.run(self._store.answered, key)

    async def _feed(self) -> None:
        while True:
            while self._waiting:
                episode = self._waiting[0]
                if await self.submit(episode) and self._waiting and self._waiting[0] is episode:  # a restore may have emptied it
                    self._waiting.popleft()
            self._wake.clear()
            await self._wake.wait()

    async def _fed(self, deadline_s: float) -> float:
        """Wait until all of the inbox is in the queue; returns what is left of the deadline in seconds."""
        loop = asyncio.get_running_loop()
        end_s = loop.time() + deadline_s
        while self._waiting and loop.time() < end_s and not self.failed.done():
            await asyncio.sleep(0.02)
        return max(0.0, end_s - loop.time())

    async def _room(self, count: int, timeout_s: float) -> None:
        most = self._o.queue_size
        if count > most:
            raise Refused("RESOURCE_EXHAUSTED", f"{count} episodes in one call, the inbox holds {most}: send them in several calls")
        loop = asyncio.get_running_loop()
        end_s = loop.time() + timeout_s
        while self._in_hand + count > most:
            if self._in_hand < self._fullest:
                self._fullest, self._moved_s = self._in_hand, loop.time()
            if loop.time() >= min(end_s, self._moved_s + timeout_s):
                full = f"{self._in_hand} episodes wait for distillation, {most} at most"
                raise Refused("RESOURCE_EXHAUSTED", f"{full}: submit fewer, or give the extractor's server more slots")
            await asyncio.sleep(0.02)
            self._check()
        self._fullest, self._moved_s = self._in_hand + count, loop.time()

    # What follows runs in the writer's thread: the buffer and the transaction that keeps it change in one call, so that a killed process
    # never finds on disk what belongs to a request that is not answered there.

    def _learn(self, *what: Any, **named: Any) -> Counter[str]:
        with self._undone_if_refused():
            return super()._learn(*what, **named)

    def _record(self, key: str, generation_ids: list[str], step: int) -> None:
        with self._undone_if_refused():
            self.buffer.record_trained(generation_ids, step=step)
            self._store.transaction(lambda db: self._keep(db, key, "{}"))

    def _pop(self, key: str) -> str:
        with self._undone_if_refused():
            batch = self._next_batch()
            if batch is None:
                return "null"
            answer = json.dumps([{"generation_id": s.generation.id, "values": codec.sample_values(s)} for s in batch])
            self._store.transaction(lambda db: self._keep(db, key, answer))
            return answer

    @contextlib.contextmanager
    def _undone_if_refused(self) -> Iterator[None]:
        before = self.buffer.to_json()
        try:
            yield
        except StoreError:
            self.buffer.restore(before)
            raise

    def _keep_buffer(self, db: sqlite3.Connection) -> None:
        db.execute("INSERT OR REPLACE INTO buffer VALUES (0, ?)", (self.buffer.to_json(),))

    def _keep(self, db: sqlite3.Connection, key: str, answer: str, *, step: int | None = None, buffer: str | None = None) -> None:
        db.execute("INSERT INTO requests (id, answer) VALUES (?,?)", (key, answer))
        db.execute("INSERT OR REPLACE INTO buffer VALUES (0, ?)", (self.buffer.to_json() if buffer is None else buffer,))
        if step is not None:
            rows = ((_STEP, str(step)), (_STEPS, self._steps.to_json()))
            db.executemany("INSERT OR REPLACE INTO meta VALUES (?,?)", rows)


def _take(db: sqlite3.Connection, key: str, items: dict[str, str], again: Container[str]) -> list[str]:
    """Into the inbox, but for those of ``again`` that are there; returns the ids that were put."""
    taken: list[str] = []
    for episode_id, text in items.items():
        if db.execute("SELECT 1 FROM inbox WHERE id=?", (episode_id,)).fetchone():
            if episode_id in again:
                continue
            fix = "give every run its own name (run.name), or wait until it is distilled"
            raise Refused("ALREADY_EXISTS", f"another episode {episode_id} waits for distillation: {fix}")
        db.execute("INSERT INTO inbox (id, data) VALUES (?,?)", (episode_id, text))
        taken.append(episode_id)
    db.execute("INSERT INTO requests (id, answer) VALUES (?,?)", (key, "{}"))
    return taken


def _steps_of(db: sqlite3.Connection) -> tuple[int, RunSteps]:
    found = {row: db.execute("SELECT value FROM meta WHERE key=?", (row,)).fetchone() for row in (_STEP, _STEPS)}
    return int(found[_STEP][0]) if found[_STEP] else 0, RunSteps.of_json(found[_STEPS][0] if found[_STEPS] else "{}")


def _summary(done: Written) -> str:
    found = {"written": [entry.id for entry in done.written], "retired": done.retired, "duplicates": done.duplicates}
    return json.dumps(found | {"evicted": done.evicted, "problems": done.problems})
