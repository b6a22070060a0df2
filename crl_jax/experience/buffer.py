"""The extractor's training buffer: which generations have evidence, and how much.

Owns: the way from an episode to the generations that deserve its outcome, the sums of rewards, the training counts of paper Eq. 7.
Promises: a generation is credited once per episode, and only by episodes that were shown an entry it wrote or were given its answer; a
batch is popped oldest first; what leaves unused (capacity, age) is counted; the whole buffer goes to JSON and back unchanged. Does not:
hold token ids (the store does), compute advantages or weights (``losses``), or read a clock: age is in training steps.
"""

from __future__ import annotations

import dataclasses
import json
import math
import threading
from collections import Counter
from collections.abc import Callable, Collection
from typing import NamedTuple

from crl_jax.records import Episode, Experience, Generation, Status


class Sample(NamedTuple):
    """One popped generation. ``reward`` is the mean over its ``evidence``; ``train_count`` and ``last_trained_step`` (-1: never) are from
    before."""

    generation: Generation
    reward: float
    evidence: int
    train_count: int
    last_trained_step: int


@dataclasses.dataclass
class _Evidence:
    total: float
    count: int
    since_step: int  # when it entered the buffer


def outcome(success: bool) -> float:
    """+1 for success, -1 for failure: never the environment's own reward, whose partial values mean nothing here."""
    return 1.0 if success else -1.0


def credited(episode: Episode, find: Callable[[str], Experience | None]) -> tuple[str, ...]:
    """Distinct generation ids the episode's outcome belongs to: authors of the entries it was shown, and the answers it was given.

    The way is entry -> operation -> generation, so a merged entry credits the generation that wrote that entry. Episodes with an
    environment error credit nobody. Entries that ``find`` does not know and answers without a generation (empty id) are skipped.
    """
    if episode.status is Status.ENV_ERROR:
        return ()
    authors = [entry.generation_id for entry in (find(i) for i in episode.shown) if entry is not None and entry.generation_id]
    return tuple(dict.fromkeys([*authors, *(generation_id for generation_id in episode.asks if generation_id)]))


class TrainingBuffer:
    """Mutable, and safe to use from several threads: generations with evidence, in the order they entered.

    Rewards are +1 for success, -1 for failure (or what `experience.reward` makes of it), ``parse_failure_reward`` for a response that
    could not be read. ``max_age_steps`` limits
    how long evidence waits in the buffer (0 = no limit). Raises ValueError if a batch cannot fit.
    """

    def __init__(self, *, batch_size: int, capacity: int, max_age_steps: int = 0, parse_failure_reward: float = -1.0) -> None:
        if not 1 <= batch_size <= capacity:
            raise ValueError(f"capacity {capacity} must be at least batch_size {batch_size}, and batch_size at least 1")
        self._batch_size = batch_size
        self._capacity = capacity
        self._max_age_steps = max_age_steps
        self._parse_failure_reward = parse_failure_reward
        self._waiting: dict[str, _Evidence] = {}
        self._trained: dict[str, tuple[int, int]] = {}  # generation id -> (train_count, last_trained_step)
        self.counts: Counter[str] = Counter()
        self._lock = threading.Lock()  # the manager credits, the learner pops and records

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def ready(self) -> bool:
        """A whole batch has evidence."""
        return len(self._waiting) >= self._batch_size

    def credit(self, generation_id: str, *, step: int, success: bool | None = None, reward: float | None = None) -> None:
        """One episode that used this generation ended: with ``success`` (+1 or -1), or worth ``reward``. Raises ValueError for both,
        for neither and for a reward that is no finite number."""
        if (success is None) == (reward is None):
            raise ValueError("give either success or reward")
        value = outcome(bool(success)) if reward is None else reward
        if not math.isfinite(value):
            raise ValueError(f"reward {value} of {generation_id} is no finite number")
        self._enter(generation_id, value, step)
        self.counts["credits"] += 1

    def fail(self, generation_id: str, *, step: int) -> None:
        """The response could not be read: it enters at once, without waiting for an episode."""
        self._enter(generation_id, self._parse_failure_reward, step)
        self.counts["parse_failures"] += 1

    def noop(self) -> None:
        """A response that changed nothing: neutral, never trained, counted."""
        self.counts["noops"] += 1

    def _enter(self, generation_id: str, reward: float, step: int) -> None:
        with self._lock:
            evidence = self._waiting.get(generation_id)
            if evidence is None:
                self._make_room(self._capacity - 1)
                evidence = self._waiting[generation_id] = _Evidence(0.0, 0, step)
            evidence.total += reward
            evidence.count += 1

    def _make_room(self, keep: int) -> None:
        while len(self._waiting) > keep:
            del self._waiting[next(iter(self._waiting))]
            self.counts["dropped_capacity"] += 1

    def expire(self, step: int) -> None:
        """Drop evidence that entered more than ``max_age_steps`` before ``step``."""
        if not self._max_age_steps:
            return
        with self._lock:
            old = [i for i, evidence in self._waiting.items() if step - evidence.since_step > self._max_age_steps]
            for generation_id in old:
                del self._waiting[generation_id]
            self.counts["dropped_age"] += len(old)

    def pop_batch(self, find: Callable[[str], Generation]) -> list[Sample] | None:
        """The ``batch_size`` oldest generations, removed from the buffer; None until there are that many.

        A popped generation that gets further evidence enters again, with its train count. Call `record_trained` for those actually
        trained on. If ``find`` raises nothing is removed.
        """
        with self._lock:
            if not self.ready:
                return None
            oldest = list(self._waiting)[: self._batch_size]
        found = {i: find(i) for i in oldest}  # before anything leaves the buffer: `find` may raise
        with self._lock:
            popped = [(i, self._waiting.pop(i), *self._trained.get(i, (0, -1))) for i in oldest if i in self._waiting]
        return [Sample(found[i], e.total / e.count, e.count, train_count, last) for i, e, train_count, last in popped]

    def record_trained(self, generation_ids: list[str], *, step: int) -> None:
        """The extractor was updated at ``step`` on these generations (those whose weight of Eq. 7 was not 0)."""
        with self._lock:
            for generation_id in generation_ids:
                self._trained[generation_id] = (self._trained.get(generation_id, (0, -1))[0] + 1, step)

    def crowded(self, live: int) -> bool:
        """Whether, with ``live`` entries in the bank, `forget` would drop most train counts: it then costs little for each."""
        return len(self._trained) > 2 * (live + self._capacity)

    def forget(self, creditable: Collection[str]) -> None:
        """Drop the train counts of generations that will not be popped again: those that wait for nothing and are not ``creditable`` (no
        episode to come can bring them evidence). Nothing else changes."""
        with self._lock:
            self._trained = {i: seen for i, seen in self._trained.items() if i in self._waiting or i in creditable}

    def to_json(self) -> str:
        """The whole state; `restore` of it gives an equal buffer."""
        with self._lock:
            waiting = [[i, e.total, e.count, e.since_step] for i, e in self._waiting.items()]
            trained = [[i, count, step] for i, (count, step) in self._trained.items()]
        return json.dumps({"waiting": waiting, "trained": trained, "counts": dict(self.counts)})

    def restore(self, text: str, known: Collection[str] | None = None) -> None:
        """Replace the state by one of `to_json`. Generations that are not ``known`` (a repair could not read them) leave, and so does,
        oldest first, what a smaller capacity cannot hold; both are counted.

        Raises ValueError, and changes nothing, for a text that `to_json` never made.
        """
        try:
            data = json.loads(text)
            waiting = {str(i): _Evidence(float(total), int(count), int(since)) for i, total, count, since in data["waiting"]}
            trained = {str(i): (int(count), int(step)) for i, count, step in data["trained"]}
            counts = Counter({str(name): int(n) for name, n in data["counts"].items()})
            if not all(math.isfinite(e.total) and e.count > 0 for e in waiting.values()):
                raise ValueError("evidence without an episode, or a reward that is no number")
        except (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError) as error:
            raise ValueError(f"this is no saved training buffer ({type(error).__name__}: {error})") from error
        with self._lock:
            self._trained, self.counts = trained, counts
            self._waiting = {i: evidence for i, evidence in waiting.items() if known is None or i in known}
            if missing := len(waiting) - len(self._waiting):
                self.counts["dropped_missing"] += missing
            self._make_room(self._capacity)


def check_saved(text: str) -> None:
    """Raises ValueError for a text that no `TrainingBuffer.to_json` made."""
    TrainingBuffer(batch_size=1, capacity=1).restore(text)
