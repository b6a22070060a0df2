"""The story of one entry: who wrote it from what, what it replaced, whom it guided, what came of that, and how it left.

Owns: the records of that story and how they are gathered. Promises: reads only; numbers are sums over the episodes the bank remembers, so
they agree with its counters; ancestors are found however long the chain is, each once. Does not: print (``telling``) or draw.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any

from crl_jax.bank_tools.book import Book, Operation
from crl_jax.experience.bank import utility
from crl_jax.records import Experience, Generation, OpKind, Usage

Decode = Callable[[Sequence[int]], str]


@dataclasses.dataclass(frozen=True)
class Credit:
    """What the outcomes of guided episodes give a generation: their number and the sum of +1 and -1; ``waiting`` is what of it lies in the
    training buffer, ``trained`` how many updates used it."""

    episodes: int
    total: int
    waiting: tuple[float, int] | None
    trained: int

    @property
    def mean(self) -> float | None:
        """Mean reward in [-1, 1]; None without an episode."""
        return self.total / self.episodes if self.episodes else None


@dataclasses.dataclass(frozen=True)
class Writing:
    """The generation behind an entry. The texts are None when the ids cannot be decoded here."""

    id: str
    kind: str
    step: int
    versions: tuple[int, ...]
    parse_error: str
    prompt_tokens: int
    response_tokens: int
    prompt: str | None
    response: str | None
    entries: tuple[str, ...]
    credit: Credit


@dataclasses.dataclass(frozen=True)
class Relative:
    """An ancestor or a descendant, ``distance`` replacements away."""

    id: str
    distance: int
    text: str
    live: bool
    how: str


@dataclasses.dataclass(frozen=True)
class Step:
    """The episodes of one training step that read the entry; ``reward`` is their sum."""

    step: int
    episodes: int
    succeeded: int
    reward: float


@dataclasses.dataclass(frozen=True)
class Lineage:
    """Everything about one entry."""

    entry: Experience
    usage: Usage
    utility: float
    created_revision: int
    written_as: str
    writing: Writing | None
    parents: tuple[Relative, ...]  # all ancestors, near ones first
    children: tuple[Relative, ...]  # all descendants
    guided: tuple[tuple[str, str, int, bool, float], ...]  # (episode, reader, step, success, reward)
    steps: tuple[Step, ...]
    votes: tuple[tuple[int, str], ...]  # (revision, kind)
    left: tuple[int, int | None, str] | None  # (revision, step, how); None while it is live

    def to_dict(self) -> dict[str, Any]:
        """The same as plain values, for JSON."""
        found = dataclasses.asdict(self)
        if self.writing is not None:
            found["writing"]["credit"]["mean"] = self.writing.credit.mean
        return found


def lineage(book: Book, entry_id: str, *, decode: Decode | None = None) -> Lineage:
    """The story of an entry. Raises NotFound."""
    kept = book.find(entry_id)
    seen = book.guided(entry_id)
    by_step: dict[int, list[Any]] = {}
    for episode in seen:
        by_step.setdefault(episode.step, []).append(episode.guided)
    usage = book.usage(entry_id)
    return Lineage(
        entry=kept.entry,
        usage=usage,
        utility=utility(usage),
        created_revision=kept.created,
        written_as=how_written(book, entry_id),
        writing=_writing(book, kept.entry.generation_id, decode),
        parents=_relatives(book, entry_id, lambda i: book.entries[i].entry.parents if i in book.entries else ()),
        children=_relatives(book, entry_id, lambda i: book.children.get(i, ())),
        guided=tuple((e.guided.episode_id, e.guided.reader, e.step, e.guided.success, e.guided.reward) for e in seen),
        steps=tuple(
            Step(step, len(group), sum(g.success for g in group), sum(g.reward for g in group)) for step, group in sorted(by_step.items())
        ),
        votes=_votes(book, entry_id),
        left=_left(book, entry_id),
    )


def how_written(book: Book, entry_id: str) -> str:
    """In words: added, updated, merged, de-duplicated, imported or seeded; by the shape of the entry where the log is compacted away."""
    kept = book.entries[entry_id]
    operation = book.log.get(kept.created)
    if operation is None:
        return "replacement (its operation was compacted away)" if kept.entry.parents else "addition (its operation was compacted away)"
    return _WRITTEN.get(operation.reason) or _WRITTEN.get(operation.kind) or operation.kind


_WRITTEN = {
    "add": "addition",
    "update": "update",
    "merge": "merge",
    "dedup": "duplicate of what it replaced",
    "import": "import",
    "seed": "seed",
    "consolidate": "merge by `crl bank consolidate`",
}


def _left(book: Book, entry_id: str) -> tuple[int, int | None, str] | None:
    retired = book.entries[entry_id].retired
    if retired is None:
        return None
    operation = book.log.get(retired)
    heirs = [i for i in book.children.get(entry_id, ()) if book.entries[i].created == retired]
    into = f" into {heirs[0]}" if heirs else ""
    return retired, None if operation is None else operation.step, _leaving(operation) + into


def _leaving(operation: Operation | None) -> str:
    if operation is None:
        return "replaced or removed (its operation was compacted away)"
    if operation.reason == "evict":
        return "evicted: its namespace was full"
    if operation.reason == "dedup":
        return "de-duplicated"
    left = {
        OpKind.DOWNVOTE.value: "voted out",
        OpKind.RETIRE.value: "retired",
        OpKind.MERGE.value: "merged",
        OpKind.UPDATE.value: "updated",
    }
    return left.get(operation.kind, operation.kind)


def _votes(book: Book, entry_id: str) -> tuple[tuple[int, str], ...]:
    kinds = {OpKind.UPVOTE.value, OpKind.DOWNVOTE.value}
    return tuple((o.revision, o.kind) for o in book.operations_on(entry_id) if o.kind in kinds)


def _relatives(book: Book, entry_id: str, near: Callable[[str], Sequence[str]]) -> tuple[Relative, ...]:
    """Breadth first, each relative once."""
    found: dict[str, Relative] = {}
    edge, distance = [entry_id], 0
    while edge:
        distance += 1
        nearer = [i for source in edge for i in near(source) if i not in found and i != entry_id]
        edge = list(dict.fromkeys(nearer))
        for i in edge:
            kept = book.entries.get(i)
            text = kept.entry.text if kept else "(compacted away)"
            found[i] = Relative(i, distance, text, kept is not None and kept.retired is None, how_written(book, i) if kept else "unknown")
    return tuple(found.values())


def _writing(book: Book, generation_id: str, decode: Decode | None) -> Writing | None:
    generation = book.generation(generation_id) if generation_id else None
    if generation is None:
        return None
    entries = tuple(i for i in book.store.written_by(generation_id) if i in book.entries)
    return Writing(
        id=generation.id,
        kind=generation.kind.value,
        step=generation.step,
        versions=tuple(dict.fromkeys(generation.versions)),
        parse_error=generation.parse_error,
        prompt_tokens=len(generation.prompt_ids),
        response_tokens=len(generation.response_ids),
        prompt=_text(decode, generation.prompt_ids),
        response=_text(decode, generation.response_ids),
        entries=entries,
        credit=_credit(book, generation, entries),
    )


def _text(decode: Decode | None, ids: Sequence[int]) -> str | None:
    return None if decode is None else decode(ids)


def _credit(book: Book, generation: Generation, entries: Sequence[str]) -> Credit:
    """An episode counts once however many entries of the generation it read; answers to questions are not among them."""
    outcomes: dict[str, bool] = {}
    for i in entries:
        for n, seen in enumerate(book.guided(i)):
            outcomes[seen.guided.episode_id or f"{i}/{n}"] = seen.guided.success
    saved = json.loads(book.store.load_buffer() or '{"waiting": [], "trained": []}') if book.revision == book.newest else None
    waiting = next(((total, n) for i, total, n, _ in saved["waiting"] if i == generation.id), None) if saved else None
    trained = next((n for i, n, _ in saved["trained"] if i == generation.id), 0) if saved else 0
    return Credit(len(outcomes), sum(1 if success else -1 for success in outcomes.values()), waiting, trained)
