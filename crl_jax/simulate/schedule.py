"""A run's schedule, played in simulated time: the order of ``train``, ``rollout.collector`` and ``extractor_learner`` with durations in the
place of models.

    admit batches up to max_lag ahead; take the batch of this step; count and distil its episodes; update the actor; publish;
    begin the extractor's updates (in turn: end them); evaluate; save

Owns: ``simulate``. Promises: a function of the workload; admission of batches and the buffer of the extractor's evidence are those of real
runs. Does not: learn, or say how long anything takes (``workload``).
"""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

from crl_jax.experience.buffer import TrainingBuffer
from crl_jax.rollout.admission import Admission
from crl_jax.simulate.clock import Clock, Event, Meter, Process, Work, all_of
from crl_jax.simulate.outcome import Outcome
from crl_jax.simulate.resources import Places, Sampler
from crl_jax.simulate.workload import Workload
from crl_jax.telemetry.histogram import Histogram
from crl_jax.telemetry.spans import Spans


class _Episode(NamedTuple):
    """``version`` when it began; (version, tokens) of its replies; the lesson it read ("" = none)."""

    version: int
    replies: list[tuple[int, int]]
    read: str


def simulate(workload: Workload) -> Outcome:
    """What happens when ``workload`` runs. Takes about 20 microseconds for each event, of which an episode has about ten a turn."""
    run = _Run(workload)
    run.clock.run(run.clock.start(run.trainer()))
    return run.outcome()


class _Run:
    def __init__(self, workload: Workload) -> None:
        w = self.w = workload
        clock = self.clock = Clock(w.capacity)
        self.spans = Spans(lambda: clock.now)
        self.actor, self.extractor = Sampler(clock, w.actor), Sampler(clock, w.extractor)
        self.stepping = Places(clock, w.env_workers)
        self.learner, self.teacher, self.merging = Meter(clock), Meter(clock), Meter(clock)
        self.batches, self.playing, self.evaluating = Meter(clock), Meter(clock), Meter(clock)
        self.queue, self.distilling = Places(clock, 4 * w.environments), Places(clock, w.concurrency)
        self.version, self.taught = 0, 0  # weights of the actor and of the extractor
        self.admission = Admission[Event](self.begin, _itself, first=0, end=w.steps, ahead=w.max_lag)
        self.buffer = TrainingBuffer(batch_size=w.extractor_batch, capacity=w.buffer_capacity, max_age_steps=w.max_age_steps)
        self.born: dict[str, int] = {}  # generation -> the extractor's version
        self.distilled: dict[int, bool] = {}  # submitted and not settled: None, or whether it left an entry
        self.submitted, self.settled = 0, 0
        self.lessons: list[str] = []  # the generations behind the bank's entries, oldest first
        self.under_way: Event | None = None
        self.updates, self.learned = 0, 0
        self.ends: list[float] = []
        self.lags: list[Histogram] = []  # of each batch
        self.token_lags, self.generation_lags = Counter[int](), Counter[int]()

    # ------------------------------------------------------------------------------------------------------------ the trainer

    def trainer(self) -> Process:
        """All steps, as ``train._steps``."""
        w, spans = self.w, self.spans
        for step in range(w.steps):
            last = step + 1 == w.steps
            with spans("collect"):
                episodes = yield self.admission.take(step)
            self.measure(episodes)
            with spans("bank"):
                yield from self.feed(episodes, step)
            with spans("actor_step"):
                yield Work(w.update_s, self.learner)
                yield w.publish_s
                self.version += 1
                self.learned += len(episodes)
            saves = last or (w.save_every > 0 and (step + 1) % w.save_every == 0)
            with spans("extractor_step"):
                yield from self.teach(step, settle=saves)
            if w.eval_every and (step + 1) % w.eval_every == 0:
                with spans("evaluate"):
                    yield from self.evaluate(step)
            if saves:
                with spans("checkpoint"):
                    yield w.save_s
            yield w.other_s
            self.ends.append(self.clock.now)

    def measure(self, episodes: list[_Episode]) -> None:
        """The batch's lags, before the update it is for."""
        self.lags.append(Histogram.of(self.version - episode.version for episode in episodes))
        for episode in episodes:
            for version, tokens in episode.replies:
                self.token_lags[self.version - version] += tokens

    def evaluate(self, step: int) -> Process:
        """Episodes that nobody learns from; batches ahead go on beside them."""
        self.evaluating.change(1)
        yield from all_of([self.clock.start(self.episode(-step - 1, i)) for i in range(self.w.eval_episodes)])
        self.evaluating.change(-1)

    # ------------------------------------------------------------------------------------------------------------ the rollout

    def begin(self, step: int) -> Any:
        """Starts the batch of ``step``."""
        return self.clock.start(self.collect(step))

    def collect(self, step: int) -> Process:
        """A whole batch at once, as ``Collector.groups``."""
        self.batches.change(1)
        episodes = yield from all_of([self.clock.start(self.episode(step, i)) for i in range(self.w.environments)])
        self.batches.change(-1)
        return episodes

    def episode(self, step: int, number: int) -> Process:
        """Reset, then replies and environment steps in turn."""
        w, rng = self.w, self.w.rng("episode", step, number)
        turns, pick = max(1, round(w.turns.draw(rng))), rng.random()
        guided = step >= w.warmup_steps and number >= w.environments * (1 - w.guided)
        readable = self.lessons[-w.bank_entries :] if guided else []
        read = readable[int(pick * len(readable))] if readable else ""
        version, replies = self.version, list[tuple[int, int]]()
        self.playing.change(1)
        yield from self.env(w.env_s.draw(rng))
        for _ in range(turns):
            replies.append((self.version, max(1, round(w.reply_tokens.draw(rng)))))
            yield from self.actor.reply(replies[-1][1])
            yield from self.env(w.env_s.draw(rng))
        self.playing.change(-1)
        return _Episode(version, replies, read)

    def env(self, seconds: float) -> Process:
        """One call of an environment."""
        yield from self.stepping.enter()
        yield seconds
        self.stepping.leave()

    # ------------------------------------------------------------------------------------------------------------ the bank

    def feed(self, episodes: list[_Episode], step: int) -> Process:
        """As ``Run.feed_bank``: usage and credit, then a distillation of every episode; in turn, all are waited for."""
        w = self.w
        self.buffer.expire(step)
        if w.merge_every and step and step % w.merge_every == 0:
            merged = self.clock.start(self.merge())
            if w.sync:
                yield merged
        yield w.bank_s
        for episode in episodes:
            if episode.read:
                self.buffer.credit(episode.read, step=step, success=True)
        begun: list[Event] = []
        for _ in episodes:
            yield from self.queue.enter()
            begun.append(self.clock.start(self.distil(self.submitted)))
            self.submitted += 1
        if w.sync:
            yield from all_of(begun)

    def merge(self) -> Process:
        """Beside the distillations, on the extractor's device."""
        yield Work(self.w.merge_s, self.merging)

    def distil(self, number: int) -> Process:
        """One lesson. Entries are written in the order of their episodes."""
        rng = self.w.rng("lesson", number)
        yield from self.distilling.enter()
        self.queue.leave()
        self.born[f"g{number}"] = self.taught
        yield from self.extractor.reply(max(1, round(self.w.lesson_tokens.draw(rng))))
        self.distilling.leave()
        self.distilled[number] = rng.random() < self.w.written
        while self.settled in self.distilled:
            if self.distilled.pop(self.settled):
                self.lessons.append(f"g{self.settled}")
            self.settled += 1

    # ------------------------------------------------------------------------------------------------------------ the extractor

    def teach(self, step: int, *, settle: bool) -> Process:
        """As ``ExtractorLearner``: in turn, or beside the actor, one at a time."""
        if self.w.sync:
            yield from self.updates_of(step)
            return
        if self.under_way is None or self.under_way.happened:
            self.under_way = self.clock.start(self.updates_of(step))
        if settle:
            yield self.under_way

    def updates_of(self, step: int) -> Process:
        """Every batch that is full."""
        find: Any = self.born.__getitem__
        while (batch := self.buffer.pop_batch(find)) is not None:
            versions: list[Any] = [sample.generation for sample in batch]
            self.generation_lags.update(self.taught - version for version in versions)
            yield Work(self.w.extractor_update_s, self.teacher)
            self.buffer.record_trained([], step=step)
            self.taught += 1
            self.updates += 1

    # ------------------------------------------------------------------------------------------------------------ afterwards

    def outcome(self) -> Outcome:
        """Everything that was measured, at the end of the last step."""
        w, total = self.w, self.clock.now
        meters = {"learner": self.learner, "extractor_learner": self.teacher}
        meters |= {"sampler": self.actor.slots.taken, "extractor_sampler": self.extractor.slots.taken}
        meters |= {"environments": self.stepping.taken, "playing": self.playing, "batches": self.batches, "evaluating": self.evaluating}
        for meter in meters.values():
            meter.settle()
        places = {"sampler": w.actor.slots, "extractor_sampler": w.extractor.slots, "environments": w.env_workers or w.environments}
        phases = self.spans.take()
        return Outcome(
            workload=w,
            seconds=total,
            step_s=tuple(end - begin for begin, end in zip([0.0, *self.ends], self.ends, strict=False)),
            phases_s=phases,
            busy_s={name: meter.busy_s for name, meter in meters.items()},
            filled={name: meters[name].area / (total * count) if total else 0.0 for name, count in places.items()},
            waits_s={
                "learner for the rollout": phases.get("collect", 0.0),
                "learner for the bank": phases.get("bank", 0.0),
                "learner for the extractor": phases.get("extractor_step", 0.0),
                "sampler for an admission": max(0.0, total - self.batches.busy_s - self.evaluating.busy_s),
                "replies for a slot": self.actor.slots.waited_s,
                "environments for a worker": self.stepping.waited_s,
                "lessons for their turn": self.distilling.waited_s + self.extractor.slots.waited_s,
            },
            batch_lags=tuple(self.lags),
            token_lags=Histogram(self.token_lags),
            generation_lags=Histogram(self.generation_lags),
            counts={
                "episodes": self.learned,
                "tokens": self.actor.tokens,
                "submitted": self.submitted,
                "distilled": self.settled,
                "extractor_updates": self.updates,
                "buffer": len(self.buffer),
                "dropped_age": self.buffer.counts["dropped_age"],
                "dropped_capacity": self.buffer.counts["dropped_capacity"],
            },
        )


def _itself(batch: Any, step: int) -> Event:
    """What ``Admission`` hands over: the trainer waits for it, in simulated time."""
    del step
    return batch
