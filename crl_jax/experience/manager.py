"""The experience manager: the asyncio service between the episodes and the bank.

Owns: the running tasks and threads, and the order of events. Promises: a search never waits for a distillation, a write or a merge;
distilled operations are applied in the order the episodes were submitted; an operation that is visible is committed; an exception in any
task is raised by the next call and through `failed`; closing drains, or says how many episodes were lost; evaluation (``peek``) changes
nothing. Does not: decide what an operation does (``bank``), what is shown (``retrieve``), or train (the learner pops batches from
`buffer`).
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, ParamSpec, TypeVar, cast

import numpy as np

from crl_jax.experience import extractor
from crl_jax.experience.bank import Author, BankState
from crl_jax.experience.buffer import Sample, TrainingBuffer, credited
from crl_jax.experience.calls import Draft, ExtractorCalls, seed_of
from crl_jax.experience.extractor import ExtractorPrompts
from crl_jax.experience.index import Index
from crl_jax.experience.merge import merge_pass
from crl_jax.experience.pipeline import OrderedPipeline
from crl_jax.experience.protocols import Completer, Decode, Embedder, Render
from crl_jax.experience.retrieve import Candidate, Diversity, Reservations, nearest, rerank
from crl_jax.experience.search import SearchService
from crl_jax.experience.store import Store
from crl_jax.experience.writer import WritePolicy, Writer, Written
from crl_jax.records import BankOp, Episode, Generation, OpKind, SamplingParams, Status, Usage

P = ParamSpec("P")
R = TypeVar("R")


class Shown(NamedTuple):
    """One experience for a prompt, with its cosine similarity to the query."""

    id: str
    text: str
    similarity: float


class Answer(NamedTuple):
    """An answer of search-and-ask. ``generation_id`` is None when nothing is to be credited (evaluation, or the raw entry as a
    fallback)."""

    text: str
    generation_id: str | None
    experience_id: str


@dataclasses.dataclass(frozen=True)
class ManagerOptions:
    """Settings of the service. Times are seconds, sizes are items; ``merge_every_steps`` 0 switches periodic merging off."""

    sampling: SamplingParams
    diversity: Diversity = dataclasses.field(default_factory=Diversity)
    write: WritePolicy = dataclasses.field(default_factory=WritePolicy)
    max_ops: int = 3
    max_chars: int = 2000
    max_prompt_tokens: int = 57_344
    queue_size: int = 1024
    distil_concurrency: int = 4
    merge_every_steps: int = 5
    merge_chunk: int = 5
    query_batch: int = 16
    query_wait_s: float = 0.001
    search_workers: int = 4
    cache_size: int = 1000
    submit_timeout_s: float = 60.0
    sample_timeout_s: float = 600.0
    io_timeout_s: float = 60.0
    seed: int = 0


class _Distilled(NamedTuple):
    episode: Episode
    shown: tuple[str, ...]  # the entries numbered in the prompt
    draft: Draft | None


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
        self._store = store
        self.buffer = buffer
        self.counts: Counter[str] = Counter()
        self.step = 0
        self._writer = Writer(store, embedder, make_index, options.write)
        self._write_thread = ThreadPoolExecutor(1, thread_name_prefix="crl-bank-writer")
        self._search = SearchService(
            embedder=embedder,
            index=lambda: self._writer.index,
            counts=self.counts,
            clock=clock,
            batch_size=options.query_batch,
            max_wait_s=options.query_wait_s,
            workers=options.search_workers,
            cache_size=options.cache_size,
            timeout_s=options.io_timeout_s,
        )
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
        )
        self._reserved = Reservations()
        self._picks = 0  # in this step: names the dropout draw
        self._generations = store.generation_count()
        self._tasks: set[asyncio.Task[None]] = set()
        self._merging: dict[str, asyncio.Task[None]] = {}
        self.failed: asyncio.Future[None]
        self._pipeline: OrderedPipeline[Episode, _Distilled]

    # ------------------------------------------------------------------------------------------------------------ life

    async def start(self) -> None:
        """Load the bank, index it, start the tasks."""
        self.failed = asyncio.get_running_loop().create_future()
        self._pipeline = OrderedPipeline(self._distil, self._settle, queue_size=self._o.queue_size, concurrency=self._o.distil_concurrency)
        await self._in_writer(self._writer.load)
        saved = await self._in_writer(self._store.load_buffer)
        if saved is not None:
            self.buffer.restore(saved)
        self._pipeline.start(self._spawn)

    async def __aenter__(self) -> ExperienceManager:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def drain(self, deadline_s: float) -> int:
        """Wait until every submitted episode is distilled and every merge is done; returns how many are still pending at the deadline."""
        self._check()
        idle = asyncio.ensure_future(self._idle())
        await asyncio.wait({idle, self.failed}, timeout=deadline_s, return_when=asyncio.FIRST_COMPLETED)
        idle.cancel()
        self._check()
        return self._pipeline.pending + len(self._merging)

    async def aclose(self, deadline_s: float = 30.0) -> int:
        """Drain, stop every task and thread, save the buffer. Returns the number of submitted episodes that were lost (also in ``counts``).

        Does not raise the exception of a failed task (it was raised by the calls before, and stays in `failed`). The store stays open.
        """
        if not self.failed.done():
            idle = asyncio.ensure_future(self._idle())
            await asyncio.wait({idle, self.failed}, timeout=deadline_s, return_when=asyncio.FIRST_COMPLETED)
            idle.cancel()
        lost = self._pipeline.stop()
        self.counts["lost"] += lost
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=self._o.io_timeout_s)
        await self._search.aclose()
        await self._in_writer(self._store.save_buffer, self.buffer.to_json())
        await self._in_writer(self._writer.index.close)
        self._write_thread.shutdown(wait=True)
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
        (evaluation) they are simply the most similar ones, and nothing is counted or changed.
        """
        self._check()
        d = self._o.diversity
        pick = self._peek if peek else self._pick
        wanted = d.k if peek else d.k * d.oversample
        return cast(list[Shown], await self._search.query(namespace, text, wanted, functools.partial(pick, namespace)))

    async def ask(self, namespace: str, query: str, *, episode_id: str, number: int = 0, peek: bool = False) -> Answer | None:
        """Search-and-ask: the extractor's answer to an actor's question, written with the nearest entry; None if there is no entry.

        ``number`` counts the questions of the episode. If the extractor does not answer in time or says nothing, the entry itself is the
        answer.
        """
        self._check()
        found = cast(list[Shown], await self._search.query(namespace, query, 1, functools.partial(self._peek, namespace)))
        if not found:
            self.counts["asks_without_entry"] += 1
            return None
        draft = await self._calls.ask(query, found[0].text, step=self.step, name=f"{episode_id}/{number}")
        answer = extractor.answer_text(draft.response)[: self._o.max_chars] if draft else ""
        generation_id = None
        if draft is not None and not peek:
            generation = self._named(draft, "" if answer else "empty answer")
            await self._in_writer(self._writer.write, [], namespace=namespace, author=Author("", 0, self.step), generations=[generation])
            if answer:
                generation_id = generation.id
            else:
                self.buffer.fail(generation.id, step=self.step)
        if not answer:
            self.counts["ask_fallbacks"] += 1
        return Answer(answer or found[0].text, generation_id, found[0].id)

    def _peek(self, namespace: str, candidates: list[Candidate]) -> list[Shown]:
        return self._texts(namespace, nearest(candidates, k=self._o.diversity.k, min_similarity=self._o.diversity.min_similarity))

    def _pick(self, namespace: str, candidates: list[Candidate]) -> list[Shown]:
        d = self._o.diversity
        state = self.state
        live = [c for c in candidates if c.id in state.space(namespace)]
        usage = {c.id: state.usage.get(c.id, Usage()) for c in live}
        counts = {c.id: usage[c.id].shown + self._reserved.count(c.id) for c in live}
        last = {c.id: usage[c.id].last_shown_step for c in live}
        self._picks += 1
        rng = np.random.default_rng(seed_of(self._o.seed, self.step, self._picks)) if d.dropout_p > 0 else None
        picked = rerank(
            live,
            counts,
            last,
            step=self.step,
            lambda_count=d.lambda_count,
            recent_steps=d.recent_steps,
            k=d.k,
            min_similarity=d.min_similarity,
            dropout_p=d.dropout_p,
            rng=rng,
        )
        for candidate in picked:
            self._reserved.take(candidate.id, step=self.step)
        return self._texts(namespace, picked)

    def _texts(self, namespace: str, candidates: Sequence[Candidate]) -> list[Shown]:
        space = self.state.space(namespace)
        return [Shown(c.id, space[c.id].text, c.similarity) for c in candidates if c.id in space]

    # ------------------------------------------------------------------------------------------------------------ learning from episodes

    async def submit(self, episode: Episode) -> bool:
        """Queue a finished training episode for distillation. False, and counted, if the queue stays full until the deadline."""
        self._check()
        taken = await self._pipeline.put(episode, timeout_s=self._o.submit_timeout_s)
        self.counts["submitted" if taken else "submit_refused"] += 1
        return taken

    async def observe(self, episodes: Sequence[Episode]) -> None:
        """Count what finished *training* episodes were shown, and credit the generations behind it. Never call it with evaluation
        episodes."""
        self._check()
        for episode in episodes:
            for experience_id in episode.shown:
                self._reserved.release(experience_id)
        scored = [episode for episode in episodes if episode.status is not Status.ENV_ERROR]
        generations = await self._in_writer(lambda: [credited(episode, self._store.experience) for episode in scored])
        for episode, ids in zip(scored, generations, strict=True):
            for generation_id in ids:
                self.buffer.credit(generation_id, success=episode.success, step=self.step)
        shown = [(i, episode.success) for episode in scored for i in dict.fromkeys(episode.shown)]
        await self._in_writer(self._writer.observe, shown, step=self.step)

    async def pop_batch(self) -> list[Sample] | None:
        """The next batch for the extractor's learner, or None; see `TrainingBuffer.pop_batch`."""
        self._check()
        return await self._in_writer(self.buffer.pop_batch, self._store.generation) if self.buffer.ready else None

    def on_step(self, step: int) -> None:
        """The actor is at training step ``step``: recency, ages and, every ``merge_every_steps``, a merge of each namespace in the
        background."""
        self._check()
        self.step = step
        self._picks = 0
        self._reserved.forget_before(step)
        self.buffer.expire(step)
        if self._o.merge_every_steps and step > 0 and step % self._o.merge_every_steps == 0:
            for namespace in self.state.spaces:
                if namespace in self._merging:
                    self.counts["merges_skipped"] += 1
                else:
                    self._merging[namespace] = self._spawn(self._merge(namespace))

    async def merge(self, namespace: str) -> int:
        """Merge one namespace now; returns the number of entries written."""
        self._check()
        return await merge_pass(
            list(self.state.space(namespace)), chunk_size=self._o.merge_chunk, merge_chunk=functools.partial(self._merge_chunk, namespace)
        )

    async def checkpoint(self) -> dict[str, Any]:
        """What a training checkpoint keeps of the manager: bank revision, step and buffer. Drain first to lose nothing on resume."""
        data = self.buffer.to_json()
        await self._in_writer(self._store.save_buffer, data)
        return {"revision": self.state.revision, "step": self.step, "buffer": data}

    async def restore(self, saved: dict[str, Any], *, rewind: bool = True) -> None:
        """Resume at a `checkpoint`. Call it before the first episode.

        With ``rewind`` the bank goes back to the checkpoint's revision (later operations stay in the log, marked abandoned); without it the
        bank keeps everything it acknowledged. Step and training buffer are the checkpoint's either way.
        """
        self._check()
        if rewind:
            await self._in_writer(self._writer.rewind, int(saved["revision"]))
        self.step = int(saved["step"])
        self.buffer.restore(str(saved["buffer"]))
        self._reserved.clear()

    def stats(self) -> dict[str, float]:
        """Counters since the start and gauges of now. Sums and counts, never means: ``search_latency_s`` is over ``searches``."""
        gauges: dict[str, float] = {
            "entries": len(self.state),
            "revision": self.state.revision,
            "pending": self._pipeline.pending,
            "buffer": len(self.buffer),
            "search_latency_s": self._search.latency_s,
            "vectors_repaired": self._writer.vectors_repaired,
        }
        workers = {f"search_batches_worker_{w}": n for w, n in enumerate(self._search.per_worker)}
        return {**self.counts, **{f"buffer_{k}": n for k, n in self.buffer.counts.items()}, **gauges, **workers}

    # ------------------------------------------------------------------------------------------------------------ inside

    async def _distil(self, episode: Episode) -> _Distilled:
        space = self.state.space(episode.task.namespace)
        shown = tuple(i for i in dict.fromkeys(episode.shown) if i in space)
        return _Distilled(episode, shown, await self._calls.distil(episode, [space[i].text for i in shown], step=self.step))

    async def _settle(self, done: _Distilled) -> None:
        if done.draft is None:
            self.counts["distil_failed"] += 1
            return
        parsed = extractor.parse(done.draft.response, max_ops=self._o.max_ops, max_chars=self._o.max_chars)
        generation = self._named(done.draft, parsed.error)
        ops = self._resolved(parsed, done.shown, merging=False)
        await self._write(ops, done.episode.task.namespace, generation, (done.episode.id,))
        self._judge(generation, parsed)

    async def _merge(self, namespace: str) -> None:
        try:
            await self.merge(namespace)
        finally:
            del self._merging[namespace]

    async def _merge_chunk(self, namespace: str, ids: Sequence[str]) -> Sequence[str]:
        space = self.state.space(namespace)
        shown = [i for i in ids if i in space]
        if len(shown) < 2:
            return ()
        draft = await self._calls.merge([space[i].text for i in shown], step=self.step, name=f"{namespace}/{shown[0]}")
        if draft is None:
            self.counts["merge_failed"] += 1
            return ()
        parsed = extractor.parse(draft.response, max_ops=self._o.max_ops, max_chars=self._o.max_chars)
        generation = self._named(draft, parsed.error)
        done = await self._write(self._resolved(parsed, shown, merging=True), namespace, generation, ())
        self._judge(generation, parsed)
        self.counts["merges"] += len(done.written)
        return [entry.id for entry in done.written]

    def _resolved(self, parsed: extractor.Parsed, shown: Sequence[str], *, merging: bool) -> list[BankOp]:
        ops: list[BankOp] = []
        for op in parsed.ops:
            resolved, outside = extractor.resolve(op, shown, merging=merging)
            self.counts["problem_target_out_of_range"] += outside
            if resolved is None:
                self.counts["problem_merge_op_refused"] += 1
            ops.append(resolved or BankOp(OpKind.NOOP))
        return ops

    async def _write(self, ops: Sequence[BankOp], namespace: str, generation: Generation, episode_ids: tuple[str, ...]) -> Written:
        author = Author(generation.id, generation.versions[-1] if generation.versions else 0, generation.step, episode_ids)
        done = await self._in_writer(self._writer.write, ops, namespace=namespace, author=author, generations=[generation])
        self.counts["entries_written"] += len(done.written)
        self.counts["entries_retired"] += len(done.retired)
        self.counts["dedups"] += done.duplicates
        self.counts["evictions"] += done.evicted
        for problem in done.problems:
            self.counts[f"problem_{problem.code}"] += 1
        return done

    def _judge(self, generation: Generation, parsed: extractor.Parsed) -> None:
        if parsed.error:
            self.counts["parse_failures"] += 1
            self.buffer.fail(generation.id, step=self.step)
        elif parsed.is_noop:
            self.buffer.noop()

    def _named(self, draft: Draft, parse_error: str) -> Generation:
        self._generations += 1
        return dataclasses.replace(draft.generation, id=f"g{self._generations:08d}", parse_error=parse_error)

    async def _idle(self) -> None:
        await self._pipeline.idle()
        while self._merging:
            await asyncio.wait(self._merging.values())
            await self._pipeline.idle()

    async def _in_writer(self, call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        future = asyncio.get_running_loop().run_in_executor(self._write_thread, functools.partial(call, *args, **kwargs))
        return await asyncio.wait_for(future, self._o.io_timeout_s)

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
        """Raise what ended a task of this manager."""
        if self.failed.done() and (error := self.failed.exception()) is not None:
            raise error
