"""The `Index` on ScaNN: built searchers that never change, plus an exactly searched tail of what came after the build.

Owns: when to build what, per namespace. Up to 2,000 entries nothing is built (exact); above, asymmetric hashing with exact re-ordering;
from 100,000 a tree on top. Promises: what `Index` promises; a search never waits for a build; one build at a time runs in the background,
at low priority, and its result takes over in one assignment; a build whose recall@8 is below 0.98 is made stronger before it serves, and
one that falls below it on real queries is made stronger while it serves; an exception in the background is raised by the next write. Does
not: update a built searcher in place (its mutation calls lose ids on bad input); removed entries are masked until the next build.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, wait

import numpy as np

from crl_jax.experience.index import Ledger
from crl_jax.experience.index_rows import Hits, Rows, Vectors, unit_rows, usable
from crl_jax.experience.recall_watch import RecallWatch
from crl_jax.experience.retrieve import Candidate
from crl_jax.experience.scann_build import (
    LADDER,
    RECALL_GOAL,
    TREE_FROM,
    Searcher,
    build_searcher,
    first_level,
    import_scann,
    recall,
    sample_queries,
)
from crl_jax.experience.scann_search import Part, Segment, extended
from crl_jax.experience.thread import DaemonThread

EXACT_BELOW = 2_000
TAIL_MAX = 2_048  # entries: each thousand adds about 0.04 ms to a query


@dataclasses.dataclass
class _Space:
    """Mutable, one namespace: the blocks that its segments are views of. ``level`` is a place on the ladder of settings."""

    base: Rows
    tail: Rows
    watch: RecallWatch
    parts: tuple[Part, ...] = ()  # of the tail
    searcher: Searcher | None = None
    level: int = 0
    building: bool = False
    removed_since: list[int] = dataclasses.field(default_factory=list[int])  # serials, while a build runs


class ScannIndex:
    """ScaNN searchers per namespace with an exact tail. ``close`` waits at most ``close_timeout_s`` for a running build.

    ``tail_min`` and ``tail_fraction`` (of the built entries) say from how many unbuilt or removed entries on a build begins;
    ``check_every`` is the mean number of queries between two that are checked against exact search (0 = none).
    """

    def __init__(
        self,
        dim: int,
        *,
        tail_min: int = 64,
        tail_fraction: float = 0.1,
        tail_max: int = TAIL_MAX,
        exact_below: int = EXACT_BELOW,
        tree_from: int = TREE_FROM,
        threads: int = 1,
        check_every: int = 256,
        seed: int = 0,
        close_timeout_s: float = 120.0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        import_scann()  # before any worker thread starts
        self._dim = dim
        self._tail_min, self._tail_fraction, self._tail_max = tail_min, tail_fraction, tail_max
        self._exact_below, self._tree_from, self._threads = exact_below, tree_from, threads
        self._check_every = check_every
        self._seed = seed
        self._close_timeout_s = close_timeout_s
        self._clock = clock
        self._spaces: dict[str, _Space] = {}
        self._segments: dict[str, Segment] = {}
        self._ledger = Ledger()
        self._version = 0
        self._write = threading.Lock()
        self._keeper: DaemonThread | None = None  # plans background work, in Python
        self._engine: DaemonThread | None = None  # does it, in ScaNN: low priority is for calls without the interpreter's lock
        self._jobs: set[Future[None]] = set()
        self._jobs_lock = threading.Lock()  # apart, for a search that finds a check due takes it: never for long
        self._failure: BaseException | None = None
        self._closed = threading.Event()
        self.builds = 0  # finished builds, for metrics
        self.rebuilds_for_recall = 0  # times a setting was made stronger

    def add(self, ids: Sequence[str], vectors: Vectors, *, namespace: str) -> None:
        rows = unit_rows(vectors, dim=self._dim)
        with self._write:
            self._raise_failure()
            serials = self._ledger.enter(ids, len(rows), namespace)
            if namespace not in self._spaces:
                watch = RecallWatch(every=max(1, self._check_every), seed=self._seed)
                self._spaces[namespace] = _Space(Rows(self._dim), Rows(self._dim), watch)
            space = self._spaces[namespace]
            space.tail.append(ids, rows, np.asarray(serials, np.int64))
            space.parts = extended(space.parts, space.tail.vectors)
            self._publish(namespace)
            self._maybe_build(namespace)

    def remove(self, ids: Sequence[str]) -> None:
        with self._write:
            self._raise_failure()
            gone = self._ledger.leave(ids)
            self._version += 1
            for namespace, serials in gone.items():
                space = self._spaces[namespace]
                self._mark(space, serials)
                if space.building:
                    space.removed_since += serials
                elif space.tail.crowded():
                    space.tail = space.tail.kept()
                    space.parts = extended((), space.tail.vectors)
                self._publish(namespace)
                self._maybe_build(namespace)

    def search(self, queries: Vectors, k: int, *, namespace: str) -> list[list[Candidate]]:
        unit, kept = usable(queries, dim=self._dim, k=k)
        segment = self._segments.get(namespace)
        if segment is None or not kept:
            return [[] for _ in range(len(queries))]
        answers = segment.search(unit, k)
        hashed = segment.searcher is not None and segment.searcher.setting.structure != "brute"
        if hashed and self._check_every and self._spaces[namespace].watch.offer(unit, self._clock()):
            self._submit(lambda: self._check(namespace))
        if len(kept) == len(queries):
            return answers
        found: list[Hits] = [[] for _ in range(len(queries))]
        for i, hits in zip(kept, answers, strict=True):
            found[i] = hits
        return found

    def size(self, namespace: str) -> int:
        segment = self._segments.get(namespace)
        return segment.base.live + segment.tail.live if segment else 0

    def stats(self) -> dict[str, float]:
        """As `Index.stats`, and ``recall/NAMESPACE`` for each namespace with a searcher."""
        segments = dict(self._segments)
        by_space = {f"recall/{name}": self._spaces[name].watch.estimate() for name, s in segments.items() if s.searcher is not None}
        return {
            "recall": min(by_space.values(), default=1.0),
            "builds": self.builds,
            "rebuilds_for_recall": self.rebuilds_for_recall,
            "tail": sum(s.tail.live for s in segments.values()),
            "dead": sum(s.base.dead + s.tail.dead for s in segments.values()),
            "entries": sum(s.base.live + s.tail.live for s in segments.values()),
            **by_space,
        }

    def searcher(self, namespace: str) -> Searcher | None:
        """What serves the built part of a namespace now: to measure it, or to see its setting."""
        segment = self._segments.get(namespace)
        return segment.searcher if segment else None

    def wait_builds(self, timeout_s: float) -> None:
        """Wait until nothing runs in the background. Raises TimeoutError after ``timeout_s``, or the exception of a failed build."""
        end = time.monotonic() + timeout_s
        while True:
            self._raise_failure()
            with self._jobs_lock:
                running = list(self._jobs)
            if not running:
                return
            wait(running, max(0.0, end - time.monotonic()))
            if time.monotonic() >= end:
                raise TimeoutError(f"a ScaNN build is still running after {timeout_s} s")

    def rebuild(self, namespace: str) -> None:
        """Begin a build of this namespace in the background now, whatever its tail; nothing happens if one is under way."""
        with self._write:
            if namespace in self._spaces and not self._spaces[namespace].building:
                self._submit_build(namespace)

    def close(self) -> None:
        with self._jobs_lock:
            self._closed.set()
            for thread in (self._keeper, self._engine):
                if thread is not None:
                    thread.shutdown()
        self.wait_builds(self._close_timeout_s)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise RuntimeError("a background ScaNN build failed") from self._failure

    # ------------------------------------------------------------------------------------------------------------ inside (lock held)

    def _publish(self, namespace: str) -> None:
        space = self._spaces[namespace]
        base, tail = space.base.view(self._version), space.tail.view(self._version)
        self._segments[namespace] = Segment(space.searcher, base, space.parts, tail)

    def _mark(self, space: _Space, serials: list[int]) -> None:
        """Mark rows as removed (serials in rising order; those of the tail are greater than those of the base)."""
        gone = np.asarray(serials, np.int64)
        cut = int(np.searchsorted(gone, space.tail.first_serial()))
        for block, part in ((space.base, gone[:cut]), (space.tail, gone[cut:])):
            if len(part):
                block.remove(part, self._version)

    def _maybe_build(self, namespace: str) -> None:
        space, built = self._spaces[namespace], len(self._spaces[namespace].base)
        limit = max(self._tail_min, self._tail_fraction * built)
        due = len(space.tail) > min(limit, max(self._tail_min, self._tail_max)) or space.base.dead > limit
        if due and not space.building and (built or len(space.tail) - space.tail.dead >= self._exact_below):
            self._submit_build(namespace)

    def _submit_build(self, namespace: str) -> None:
        self._spaces[namespace].building = True
        self._submit(lambda: self._rebuild(namespace))

    # ------------------------------------------------------------------------------------------------------------ in the background

    def _submit(self, work: Callable[[], None]) -> None:
        with self._jobs_lock:
            if self._closed.is_set():
                return
            if self._keeper is None:
                self._engine = DaemonThread("crl-scann-build", low_priority=True)
                self._keeper = DaemonThread("crl-index")
            job = self._keeper.submit(work)
            self._jobs.add(job)
        job.add_done_callback(self._ended)

    def _ended(self, job: Future[None]) -> None:
        error = None if job.cancelled() else job.exception()
        if error is not None and not (self._closed.is_set() and isinstance(error, CancelledError | RuntimeError)):
            self._failure = error
        with self._jobs_lock:
            self._jobs.discard(job)

    def _rebuild(self, namespace: str) -> None:
        """Build from what is live now; then move over to it, with what was added and removed meanwhile."""
        with self._write:
            space = self._spaces[namespace]
            base, tail, level = space.base.view(self._version), space.tail.view(self._version), space.level
            space.removed_since = []
        fresh = space.base.kept(base).joined(space.tail.kept(tail))  # the blocks are replaced by this thread only
        searcher, recalls = None, []
        if len(fresh) and len(fresh) >= self._exact_below:
            first = first_level(len(fresh), tree_from=self._tree_from)
            searcher, level, recalls = self._good_searcher(fresh.vectors, max(first, level - 1), space.watch)
        with self._write:
            newer = space.tail.kept(start=tail.n)
            space.base, space.tail = (fresh, newer) if searcher else (Rows(self._dim), fresh.joined(newer))
            space.parts = extended((), space.tail.vectors)
            space.searcher, space.level, space.building = searcher, level, False
            self._mark(space, sorted(s for s in space.removed_since if s <= fresh.last_serial()))
            space.watch.restart(recalls)
            self._publish(namespace)
            self.builds += searcher is not None
            self._maybe_build(namespace)

    def _good_searcher(self, vectors: Vectors, level: int, watch: RecallWatch) -> tuple[Searcher, int, list[float]]:
        """The first searcher from ``level`` up the ladder whose recall is good, its level, and the recall of each query asked."""
        assert self._engine is not None
        real = watch.recent()
        made = sample_queries(vectors, 128, np.random.default_rng(self._seed))
        queries = np.stack([*real, *made])
        searcher: Searcher | None = None
        while True:
            setting = LADDER[level]
            if searcher is not None and searcher.setting.structure == setting.structure:
                searcher = searcher.set_to(setting)
            else:
                searcher = self._engine.submit(build_searcher, vectors, setting, threads=self._threads).result()
            found = self._engine.submit(recall, searcher, vectors, queries).result()
            parts = [found, found[: len(real)]] if len(real) >= 32 else [found]  # good over all, and on the real ones
            if level == len(LADDER) - 1 or min(float(part.mean()) for part in parts) >= RECALL_GOAL:
                return searcher, level, found.tolist()
            level += 1
            self.rebuilds_for_recall += 1

    def _check(self, namespace: str) -> None:
        """Compare some real queries with the exact answer; if recall is low, search harder at once, or build what can."""
        assert self._engine is not None
        space, started = self._spaces[namespace], self._clock()
        queries, searcher, base = space.watch.take(), space.searcher, space.base
        recalls: list[float] = []
        if searcher is not None and queries:
            recalls = self._engine.submit(recall, searcher, base.vectors, np.stack(queries)).result().tolist()
        space.watch.settle(recalls, took_s=self._clock() - started, now=self._clock())
        with self._write:
            if space.searcher is None or space.building or not space.watch.low():
                return
            space.level += 1
            self.rebuilds_for_recall += 1
            space.watch.restart([])
            if LADDER[space.level].structure == space.searcher.setting.structure:
                space.searcher = space.searcher.set_to(LADDER[space.level])
                self._publish(namespace)
            else:
                space.level += 1  # the build begins one below what it is told
                self._submit_build(namespace)
