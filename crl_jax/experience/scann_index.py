"""The `Index` on ScaNN: built segments that never change, plus an exactly searched tail of what came after the build.

Owns: when to build what. Up to 2,000 vectors brute force (exact); above, asymmetric hashing with exact re-ordering; from 100,000 a tree
on top (a tree over few vectors loses recall). Promises: what `Index` promises; a search never waits for a build; a build runs on a
background thread, its result replaces the segment in one assignment, and its exception is raised by the next write. Does not: update a
built searcher in place (its mutation calls lose ids on bad input); removed ids are masked until the next build.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
import sys
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from crl_jax.experience.index import Vectors, check_known, check_new, top_k, unit_rows, usable
from crl_jax.experience.retrieve import Candidate

BRUTE_BELOW = 2_000
TREE_FROM = 100_000
_import_lock = threading.Lock()


def import_scann() -> Any:
    """The module ``scann``, imported while TensorFlow looks absent.

    ScaNN imports TensorFlow if it can find it: that takes many seconds, and fails with an undefined symbol for all but one TensorFlow
    version. Only its TensorFlow ops need it. TensorFlow itself is left as it was. Raises ImportError naming the package to install.
    """
    with _import_lock:
        if "scann" in sys.modules:
            return sys.modules["scann"]
        absent = object()
        saved: Any = sys.modules.get("tensorflow", absent)
        sys.modules["tensorflow"] = None  # type: ignore[assignment]  # makes `import tensorflow` raise ModuleNotFoundError
        try:
            return importlib.import_module("scann")
        except ImportError as error:
            raise ImportError("ScannIndex needs ScaNN: pip install 'scann==1.4.2', or use the exact index") from error
        finally:
            if saved is absent:
                del sys.modules["tensorflow"]
            else:
                sys.modules["tensorflow"] = saved


def build_searcher(vectors: Vectors, *, brute_below: int = BRUTE_BELOW, tree_from: int = TREE_FROM, threads: int = 1) -> Any:
    """A ScaNN searcher over unit rows (dot product = cosine), of the kind that suits their number."""
    n = len(vectors)
    scann = import_scann()
    builder = scann.scann_ops_pybind.builder(vectors, 10, "dot_product").set_n_training_threads(threads)
    if n < brute_below:
        return builder.score_brute_force().build()
    if n >= tree_from:
        leaves = int(math.sqrt(n))
        builder = builder.tree(num_leaves=leaves, num_leaves_to_search=max(1, leaves // 5), training_sample_size=min(n, 250_000))
    return builder.score_ah(2, anisotropic_quantization_threshold=0.2).reorder(100).build()


@dataclasses.dataclass(frozen=True)
class _Segment:
    """Everything one search of one namespace needs; replaced, never changed. ``dead`` ids are in base or tail but removed."""

    searcher: Any
    base_ids: tuple[str, ...]
    base: Vectors
    tail_ids: tuple[str, ...]
    tail: Vectors
    dead: frozenset[str]

    def live(self) -> tuple[tuple[str, ...], Vectors]:
        ids = (*self.base_ids, *self.tail_ids)
        keep = [n for n, i in enumerate(ids) if i not in self.dead]
        return tuple(ids[n] for n in keep), np.concatenate([self.base, self.tail])[keep]


class ScannIndex:
    """ScaNN searchers per namespace with an exact tail. ``close`` waits at most ``close_timeout_s`` for a running build."""

    def __init__(
        self,
        dim: int,
        *,
        tail_min: int = 64,
        tail_fraction: float = 0.1,
        brute_below: int = BRUTE_BELOW,
        tree_from: int = TREE_FROM,
        threads: int = 1,
        close_timeout_s: float = 60.0,
    ) -> None:
        import_scann()  # before any worker thread starts
        self._dim = dim
        self._tail_min = tail_min
        self._tail_fraction = tail_fraction
        self._build = {"brute_below": brute_below, "tree_from": tree_from, "threads": threads}
        self._close_timeout_s = close_timeout_s
        self._segments: dict[str, _Segment] = {}
        self._home: dict[str, str] = {}
        self._gone: set[str] = set()  # they never come back: a searcher, or a build under way, may still hold their old vectors
        self._write = threading.Lock()
        self._builds: dict[str, threading.Thread] = {}
        self._failure: BaseException | None = None
        self.builds = 0  # finished builds, for metrics

    def add(self, ids: Sequence[str], vectors: Vectors, *, namespace: str) -> None:
        rows = unit_rows(vectors, dim=self._dim)
        with self._write:
            self._raise_failure()
            check_new(ids, len(rows), self._home, self._gone)
            old = self._segments.get(namespace) or self._nothing()
            grown = dataclasses.replace(old, tail_ids=(*old.tail_ids, *ids), tail=np.concatenate([old.tail, rows]))
            self._segments[namespace] = grown
            self._home.update(dict.fromkeys(ids, namespace))
            self._maybe_build(namespace)

    def remove(self, ids: Sequence[str]) -> None:
        gone = set(ids)
        with self._write:
            self._raise_failure()
            check_known(gone, self._home)
            for namespace in {self._home[i] for i in gone}:
                old = self._segments[namespace]
                mine = {i for i in gone if self._home[i] == namespace}
                keep = [n for n, i in enumerate(old.tail_ids) if i not in mine]
                dead = old.dead | (mine - set(old.tail_ids))
                tail_ids = tuple(old.tail_ids[n] for n in keep)
                self._segments[namespace] = dataclasses.replace(old, tail_ids=tail_ids, tail=old.tail[keep], dead=dead)
                self._maybe_build(namespace)
            for i in gone:
                del self._home[i]
            self._gone |= gone

    def search(self, queries: Vectors, k: int, *, namespace: str) -> list[list[Candidate]]:
        unit, kept = usable(queries, dim=self._dim, k=k)
        found: list[list[Candidate]] = [[] for _ in range(len(queries))]
        segment = self._segments.get(namespace)
        if segment is None or not kept:
            return found
        base = _search_base(segment, unit, k)
        tail = top_k(unit @ segment.tail.T, segment.tail_ids, k)
        for i, old, new in zip(kept, base, tail, strict=True):
            found[i] = sorted([*old, *new], key=lambda c: -c.similarity)[:k]  # stable: the base, being older, wins ties
        return found

    def size(self, namespace: str) -> int:
        segment = self._segments.get(namespace)
        return len(segment.base_ids) + len(segment.tail_ids) - len(segment.dead) if segment else 0

    def wait_builds(self, timeout_s: float) -> None:
        """Wait until no build runs. Raises TimeoutError after ``timeout_s``, or the exception of a failed build."""
        while True:
            with self._write:
                self._raise_failure()
                running = list(self._builds.values())
            if not running:
                return
            running[0].join(timeout_s)
            if running[0].is_alive():
                raise TimeoutError(f"a ScaNN build is still running after {timeout_s} s")

    def close(self) -> None:
        self.wait_builds(self._close_timeout_s)

    # ------------------------------------------------------------------------------------------------------------ inside (lock held)

    def _nothing(self) -> _Segment:
        empty = np.zeros((0, self._dim), np.float32)
        return _Segment(None, (), empty, (), empty, frozenset())

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise RuntimeError("a background ScaNN build failed") from self._failure

    def _maybe_build(self, namespace: str) -> None:
        segment = self._segments[namespace]
        pending = len(segment.tail_ids) + len(segment.dead)
        if namespace in self._builds or pending <= max(self._tail_min, self._tail_fraction * len(segment.base_ids)):
            return
        thread = threading.Thread(target=self._rebuild, args=(namespace, segment), name=f"scann-build-{namespace}", daemon=True)
        self._builds[namespace] = thread
        thread.start()

    def _rebuild(self, namespace: str, old: _Segment) -> None:
        """Build from the live rows of ``old``, then keep as the new tail what was added and as dead what was removed meanwhile."""
        try:
            ids, vectors = old.live()
            searcher = build_searcher(vectors, **self._build) if ids else None
        except BaseException as error:
            with self._write:
                self._failure = error
                del self._builds[namespace]
            return
        with self._write:
            now = self._segments[namespace]
            built = set(ids)
            fresh = [n for n, i in enumerate(now.tail_ids) if i not in built]
            dead = frozenset(i for i in ids if i not in self._home)
            tail_ids = tuple(now.tail_ids[n] for n in fresh)
            self._segments[namespace] = _Segment(searcher, ids, vectors, tail_ids, now.tail[fresh], dead)
            self.builds += 1
            del self._builds[namespace]
            self._maybe_build(namespace)


def _search_base(segment: _Segment, unit: Vectors, k: int) -> list[list[Candidate]]:
    """ScaNN hits that are live. Asks for as many extra neighbours as there are removed ids, and drops the fill of short answers."""
    if segment.searcher is None:
        return [[] for _ in range(len(unit))]
    wanted = min(k + len(segment.dead), len(segment.base_ids))
    rows, scores = segment.searcher.search_batched(unit, final_num_neighbors=wanted, pre_reorder_num_neighbors=max(100, 4 * wanted))
    answers: list[list[Candidate]] = []
    for row, score in zip(rows, scores, strict=True):
        hits: list[Candidate] = []
        for n, s in zip(row.tolist(), score.tolist(), strict=True):
            if 0 <= n < len(segment.base_ids) and math.isfinite(s) and segment.base_ids[n] not in segment.dead:
                hits.append(Candidate(segment.base_ids[n], min(1.0, max(-1.0, s))))
        answers.append(hits[:k])
    return answers
