"""Complementary Reinforcement Learning, as one loop.

    repeat
      collect groups of episodes: half guided by an experience from the bank, half free         (collector, concurrently, bounded lag)
      hand every finished episode to the bank's manager: usage, credit, distillation            (manager, concurrently)
      actor:      A within (group, condition); one clipped policy-gradient step                 (GRPO, paper Eq. 5)
      extractor:  when its buffer is full, one CISPO step on the experiences' mean rewards      (paper Eq. 3, 7; in its own thread)
      publish both weights to their samplers

Owns: the order of things in a run. Promises: lag is at most ``run.max_lag`` versions; every wait has a deadline; a run that stops, for
whatever reason, ends its processes; what was saved can be resumed; a run that is told to stop (``preemption``) gives up the collection it
is in, or ends the step, and saves. Does not: build the parts (``build``) or play episodes (``rollout``).
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from crl_jax import build
from crl_jax.config.schema import Config
from crl_jax.evaluate import evaluate
from crl_jax.extractor_learner import ExtractorLearner
from crl_jax.preemption import Preempted, Preemption
from crl_jax.records import Condition, Episode, Group, Sum
from crl_jax.rollout.assemble import actor_samples, success_rate
from crl_jax.run_state import RunCounters, restore_run, save_at_once, save_run
from crl_jax.telemetry.progress import progress_line
from crl_jax.telemetry.report import print_report
from crl_jax.telemetry.spans import Spans
from crl_jax.telemetry.tracker import displayed
from crl_jax.watchdog import Watchdog


@dataclasses.dataclass(frozen=True)
class Batch:
    """One collected batch: its groups, the task position it started at and how long it took (s)."""

    step: int
    groups: list[Group]
    collect_s: float

    @property
    def episodes(self) -> list[Episode]:
        """All episodes, group by group."""
        return [episode for group in self.groups for episode in group.episodes]


def train(config: Config, *, resume: bool = False, out: Callable[[str], None] = print) -> pathlib.Path:
    """Run ``config`` to its last step and return the run's folder. ``resume`` continues from the newest complete checkpoint, if there is
    one.

    Raises ConfigError when the configuration cannot be run, or the folder holds a run and ``resume`` is False; Preempted when the run was
    told to stop (by then it is saved); and whatever error stopped a part of the run.
    """
    spans = Spans()
    with Preemption.of(config.run) as stop, build.open_run(config, resume=resume) as run, ExtractorLearner(run) as extractor:
        started = run.clock()
        with spans("restore"):
            run.counters = restore_run(run) if resume else RunCounters()
        out(run.describe(run.counters.step))
        admission = _Admission(run, run.counters.step)
        try:
            if run.counters.step == 0:
                with spans("evaluate"), stop.abandonable():
                    evaluate(run, step=0)
            _steps(run, extractor, admission, spans, stop, started, out)
        except Preempted as stopped:
            admission.give_up()
            extractor.settle()  # what is saved must not change meanwhile
            step = save_at_once(run)
            stop.saved = True
            raise stopped.after(step, run.folder) from None
        return run.folder


def _steps(
    run: build.Run,
    extractor: ExtractorLearner,
    admission: _Admission,
    spans: Spans,
    stop: Preemption,
    started: float,
    out: Callable[[str], None],
) -> None:
    """All steps that are left."""
    config, first = run.config, run.counters.step
    with Watchdog(config.run.step_timeout_s) as watchdog:
        for step in range(first, config.run.steps):
            watchdog.begin(step)
            run.profiler.before(step)
            with spans("collect"), stop.abandonable():  # nothing of the step has changed anything yet
                batch = admission.take(step)
            run.saver.check()
            admission.admit_before(step + 1 + config.run.max_lag)
            metrics: dict[str, Any] = dict(_rollout_metrics(run, batch))
            with spans("bank"):
                run.feed_bank(batch.episodes, step)
            with spans("actor_step"):
                metrics |= _learn_actor(run, batch)
            last = step + 1 == config.run.steps or _out_of_time(config, run.clock() - started)
            saves = last or (config.run.save_every > 0 and (step + 1) % config.run.save_every == 0)
            with spans("extractor_step"):
                extractor.step(step)
                if saves:
                    extractor.settle()  # what is saved must not change meanwhile
                metrics |= extractor.metrics()
            counters, measured = run.counters.after(batch.episodes, run.extractor_updates), dict[str, Any]()
            if last or (config.run.eval_every and (step + 1) % config.run.eval_every == 0):
                with spans("evaluate"):
                    measured = evaluate(run, step=step + 1)
            phases = spans.take()
            metrics |= run.metrics() | {"env_steps": counters.env_steps, "step_s": sum(phases.values())}
            run.trackers.log(step + 1, metrics | {f"phase_s/{name}": seconds for name, seconds in phases.items()})
            run.counters, run.scores = counters, _scores(config, metrics | measured)
            show_text(run, step, batch.episodes)
            out(progress_line(step + 1, config.run.steps, metrics, phases))
            # After the row of the step, so that a resumed run has the rows of all steps it does not take again; the seconds of this
            # span are in the row of the next step.
            if saves:
                with spans("checkpoint"):
                    save_run(run)
            if last:
                break
            stop.check()
    with spans("checkpoint"):
        run.saver.wait()


class _Admission:
    """Starts the collection of future batches, at most ``max_lag`` ahead of the learner, and hands them over in order."""

    def __init__(self, run: build.Run, first: int):
        self._run, self._next = run, first
        self._running: dict[int, concurrent.futures.Future[Batch]] = {}

    def admit_before(self, end: int) -> None:
        """Start every batch below ``end`` that has not been started."""
        while self._next < min(end, self._run.config.run.steps):
            self._running[self._next] = self._run.shell.start(_collect(self._run, self._next))
            self._next += 1

    def give_up(self) -> None:
        """Nobody will take what has been started."""
        for running in self._running.values():
            running.cancel()
        self._running.clear()

    def take(self, step: int) -> Batch:
        """The batch of ``step``; waits for it, at most the run's collection deadline."""
        self.admit_before(step + 1)
        return self._run.shell.wait(self._running.pop(step), self._run.collect_deadline_s, f"the rollout of step {step}")


async def _collect(run: build.Run, step: int) -> Batch:
    started = run.clock()
    count = run.config.run.groups_per_step
    guided = run.guided_per_group(step)
    groups = await run.collector.groups(run.stream.tasks(step * count, count), batch_id=f"s{step}", guided=guided)
    return Batch(step, groups, run.clock() - started)


def _learn_actor(run: build.Run, batch: Batch) -> dict[str, Any]:
    loss = run.config.actor.loss
    samples, counts = actor_samples(batch.groups, normalise=loss.normalise, split=loss.advantage_over == "subgroup")
    metrics: dict[str, Any] = {f"actor/{name}": n for name, n in counts.items()}
    if samples and run.trains_actor:
        metrics |= {f"actor/{name}": value for name, value in run.actor.update(samples).items()}
        run.actor.publish()
    return metrics | {"actor/version": run.actor.version}


def _rollout_metrics(run: build.Run, batch: Batch) -> dict[str, Any]:
    episodes, version = batch.episodes, run.actor.version
    tokens = sum(int(e.log.loss_mask.sum()) for e in episodes)
    lags = [version - e.started_version for e in episodes]
    metrics: dict[str, Any] = {
        "rollout/turns": Sum(sum(len(e.turns) for e in episodes), len(episodes)),
        "rollout/invalid": Sum(sum(not t.valid for e in episodes for t in e.turns), sum(len(e.turns) for e in episodes)),
        "rollout/asks": Sum(sum(t.tool for e in episodes for t in e.turns), len(episodes)),
        "rollout/env_errors": sum(e.reward is None for e in episodes),
        "rollout/tokens_per_s": sum(len(e.log) for e in episodes) / max(batch.collect_s, 1e-9),
        "rollout/sampled_tokens": tokens,
        "rollout/collect_s": batch.collect_s,
        "lag/mean": Sum(sum(lags), len(lags)),
        "lag/max": max(lags),
    }
    metrics |= _success(episodes, "success")
    for part, played in run.by_part(episodes).items():
        steps = sum(len(e.turns) for e in played)
        metrics |= _success(played, f"success_{part}") | {
            f"rollout_{part}/turns": Sum(steps, len(played)),
            f"rollout_{part}/invalid": Sum(sum(not t.valid for e in played for t in e.turns), steps),
            f"rollout_{part}/env_errors": sum(e.reward is None for e in played),
        }
    return metrics


def _success(episodes: Sequence[Episode], name: str) -> dict[str, Sum]:
    rates = {condition: success_rate(episodes, condition) for condition in Condition}
    return {f"{name}/{condition.value}": Sum(won, played) for condition, (won, played) in rates.items() if played}


def _out_of_time(config: Config, elapsed_s: float) -> bool:
    return 0 < config.run.deadline_s <= elapsed_s


def _scores(config: Config, metrics: Mapping[str, Any]) -> dict[str, float]:
    """What a checkpoint says of how good its weights are: the evaluation at its step, and the metric by which the best are kept."""
    wanted = config.run.keep_best.metric
    return {name: value for name, value in displayed(metrics).items() if name.startswith("eval/") or name == wanted}


def show_text(run: build.Run, step: int, episodes: list[Episode]) -> None:
    """Every ``telemetry.text_every`` steps: one guided and one free episode as a person would read them, and the newest experiences."""
    every = run.config.telemetry.text_every
    if not every or step % every:
        return
    for condition in Condition:
        shown = next((e for e in episodes if e.condition is condition), None)
        if shown is not None:
            run.trackers.text(step, f"episode/{condition.value}", as_text(shown, run.lesson_texts(shown)))
    if run.manager is not None:
        newest = run.newest_lessons(16)
        run.trackers.text(step, "experiences", "\n".join(f"[{e.id} v{e.author_version}] {e.text}" for e in newest) or "(none yet)")


def as_text(episode: Episode, lessons: list[str]) -> str:
    """An episode as a person would read it."""
    lines = [f"goal: {episode.task.goal}", *(f"lesson: {text}" for text in lessons)]
    for turn in episode.turns:
        note = "  (asked the bank)" if turn.tool else "" if turn.valid else "  (invalid)"
        lines += [f"  {turn.observation.strip()}", f"> {turn.reply.strip()}{note}"]
    ending = f"{'success' if episode.success else 'failure'} ({episode.status.value})"
    return "\n".join([*lines, f"  {episode.final_observation.strip()}", ending])


def main(config: Config, *, resume: bool = False) -> int:
    """``crl train``: run, then print the report of the run; returns the exit code."""
    return print_report(train(config, resume=resume, out=functools.partial(print, flush=True)))
