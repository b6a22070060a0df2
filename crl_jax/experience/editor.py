"""The writing side of the bank: from what the extractor says to changes of the bank.

Owns: the ids of generations, what becomes of each draft (distillation, merge, answer), its counters. Promises: every generation that came
back is stored with the changes it made, in one transaction; a draft that cannot be read changes nothing and is reported to the training
buffer; ``in_turn`` an answer's id, and its place in that buffer, do not depend on which question was answered first. Does not: call the
model (``calls``), read a response (``extractor``), apply an operation (``writer``), or decide when anything happens (``manager``).
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NamedTuple

from crl_jax.experience import extractor
from crl_jax.experience.bank import Author
from crl_jax.experience.buffer import TrainingBuffer
from crl_jax.experience.calls import Draft, ExtractorCalls
from crl_jax.experience.merge_pass import merge_pass
from crl_jax.experience.merging import MergePolicy
from crl_jax.experience.reader import Shown
from crl_jax.experience.thread import WriterThread
from crl_jax.experience.writer import Writer, Written
from crl_jax.records import BankOp, Episode, Experience, Generation, OpKind
from crl_jax.seeds import derive_seed


class Answer(NamedTuple):
    """An answer of search-and-ask. ``generation_id`` is None when nothing is to be credited (evaluation, or the raw entry as a
    fallback)."""

    text: str
    generation_id: str | None
    experience_id: str


class Distilled(NamedTuple):
    """What the extractor made of one episode; ``shown`` are the entries numbered in its prompt, ``draft`` None if it gave no answer."""

    episode: Episode
    shown: tuple[str, ...]
    draft: Draft | None


class Editor:
    """Mutable, on one event loop. ``generations`` is the number in the newest stored generation's id; ``step`` tells the training step of
    now; ``home`` names the namespace in which the lessons of a task's namespace are written.

    Ids are ``g`` and a number. ``in_turn`` the id of an answer is the number that comes next and the name of its question, as in
    ``g00000012+s3/g0/1/0``: questions of many episodes are answered at the same time, so a number of its own would tell who came first.
    Going back to before that number gives such ids up with the others.
    """

    def __init__(
        self,
        *,
        calls: ExtractorCalls,
        writer: Writer,
        thread: WriterThread,
        buffer: TrainingBuffer,
        counts: Counter[str],
        step: Callable[[], int],
        generations: int,
        max_ops: int,
        max_chars: int,
        home: Callable[[str], str] = lambda namespace: namespace,
        votes: bool = False,
        in_turn: bool = False,
    ) -> None:
        self._calls = calls
        self._writer = writer
        self._thread = thread
        self._buffer = buffer
        self._counts = counts
        self._step = step
        self.generations = generations
        self._max_ops = max_ops
        self._max_chars = max_chars
        self._home = home
        self.redundancy: dict[str, float] = {}  # share of near duplicates when it was last measured, by namespace
        self._votes = votes
        self._in_turn = in_turn
        self._answers: set[str] = set()  # ids given to answers since the newest number
        self._empty: list[tuple[str, int]] = []  # in turn: ids of empty answers and their steps, not yet told to the buffer

    def begin_step(self) -> None:
        """Report the empty answers of the step before to the training buffer, in the order of their names."""
        empty, self._empty = sorted(self._empty), []
        for generation_id, step in empty:
            self._buffer.fail(generation_id, step=step)

    def go_back(self, generations: int | None) -> None:
        """What comes next is what came after the checkpoint at which ``generations`` was the newest number (None: it stays)."""
        self.generations = self.generations if generations is None else generations
        self._answers.clear()
        self._empty.clear()

    def distil(self, episode: Episode) -> Coroutine[Any, Any, Distilled]:
        """Ask for the lessons of an episode, which is shown the entries as they are when this is called. Changes nothing; `settle` does."""
        read = [entry for entry in map(self._writer.state.find, dict.fromkeys(episode.shown)) if entry is not None]
        return self._distil(episode, read, self._step())

    async def _distil(self, episode: Episode, read: Sequence[Experience], step: int) -> Distilled:
        draft = await self._calls.distil(episode, [entry.text for entry in read], step=step)
        return Distilled(episode, tuple(entry.id for entry in read), draft)

    async def prepare(self, ready: Sequence[Distilled]) -> None:
        """Embed what the drafts that are written next say, all together."""
        texts = [op.text for done in ready if done.draft is not None for op in self._parsed(done.draft).ops if op.text]
        if len(texts) > 1:
            await self._thread.run(self._writer.prepare, texts)

    async def settle(self, done: Distilled) -> None:
        """Write what a distillation says."""
        if done.draft is None:
            self._counts["distil_failed"] += 1
            await self._thread.run(self._writer.drop, [done.episode.id])
            return
        await self._apply(done.draft, done.shown, self._home(done.episode.task.namespace), episode=done.episode)

    async def merge(self, namespace: str, *, chunk_size: int) -> int:
        """One merge pass over a namespace; returns the number of entries written."""
        entries = list(self._writer.state.space(namespace))
        return await merge_pass(entries, chunk_size=chunk_size, merge_chunk=functools.partial(self._merge_chunk, namespace))

    async def merge_redundant(self, namespace: str, policy: MergePolicy) -> int:
        """Merge groups of near entries if the namespace has more of them than the policy allows; returns the number of entries written."""
        found = await self._thread.run(self._writer.redundancy, namespace, policy, seed=derive_seed(self._step(), namespace))
        self.redundancy[namespace] = found.share
        if found.share <= policy.redundancy:
            return 0
        self._counts["merges_adaptive"] += 1
        return sum([len(await self._merge_chunk(namespace, cluster)) for cluster in found.clusters])

    async def answer(
        self,
        namespace: str,
        query: str,
        entry: Shown,
        *,
        name: str,
        keep: bool,
        request: Callable[[Answer], tuple[str, str]] | None = None,
    ) -> Answer:
        """The extractor's answer to a question; the entry itself, which credits nobody, if it gave none.

        ``name`` tells the question from all others; without ``keep`` (evaluation) nothing is stored. ``request`` makes of the answer the id
        and the text that `Store.commit` stores with the generation.
        """
        draft = await self._calls.ask(query, entry.text, step=self._step(), name=name)
        text = extractor.answer_text(draft.response)[: self._max_chars] if draft else ""
        self._counts["ask_fallbacks"] += not text
        if draft is None or not keep:
            return Answer(text or entry.text, None, entry.id)
        generation = self._named(draft, "" if text else "empty answer", question=name if self._in_turn else "")
        answer = Answer(text or entry.text, generation.id if text else None, entry.id)
        await self._thread.run(
            self._writer.write,
            [],
            namespace=namespace,
            author=Author("", 0, self._step()),
            generations=[generation],
            request=None if request is None else lambda _: request(answer),
        )
        if not text and self._in_turn:
            self._empty.append((generation.id, self._step()))
        elif not text:
            self._buffer.fail(generation.id, step=self._step())
        return answer

    async def _merge_chunk(self, namespace: str, ids: Sequence[str]) -> Sequence[str]:
        space = self._writer.state.space(namespace)
        shown = [i for i in ids if i in space]
        if len(shown) < 2:
            return ()
        draft = await self._calls.merge([space[i].text for i in shown], step=self._step(), name=f"{namespace}/{shown[0]}")
        if draft is None:
            self._counts["merge_failed"] += 1
            return ()
        done = await self._apply(draft, shown, namespace, merging=True)
        self._counts["merges"] += len(done.written)
        return [entry.id for entry in done.written]

    async def _apply(
        self, draft: Draft, shown: Sequence[str], namespace: str, *, episode: Episode | None = None, merging: bool = False
    ) -> Written:
        """Read a draft, write its operations, and tell the buffer when there was nothing to read or nothing to do."""
        parsed = self._parsed(draft, merging=merging)
        generation = self._named(draft, parsed.error)
        ops = self._resolved(parsed, shown, merging=merging)
        source = ((), None) if episode is None else ((episode.id,), episode.success)
        author = Author(generation.id, generation.versions[-1] if generation.versions else 0, generation.step, *source)
        done = await self._thread.run(
            self._writer.write, ops, namespace=namespace, author=author, generations=[generation], distilled=source[0]
        )
        self._count(done)
        if parsed.error:
            self._counts["parse_failures"] += 1
            self._buffer.fail(generation.id, step=self._step())
        elif parsed.is_noop:
            self._buffer.noop()
        return done

    def _parsed(self, draft: Draft, *, merging: bool = False) -> extractor.Parsed:
        votes = self._votes and not merging
        return extractor.parse(draft.response, max_ops=self._max_ops, max_chars=self._max_chars, allow_votes=votes)

    def _resolved(self, parsed: extractor.Parsed, shown: Sequence[str], *, merging: bool) -> list[BankOp]:
        ops: list[BankOp] = []
        for op in parsed.ops:
            resolved, outside = extractor.resolve(op, shown, merging=merging)
            self._counts["problem_target_out_of_range"] += outside
            if resolved is None:
                self._counts["problem_merge_op_refused"] += 1
            ops.append(resolved or BankOp(OpKind.NOOP))
        return ops

    def _count(self, done: Written) -> None:
        self._counts["entries_written"] += len(done.written)
        self._counts["entries_retired"] += len(done.retired)
        self._counts["dedups"] += done.duplicates
        self._counts["evictions"] += done.evicted
        for problem in done.problems:
            self._counts[f"problem_{problem.code}"] += 1

    def _named(self, draft: Draft, parse_error: str, *, question: str = "") -> Generation:
        name = f"g{self.generations + 1:08d}+{question.replace('~', '-')}"  # a ``~`` marks what was given up
        if not question or name in self._answers:
            self.generations += 1
            self._answers.clear()
            name = f"g{self.generations:08d}"
        else:
            self._answers.add(name)
        return dataclasses.replace(draft.generation, id=name, parse_error=parse_error)
