"""The experience manager: the asyncio service between the episodes and the bank.

Owns: the running tasks and threads, and the order of events. Promises: a search never waits for a distillation, a write or a merge;
distilled operations are applied in the order the episodes were submitted; an operation that is visible is committed; an exception in any
task is raised by the next call and through `failed`; closing drains, or says how many episodes were lost; evaluation (``peek``) changes
nothing. Does not: choose what is shown (``reader``), turn the extractor's words into changes (``editor``), or train (the learner pops
batches through it).
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from crl_jax.experience.bank import BankState, Guided
from crl_jax.experience.buffer import Sample, TrainingBuffer
from crl_jax.experience.calls import ExtractorCalls
from crl_jax.experience.carry import Carry, undo
from crl_jax.experience.editor import Answer, Distilled, Editor
from crl_jax.experience.extractor import ExtractorPrompts
from crl_jax.experience.index import Index
from crl_jax.experience.manager_options import CLOSE_S, LOAD_S, ManagerOptions
from crl_jax.experience.merging import Merging
from crl_jax.experience.pipeline import OrderedPipeline
from crl_jax.experience.protocols import Completer, Decode, Embedder, Render
from crl_jax.experience.query_vectors import OneByOne
from crl_jax.experience.reader import Reader, Shown
from crl_jax.experience.reward import credits_of
from crl_jax.experience.snapshot_thread import SnapshotThread
from crl_jax.experience.store import Store, StoreDamaged
from crl_jax.experience.store_rows import generation_ids, newest_row
from crl_jax.experience.thread import WriterThread
from crl_jax.experience.transfer import lifts
from crl_jax.experience.writer import Writer
from crl_jax.records import Episode, Status


class ExperienceManager:
    """Mutable service bound to the event loop it is started on: ``async with ExperienceManager(...) as manager``."""

    def __init__(
        self,
        *,
        store: Store,
        embedder: Embedder,
        make_index: Callable[[], Index],
        sampler: Completer,
        render: Render,
        decode: Decode,
        buffer: TrainingBuffer,
        options: ManagerOptions,
        prompts: ExtractorPrompts | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._o = options
        embedder = OneByOne(embedder) if options.in_turn else embedder
        self._store, self.buffer, self.step = store, buffer, 0
        self.counts: Counter[str] = Counter()
        self._writer = Writer(store, embedder, make_index, options.write, purpose=options.purpose, decay=self._decay)
        self._thread, self._snapshots = WriterThread(options.io_timeout_s), SnapshotThread(store, options.snapshots)
        self._search = options.search_service(embedder, lambda: self._writer.index, self.counts, clock)
        self._calls = ExtractorCalls(
            sampler,
            render,
            decode,
            prompts or ExtractorPrompts.load(),
            dataclasses.replace(options.sampling, seed=options.seed),
            self.counts,
            options.max_ops,
            options.max_prompt_tokens,
            options.sample_timeout_s,
            options.ask_timeout_s,
        )
        self._reader = Reader(
            search=self._search,
            state=lambda: self.state,
            step=lambda: self.step,
            diversity=options.diversity,
            seed=options.seed,
            routing=options.routing,
            decay=self._decay,
        )
        self._editor = Editor(
            calls=self._calls,
            writer=self._writer,
            thread=self._thread,
            buffer=buffer,
            counts=self.counts,
            step=lambda: self.step,
            generations=store.newest_generation(),
            max_ops=options.max_ops,
            max_chars=options.max_chars,
            votes=options.votes,
            home=options.routing.home,
            in_turn=options.in_turn,
        )
        self._merging = Merging(
            options.merge,
            spawn=self._spawn,
            counts=self.counts,
            namespaces=lambda: self.state.spaces,
            merge=lambda namespace: self._editor.merge(namespace, chunk_size=options.merge.chunk),
            merge_redundant=lambda namespace: self._editor.merge_redundant(namespace, options.merge),
            in_turn=options.in_turn,
        )
        self._closed, self._submitted = False, 0  # the second: episodes of this step
        self._tasks: set[asyncio.Task[None]] = set()
        self.failed: asyncio.Future[None]
        self._pipeline: OrderedPipeline[Episode, Distilled]

    # ------------------------------------------------------------------------------------------------------------ life

    async def start(self) -> None:
        """Load the bank, index it, start the tasks."""
        self.failed = asyncio.get_running_loop().create_future()
        o, editor = self._o, self._editor
        together = None if o.in_turn else editor.prepare  # which texts are ready together is a matter of timing, and vectors show it
        size = {"queue_size": o.queue_size, "concurrency": o.distil_concurrency}
        self._pipeline = OrderedPipeline(editor.distil, editor.settle, prepare=together, in_turn=o.in_turn, **size)
        await self._thread.run_within(LOAD_S, self._writer.load)
        saved = await self._thread.run(self._store.load_buffer)
        if saved is not None:
            try:
                self.buffer.restore(saved, self._store.read(generation_ids))
            except ValueError as error:
                raise StoreDamaged(f"{self._store.path}: {error}: `crl bank repair` brings the bank back without it") from error
        self._pipeline.start(self._spawn)

    async def __aenter__(self) -> ExperienceManager:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def drain(self, deadline_s: float) -> int:
        """Wait until every submitted episode is distilled and every merge is done; returns how many are still pending at the deadline."""
        self._check()
        await self._drained(deadline_s)
        self._check()
        self._calls.require_room(self._submitted)
        return self._pipeline.pending + len(self._merging)

    async def finish(self, deadline_s: float) -> int:
        """Nobody submits any more and there is little time: drain until the deadline and give the rest up, for which `aclose` will not wait
        either. Returns how many episodes were lost (also in ``counts``)."""
        await self._drained(deadline_s)
        self.counts["lost"] += (lost := self._pipeline.stop())
        return lost

    async def aclose(self, deadline_s: float = 30.0) -> int:
        """Drain, stop every task and thread, save the buffer. Returns the number of submitted episodes that were lost (also in ``counts``).

        Does not raise the exception of a failed task (it was raised by the calls before, and stays in `failed`). The store stays open.
        A second call returns 0. The threads are told to end even if saving fails, whose error is raised.
        """
        if self._closed:
            return 0
        self._closed = True
        await self._drained(deadline_s)
        lost = self._pipeline.stop()
        self.counts["lost"] += lost
        self.counts["merges_lost"] += len(self._merging)
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=self._o.io_timeout_s)
        try:
            await self._search.aclose()
            await self._thread.run(self._store.save_buffer, self.buffer.to_json())
            await self._thread.run_within(CLOSE_S, self._writer.index.close)
            await self.snapshot_made()
        finally:
            self._thread.close()
            if self.failed.done():
                self.failed.exception()  # mark as read
        return lost

    # ------------------------------------------------------------------------------------------------------------ reading

    @property
    def state(self) -> BankState:
        """The current bank, an immutable value."""
        return self._writer.state

    async def retrieve(self, namespace: str, text: str, *, peek: bool = False) -> list[Shown]:
        """The experiences to show for a query, best first; empty if the namespace has none.

        Training picks are re-ranked for diversity (paper Eq. 6) and reserved until `observe` gets their episode. With ``peek``
        (evaluation) the ranking is the same and nothing is counted, drawn or changed.
        """
        self._check()
        return await self._reader.retrieve(namespace, text, peek=peek)

    async def ask(self, namespace: str, query: str, *, episode_id: str, number: int = 0, peek: bool = False, **kept: Any) -> Answer | None:
        """Search-and-ask: the extractor's answer to an actor's question, written with the nearest entry; None if there is no entry.

        ``number`` counts the questions of the episode. If the extractor does not answer in time or says nothing, the entry itself is the
        answer. ``kept``: ``request`` of `Editor.answer`.
        """
        self._check()
        entry = await self._reader.nearest(namespace, query)
        if entry is None:
            self.counts["asks_without_entry"] += 1
            return None
        return await self._editor.answer(namespace, query, entry, name=f"{episode_id}/{number}", keep=not peek, **kept)

    # ------------------------------------------------------------------------------------------------------------ learning from episodes

    async def submit(self, episode: Episode) -> bool:
        """Queue a finished training episode for distillation. False, and counted, if the queue stays full until the deadline."""
        await self._turn()
        taken = await self._pipeline.put(episode, timeout_s=self._o.submit_timeout_s)
        self.counts["submitted" if taken else "submit_refused"] += 1
        self._submitted += taken
        return taken

    async def observe(self, episodes: Sequence[Episode], **kept: Any) -> None:
        """Count what finished *training* episodes were shown, and credit the generations behind it. Give whole groups: the reward of a
        guided episode may depend on the free half (`reward`). Never call it with evaluation episodes. ``kept``: ``request`` and ``also`` of
        `Writer.observe`."""
        await self._turn()
        self._reader.release(episodes)
        scored = [episode for episode in episodes if episode.status is not Status.ENV_ERROR]
        guided = [
            Guided(i, bool(e.success), e.id, e.task.namespace, float(e.reward or 0.0))
            for e in scored
            for i in dict.fromkeys(e.shown or ("",))
        ]
        self.counts.update(await self._thread.run(self._learn, scored, guided, self.step, self._decay(), kept))

    async def pop_batch(self) -> list[Sample] | None:
        """The next batch for the extractor's learner, or None; see `TrainingBuffer.pop_batch`."""
        self._check()
        return await self._thread.run(self._next_batch) if self.buffer.ready else None

    def on_step(self, step: int) -> None:
        """The actor is at training step ``step``: recency, ages and, when they are due, merges in the background. Raises
        ExtractorPromptTooLong when no episode of the step before could be distilled."""
        self._check()
        self._calls.require_room(self._submitted)
        self._submitted = 0
        self.step = step
        self._reader.begin_step(step)
        self._editor.begin_step()
        self.buffer.expire(step)
        self._merging.on_step(step)

    async def merge(self, namespace: str) -> int:
        """Merge one namespace now; returns the number of entries written."""
        self._check()
        return await self._editor.merge(namespace, chunk_size=self._o.merge.chunk)

    async def merge_redundant(self, namespace: str) -> int:
        """Merge groups of near entries of one namespace now; returns the number of entries written."""
        self._check()
        return await self._editor.merge_redundant(namespace, dataclasses.replace(self._o.merge, redundancy=0.0))

    async def checkpoint(self) -> dict[str, Any]:
        """What a training checkpoint keeps of the manager: bank revision, step, buffer and `Carry`. Drain first to lose nothing on
        resume. A snapshot of the file at that revision is begun; `snapshot_made` waits for it."""
        await self.snapshot_made()
        data = self.buffer.to_json()

        def here() -> tuple[int, int]:
            self._store.save_buffer(data)
            self._snapshots.begin()
            return self.state.revision, self._store.read(newest_row)

        revision, row = await self._thread.run(here)
        calls, editor = self._calls, self._editor
        carry = Carry(editor.generations, calls.too_long_in_row, calls.longest, dict(editor.redundancy), row)
        return {"revision": revision, "step": self.step, "buffer": data, "carry": carry.to_json()}

    async def snapshot_made(self) -> None:
        """Wait for the snapshot that the newest `checkpoint` began. Raises StoreError if the disk refused it."""
        await self._snapshots.settled(CLOSE_S)

    async def restore(self, saved: dict[str, Any], *, rewind: bool = True, **kept: Any) -> None:
        """Resume at a `checkpoint`. Call it before the first episode.

        With ``rewind`` the bank goes back to the checkpoint's revision (later operations stay in the log, marked abandoned; the ids
        of generations that came after it are given again); without it the bank keeps everything it acknowledged. Step and training
        buffer are the checkpoint's either way. ``kept``: ``also`` of `Store.rewind`. Raises ValueError for a bank that never was where the
        checkpoint is: the buffer's generations would not be those of this bank.
        """
        self._check()
        revision, carry = int(saved["revision"]), Carry.from_json(saved.get("carry"))
        if rewind:
            await self.snapshot_made()  # one of a future that is given up would be there afterwards
            rest = functools.partial(undo, carry.generations, str(saved["buffer"]), kept.get("also"))
            await self._thread.run_within(LOAD_S, self._writer.rewind, revision, log_row=carry.log_row, also=rest)
            self._editor.go_back(carry.generations)
        elif self.state.revision < revision:
            raise ValueError(
                f"the checkpoint belongs to revision {revision} of the bank, but this bank only reached {self.state.revision}: put the "
                "run's own bank file back, or delete the checkpoints that are newer than it"
            )
        self.step = int(saved["step"])
        self.buffer.restore(str(saved["buffer"]), self._store.read(generation_ids))
        self._calls.too_long_in_row, self._calls.longest = carry.too_long_in_row, carry.longest
        self._editor.redundancy = dict(carry.redundancy)
        self._reader.clear()

    async def restart(self, *, rewind: bool = True) -> None:
        """Begin at step 0 where no `checkpoint` was made: an empty training buffer and, with ``rewind``, the bank as the run found it."""
        empty = json.dumps({"waiting": [], "trained": [], "counts": {}})
        began, generations, row = await self._thread.run(self._store.run_began)
        carry = Carry(generations, log_row=row).to_json()
        await self.restore({"revision": began, "step": 0, "buffer": empty, "carry": carry}, rewind=rewind)

    def stats(self) -> dict[str, float]:
        """Counters since the start and gauges of now. Sums and counts, never means: ``search_latency_s`` is over ``searches``."""
        gauges: dict[str, float] = {
            "entries": len(self.state),
            "revision": self.state.revision,
            "step": self.step,
            "pending": self._pipeline.pending,
            "buffer": len(self.buffer),
            "vectors_repaired": self._writer.vectors_repaired,
            "unsearchable": len(self._writer.unsearchable),
            "demoted": self._reader.demoted,
        }
        gauges |= {f"redundancy/{name}": share for name, share in self._editor.redundancy.items()}
        for name, lift in lifts(self.state).items():
            gauges |= {f"lift_{side}/{name}": value for side, value in lift._asdict().items() if value is not None}
        index = {f"index_{k}": n for k, n in self._writer.index.stats().items()}
        buffer = {f"buffer_{k}": n for k, n in self.buffer.counts.items()}
        return {**self.counts, **buffer, **gauges, **self._search.stats(), **index}

    # ------------------------------------------------------------------------------------------------------------ inside

    async def _drained(self, deadline_s: float) -> None:
        if not self.failed.done():
            idle = asyncio.ensure_future(self._idle())
            await asyncio.wait({idle, self.failed}, timeout=deadline_s, return_when=asyncio.FIRST_COMPLETED)
            idle.cancel()

    def _next_batch(self) -> list[Sample] | None:
        """In the writer's thread. Train counts stay of generations that an episode may still be credited to: authors of what is in the bank
        (first, for what is handed out now is there), and of what unfinished episodes were handed."""
        state = self.state
        if self.buffer.crowded(len(state)):
            live = {entry.generation_id for space in state.spaces.values() for entry in space.values()}
            read = [self._store.experience(i) for i in self._reader.unfinished if state.find(i) is None]
            self.buffer.forget(live.union(entry.generation_id for entry in read if entry is not None))
        return self.buffer.pop_batch(self._store.generation)

    async def _idle(self) -> None:
        await self._pipeline.idle()
        while running := self._merging.tasks():
            await asyncio.wait(running)
            await self._pipeline.idle()

    def _learn(self, scored: Sequence[Episode], guided: list[Guided], step: int, decay: float, kept: dict[str, Any]) -> Counter[str]:
        """In the writer's thread as one call, so that nobody keeps a buffer on disk with credit whose own transaction is to come."""
        credits, counts = credits_of(scored, self._store.experience, self._o.reward)
        for credit in credits:
            self.buffer.credit(credit.generation_id, reward=credit.reward, step=step)
        self._writer.observe(guided, step=step, decay=decay, **kept)
        return counts

    async def _turn(self) -> None:
        if self._o.in_turn:
            await self._merging.settled(self._o.sample_timeout_s)
        self._check()

    def _decay(self) -> float:
        if self._o.decay is None:
            return 1.0
        first, last, steps = self._o.decay
        return last + (first - last) * (1 + math.cos(math.pi * min(1.0, self.step / max(1, steps)))) / 2

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)  # a task nobody refers to may be collected before it ran
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not self.failed.done():
            self.failed.set_exception(error)

    def _check(self) -> None:
        """Raise what ended a task of this manager, or RuntimeError when it is closed: what it took then would be lost."""
        if self._writer.broken is not None and not self.failed.done():
            self.failed.set_exception(self._writer.broken)
        if self.failed.done() and (error := self.failed.exception()) is not None:
            raise error
        if self._closed:
            raise RuntimeError("the experience manager is closed: open another one on the same store")
