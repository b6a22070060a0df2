"""When the extractor learns: in turn with the actor, or beside it in a thread of its own.

Owns: the order pop evidence, update, record, publish, and the thread.
Promises: at most one batch is being learned at a time; beside the actor, neither model waits for the other: ``step`` only looks; an error
of the thread is raised by the next call, and so is an update that takes longer than the run's deadline; after ``settle`` nothing is under
way; a hung update keeps no process from ending. In turn (a synchronous run) every full batch is learned before ``step`` returns.
Does not: decide what a batch is (the bank's buffer does) or touch the actor.
"""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from crl_jax.config.roles import ExtractorLossConfig
from crl_jax.experience.buffer import Sample
from crl_jax.experience.thread import DaemonThread
from crl_jax.records import Sum
from crl_jax.role import Role
from crl_jax.rollout.assemble import extractor_samples
from crl_jax.telemetry.histogram import Histogram

if TYPE_CHECKING:
    from crl_jax.run import Run

Sums = dict[str, Sum | Histogram]
_END_S = 30.0  # at the end of a run: the longest wait for an update that is under way


class ExtractorLearner:
    """The extractor's updates of one run; use as a context manager."""

    def __init__(self, run: Run):
        self._run = run
        self._active = run.extractor is not None and run.trains_extractor
        self._thread = None if run.config.run.sync else DaemonThread("extractor-learner")
        self._since = 0.0  # when what is under way began
        self._under_way: concurrent.futures.Future[Sums] | None = None
        self._sums: Sums = {}
        self._busy_s = 0.0  # of updates that have ended since the last metrics

    def step(self, step: int) -> None:
        """Learn what is ready at ``step``, or have it learned. Raises what the last update raised."""
        if not self._active:
            return
        if self._thread is None:
            while (found := self._update(step)) is not None:
                self._add(found)
        elif self._under_way is None or self._under_way.done():
            self.settle()
            self._since = time.monotonic()
            self._under_way = self._thread.submit(self._all_ready, step)
        elif time.monotonic() - self._since > self._run.collect_deadline_s:
            raise self._late()

    def settle(self) -> None:
        """Wait until nothing is being learned. Raises what it raised, TimeoutError when it takes too long."""
        if self._under_way is None:
            return
        deadline_s = self._run.collect_deadline_s
        try:
            self._add(self._under_way.result(timeout=deadline_s))
        except concurrent.futures.TimeoutError:
            if self._under_way.done():
                raise
            raise self._late() from None
        self._under_way = None

    def metrics(self) -> dict[str, Any]:
        """What the updates that ended since the last call measured, and the version served now."""
        if self._run.extractor is None:
            return {}
        sums, self._sums = self._sums, {}
        busy_s, self._busy_s = self._busy_s, 0.0
        served = {"extractor/version": self._run.extractor.version, "extractor/busy_s": busy_s}
        return {f"extractor/{name}": value for name, value in sums.items()} | served

    def __enter__(self) -> ExtractorLearner:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._thread is not None:
            self._thread.shutdown()
            self._thread.join(min(_END_S, self._run.collect_deadline_s))  # one that hangs ends with the process

    def _late(self) -> TimeoutError:
        return TimeoutError(f"the extractor's update did not end within {self._run.collect_deadline_s:g} s (raise run.collect_timeout_s)")

    def _all_ready(self, step: int) -> Sums:
        sums: Sums = {}
        while (found := self._update(step)) is not None:
            sums = _plus(sums, found)
        return sums

    def _update(self, step: int) -> Sums | None:
        """One batch, if one is full: what it measured."""
        run, extractor = self._run, self._run.extractor
        assert extractor is not None
        if (evidence := run.pop_evidence(step)) is None:
            return None
        started = time.perf_counter()
        found, weights = learn_from(extractor, evidence, step=step, loss=run.config.extractor.loss)
        run.record_training(evidence, weights, step)
        extractor.publish()
        self._busy_s += time.perf_counter() - started
        return found

    def _add(self, found: Sums) -> None:
        self._sums = _plus(self._sums, found)


def learn_from(
    extractor: Role, evidence: Sequence[Sample], *, step: int, loss: ExtractorLossConfig, mine: slice = slice(None)
) -> tuple[Sums, list[float]]:
    """One update on ``evidence``: what it measured, and the weight of each sample. Of several processes, each with all of the evidence,
    one computes those in ``mine``: advantages are over the whole batch.
    """
    limits: dict[str, Any] = {"cooldown_steps": loss.cooldown_steps, "max_lag": loss.max_lag, "version": extractor.version}
    samples, weights = extractor_samples(evidence, step=step, alpha=loss.alpha, **limits)
    lags = [extractor.version - sample.generation.versions[0] for sample in evidence]
    found: Sums = extractor.update(samples[mine]) | {
        "reward": Sum(sum(sample.reward for sample in evidence), len(evidence)),
        "weight": Sum(sum(weights), len(weights)),
        "lag": Sum(sum(lags), len(lags)),
        "lags": Histogram.of(lags),
        "stale": Sum(sum(lag > loss.max_lag for lag in lags) if loss.max_lag is not None else 0, len(lags)),
    }
    return found, weights


def _plus(a: Sums, b: Sums) -> Sums:
    return a | {name: _total(a[name], value) if name in a else value for name, value in b.items()}


def _total(a: Any, b: Any) -> Any:
    return a + b  # Sums or Histograms, each kind with its own
