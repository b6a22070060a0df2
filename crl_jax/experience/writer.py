"""The one place that changes the bank: embed, apply, commit, index, in that order, on one thread.

Owns: the current `BankState` and the index that mirrors it. Promises: changes are serialised; a batch is committed before it becomes
visible, so whatever a search returns is durable; readers take ``state`` by reference and never wait. Does not: talk to the extractor or
know the event loop (its methods block; the manager runs them in the writer thread).
"""

from __future__ import annotations

import dataclasses
import sqlite3
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from crl_jax.experience import bank
from crl_jax.experience.bank import Author, BankState, Guided, Problem
from crl_jax.experience.eviction import Eviction, plan_eviction
from crl_jax.experience.index import Index, has_direction
from crl_jax.experience.merging import MergePolicy, Redundancy, redundancy
from crl_jax.experience.protocols import Embedder
from crl_jax.experience.query_vectors import QueryVectors
from crl_jax.experience.recover import forget_snapshots
from crl_jax.experience.store import Change, Observation, Store
from crl_jax.records import BankOp, Experience, Generation, OpKind, Usage

_EMBED_AT_ONCE = 512
_REMEMBERED = 4096  # embeddings of texts; 6 MiB


class Written(NamedTuple):
    """What a batch did: new entries, removed ids, how many adds were duplicates and how many entries were evicted, and the problems."""

    written: tuple[Experience, ...]
    retired: tuple[str, ...]
    duplicates: int
    evicted: int
    problems: tuple[Problem, ...]


@dataclasses.dataclass(frozen=True)
class WritePolicy:
    """``capacity`` per namespace; ``protect_rare`` as in `plan_eviction`. ``dedup_cosine`` > 1 switches de-duplication off;
    ``keep_better`` keeps an older entry of utility > 0.5."""

    capacity: int = 20_000
    eviction: Eviction = Eviction.FIFO
    protect_rare: float = 0.1
    dedup_cosine: float = 0.95
    keep_better: bool = False


class Lesson(NamedTuple):
    """An entry to bring in from outside a run. ``usage`` is what other runs' episodes had counted for it."""

    text: str
    namespace: str
    outcome: bool | None = None
    usage: Usage = Usage()


class Writer:
    """Mutable: owns ``state`` and ``index``. Call its methods from one thread at a time. ``purpose`` is the reason that is logged for
    changes that give none, ``decay`` what a step leaves of recent counts."""

    def __init__(
        self,
        store: Store,
        embedder: Embedder,
        make_index: Callable[[], Index],
        policy: WritePolicy,
        *,
        purpose: str = "",
        decay: Callable[[], float] = lambda: 1.0,
    ) -> None:
        self._decay = decay
        self._purpose = purpose
        self._store = store
        self._embedder = embedder
        self._make_index = make_index
        self._policy = policy
        self.state = BankState()
        self.index = make_index()
        self._vectors = QueryVectors(_REMEMBERED, Counter())  # of texts written lately: most lessons have been said before
        self.broken: BaseException | None = None  # what kept the index from following the state: nothing more should be written
        self.vectors_repaired = 0
        self.unsearchable: set[str] = set()  # live entries whose text this embedder gives no direction; kept, but never found

    def load(self) -> None:
        """Take the stored state and index it. Entries without a usable vector (other embedder, damaged bytes) are embedded again and
        counted; what still has none stays in the bank and is counted as ``unsearchable``."""
        self._adopt(self._store.load())

    def rewind(self, revision: int, *, log_row: int = 0, also: Callable[[sqlite3.Connection], None] | None = None) -> None:
        """Back to a revision of the past (resume from a checkpoint; `Store.rewind`): store, state and a new index; later snapshots go."""

        def finish(db: sqlite3.Connection) -> None:
            if also is not None:
                also(db)
            forget_snapshots(self._store, after=revision)  # before the commit: a kill after it would leave them for good

        self._adopt(self._store.rewind(revision, log_row=log_row, also=finish))

    def _adopt(self, state: BankState) -> None:
        stored, _ = self._store.vectors(fingerprint=self._embedder.fingerprint, dim=self._embedder.dim)
        vectors = {i: vector for i, vector in stored.items() if has_direction(vector)}
        missing = [entry for space in state.spaces.values() for entry in space.values() if entry.id not in vectors]
        for part in (missing[n : n + _EMBED_AT_ONCE] for n in range(0, len(missing), _EMBED_AT_ONCE)):  # a start in vain leaves less to do
            made = zip([e.id for e in part], self._embedder.embed([e.text for e in part]), strict=True)
            repaired = {i: vector for i, vector in made if has_direction(vector)}
            self._store.put_vectors(repaired, fingerprint=self._embedder.fingerprint)
            vectors |= repaired
            self.vectors_repaired += len(repaired)
        index = self._make_index()
        for namespace, space in state.spaces.items():
            if found := [i for i in space if i in vectors]:
                index.add(found, np.stack([vectors[i] for i in found]), namespace=namespace)
        self.unsearchable = {entry.id for entry in missing if entry.id not in vectors}
        old, self.index, self.state = self.index, index, state
        old.close()

    def prepare(self, texts: Sequence[str]) -> None:
        """Embed texts of the writes that come next in one call, which costs half of as many calls of one text."""
        self._embedded([text for text in texts if text.strip()])

    def _embedded(self, texts: Sequence[str]) -> dict[str, Float[np.ndarray, " d"]]:
        known, missing = self._vectors.look_up(texts)
        if missing:
            made = dict(zip(missing, self._embedder.embed(missing), strict=True))
            self._vectors.store(made)
            known |= made
        return known

    def write(
        self,
        ops: Sequence[BankOp],
        *,
        namespace: str,
        author: Author,
        generations: Sequence[Generation] = (),
        distilled: Sequence[str] = (),
        reason: str = "",
        request: Callable[[Written], tuple[str, str]] | None = None,
    ) -> Written:
        """Apply one batch of operations of one author. ``generations`` are stored, and the episodes ``distilled`` leave the inbox, in the
        same transaction, in which ``request`` stores an id and the answer it makes of what was done. With ``reason`` "dedup" new entries
        inherit the usage of those they replace."""
        embedded = self._embedded([op.text for op in ops if op.text.strip()])
        batch = _Batch(self.state, namespace, author, self.index, self._policy, self._decay())
        for op_index, op in enumerate(ops):
            vector = embedded.get(op.text)
            if vector is not None and not has_direction(vector):
                batch.problems.append(Problem("unembeddable_text", op.text[:80]))
            else:
                batch.apply(op, op_index, vector, reason or self._purpose)
        batch.evict()
        return self._commit(batch, generations, distilled, request)

    def bring_in(self, lessons: Sequence[Lesson], *, step: int, reason: str) -> Written:
        """Add entries of many namespaces and outcomes, which no generation wrote, in one transaction: all of them, or none.

        Usage is counted as episodes of the entry's own family, at the step it was shown last; an entry that was a duplicate of one that is
        kept brings none. Raises ValueError, and changes nothing, for a text that the embedder gives no direction.
        """
        texts = list(dict.fromkeys(lesson.text for lesson in lessons))
        parts = [texts[n : n + _EMBED_AT_ONCE] for n in range(0, len(texts), _EMBED_AT_ONCE)]
        embedded = {text: vector for part in parts for text, vector in zip(part, self._embedder.embed(part), strict=True)}
        if lost := [text for text, vector in embedded.items() if not has_direction(vector)]:
            raise ValueError(f"{len(lost)} texts have no embedding, the first is {lost[0][:60]!r}: correct or remove them")
        batch = _Batch(self.state, "", Author("", 0, step), self.index, self._policy)
        counted: list[tuple[Usage, str]] = []
        for n, lesson in enumerate(lessons):
            batch.begin(lesson.namespace, Author("", 0, step, (), lesson.outcome))
            before = len(batch.written)
            batch.apply(BankOp(OpKind.ADD, lesson.text), n, embedded[lesson.text], reason)
            counted += [(lesson.usage, entry.id) for entry in batch.written[before:]]
        for namespace in dict.fromkeys(lesson.namespace for lesson in lessons):
            batch.begin(namespace, Author("", 0, step))
            batch.evict()
        for usage, entry_id in counted:
            batch.recall(entry_id, usage, reason)
        return self._commit(batch)

    def _commit(
        self,
        batch: _Batch,
        generations: Sequence[Generation] = (),
        distilled: Sequence[str] = (),
        request: Callable[[Written], tuple[str, str]] | None = None,
    ) -> Written:
        done = Written(tuple(batch.written), tuple(batch.retired), batch.duplicated, batch.evicted, tuple(batch.problems))
        self._store.commit(
            batch.changes,
            vectors=batch.vectors,
            fingerprint=self._embedder.fingerprint,
            generations=generations,
            request=None if request is None else request(done),
            distilled=distilled,
        )
        stale = [i for i in batch.retired if i not in batch.vectors and i not in self.unsearchable]
        fresh: dict[str, list[str]] = {}
        for entry in batch.written:
            if entry.id not in batch.retired:
                fresh.setdefault(entry.namespace, []).append(entry.id)
        try:
            for namespace, ids in fresh.items():  # before the removal: knowledge is replaced, never missing in between
                self.index.add(ids, np.stack([batch.vectors[i] for i in ids]), namespace=namespace)
            self.state = batch.state
            if stale:
                self.index.remove(stale)
        except BaseException as error:  # what is committed is the state, whatever became of its index
            self.state, self.broken = batch.state, error
            raise
        self.unsearchable.difference_update(batch.retired)
        return done

    def observe(
        self,
        guided: Sequence[Guided],
        *,
        step: int,
        decay: float = 1.0,
        request: tuple[str, str] | None = None,
        also: Callable[[sqlite3.Connection], None] | None = None,
    ) -> None:
        """Count finished episodes (`bank.observe`); ``request`` and ``also``: see `Store.commit`."""
        known = [item for item in guided if not item.experience_id or self.state.find(item.experience_id) is not None]
        state = bank.observe(self.state, known, step=step, decay=decay)
        changes = [] if state is self.state else [Observation(self.state.revision, tuple(known), step, state, decay)]
        if changes or request is not None or also is not None:
            self._store.commit(changes, request=request, also=also)
        self.state = state

    def drop(self, episode_ids: Sequence[str]) -> None:
        """Episodes that will not be distilled leave the inbox."""
        self._store.drop_inbox(episode_ids)

    def redundancy(self, namespace: str, policy: MergePolicy, *, seed: int) -> Redundancy:
        """How redundant a namespace is, by a seeded sample of its entries."""
        ids = list(self.state.space(namespace))
        if len(ids) > policy.sample:
            picks: list[int] = np.random.default_rng(seed).choice(len(ids), policy.sample, replace=False).tolist()
            ids = [ids[n] for n in sorted(picks)]
        vectors = self.vectors(ids)
        return redundancy(self.index, vectors, namespace=namespace, cosine=policy.cosine, largest=policy.chunk)

    def deduplicate(self, namespace: str) -> int:
        """Replace every group of entries that are duplicates by the policy with one entry; returns how many entries left. The text, the
        author and so the credit are those of the group's best entry: of the highest utility if ``keep_better``, else of the newest."""
        total = 0
        while left := self._dedup_pass(namespace):  # a group larger than one search finds takes another pass
            total += left
        return total

    def _dedup_pass(self, namespace: str) -> int:
        left = 0
        for start in list(self.state.space(namespace)):
            space = self.state.space(namespace)
            vector = self.vectors([start]).get(start) if start in space else None
            same = _Batch(self.state, namespace, Author("", 0, 0), self.index, self._policy).duplicates(vector)
            if len(same) < 2:
                continue
            usage = {i: bank.utility(self.state.usage[i]) if i in self.state.usage else 0.5 for i in same}
            kept = space[max(same, key=lambda i: (usage[i] if self._policy.keep_better else 0.0, i))]
            author = Author(kept.generation_id, kept.author_version, kept.step, kept.episode_ids, kept.outcome)
            done = self.write([BankOp(OpKind.UPDATE, kept.text, same)], namespace=namespace, author=author, reason="dedup")
            left += len(done.retired) - len(done.written)
        return left

    def vectors(self, ids: Sequence[str]) -> dict[str, Float[np.ndarray, " d"]]:
        """Stored embeddings of entries, as far as there are usable ones."""
        found, _ = self._store.vectors(fingerprint=self._embedder.fingerprint, dim=self._embedder.dim, ids=ids)
        return {i: found[i] for i in ids if i in found}


class _Batch:
    """The changes of one transaction while they are being worked out."""

    def __init__(self, state: BankState, namespace: str, author: Author, index: Index, policy: WritePolicy, decay: float = 1.0) -> None:
        self._decay = decay
        self.state = state
        self._namespace = namespace
        self._author = author
        self._index = index
        self._policy = policy
        self.changes: list[Change | Observation] = []
        self.vectors: dict[str, Float[np.ndarray, " d"]] = {}
        self.written: list[Experience] = []
        self.retired: list[str] = []
        self.problems: list[Problem] = []
        self.duplicated = 0
        self.evicted = 0
        self._pending = _Pending()

    def begin(self, namespace: str, author: Author) -> None:
        """What follows is of this author and goes into this namespace."""
        self._namespace, self._author = namespace, author

    def apply(self, op: BankOp, op_index: int, vector: Float[np.ndarray, " d"] | None, reason: str) -> None:
        same = self.duplicates(vector) if op.kind is OpKind.ADD else ()
        reason = "dedup" if same else reason
        if same:
            self.duplicated += 1
            better = (
                self._policy.keep_better and max(bank.utility(self.state.usage[i]) if i in self.state.usage else 0.5 for i in same) > 0.5
            )
            op = BankOp(OpKind.NOOP) if better else BankOp(OpKind.UPDATE, op.text, same)
        self._log(op, op_index, reason, vector)

    def evict(self) -> None:
        policy = self._policy
        gone = plan_eviction(
            self.state, self._namespace, capacity=policy.capacity, policy=policy.eviction, protect_rare=policy.protect_rare
        )
        if gone:
            self.evicted = len(gone)
            self._log(BankOp(OpKind.RETIRE, "", gone), 0, "evict", None)

    def _log(self, op: BankOp, op_index: int, reason: str, vector: Float[np.ndarray, " d"] | None) -> None:
        inherit = reason == "dedup"
        base = self.state.revision
        decay = self._decay if inherit else 1.0
        applied = bank.apply(
            self.state, op, namespace=self._namespace, author=self._author, op_index=op_index, inherit_usage=inherit, decay=decay
        )
        self.changes.append(Change(base, op, self._namespace, self._author, op_index, applied, inherit, reason, decay))
        self.state = applied.state
        self.retired.extend(applied.retired)
        self.problems.extend(applied.problems)
        if applied.written is not None and vector is not None:
            self.written.append(applied.written)
            self.vectors[applied.written.id] = vector
            self._pending.add(applied.written.id, vector)

    def recall(self, entry_id: str, usage: Usage, reason: str) -> None:
        """Count what was counted elsewhere for a new entry that is still there, as episodes of its own family and as votes."""
        entry = self.state.find(entry_id)
        if entry is None:
            return
        wins = [True] * usage.succeeded + [False] * (usage.shown - usage.succeeded)
        seen = tuple(Guided(entry_id, won, f"{reason}:{entry_id}/{n}", entry.namespace, float(won)) for n, won in enumerate(wins))
        if seen:
            state = bank.observe(self.state, seen, step=max(0, usage.last_shown_step))
            self.changes.append(Observation(self.state.revision, seen, max(0, usage.last_shown_step), state))
            self.state = state
        self.begin(entry.namespace, Author("", 0, entry.step))
        for _ in range(usage.votes):
            self._log(BankOp(OpKind.UPVOTE, "", (entry_id,)), 0, reason, None)

    def duplicates(self, vector: Float[np.ndarray, " d"] | None) -> tuple[str, ...]:
        """Live entries of this namespace at least ``dedup_cosine`` similar: in the index, or written earlier in this batch."""
        if vector is None or self._policy.dedup_cosine > 1:
            return ()
        space = self.state.space(self._namespace)
        hits = self._index.search(vector[None, :], 8, namespace=self._namespace)[0]
        found = [hit.id for hit in hits if hit.similarity >= self._policy.dedup_cosine]
        found += self._pending.near(vector, self._policy.dedup_cosine)
        return tuple(i for i in dict.fromkeys(found) if i in space)


class _Pending:
    """Vectors of one batch, in rows that double when they are full: thousands of imported entries are compared with each other."""

    def __init__(self) -> None:
        self._ids: list[str] = []
        self._rows: Float[np.ndarray, "n d"] = np.zeros((0, 0), np.float32)

    def add(self, experience_id: str, vector: Float[np.ndarray, " d"]) -> None:
        if len(self._ids) == len(self._rows):
            grown = np.zeros((max(8, 2 * len(self._rows)), len(vector)), np.float32)
            grown[: len(self._rows)] = self._rows if len(self._rows) else 0
            self._rows = grown
        self._rows[len(self._ids)] = vector / np.linalg.norm(vector)
        self._ids.append(experience_id)

    def near(self, vector: Float[np.ndarray, " d"], cosine: float) -> list[str]:
        """Ids at least ``cosine`` similar, in the order they were added."""
        if not self._ids:
            return []
        similar = self._rows[: len(self._ids)] @ (vector / np.linalg.norm(vector))
        return [self._ids[n] for n in np.flatnonzero(similar >= cosine).tolist()]
