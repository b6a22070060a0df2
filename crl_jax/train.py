"""Complementary Reinforcement Learning, as one loop.

    repeat
      collect groups of episodes: half guided by an experience from the bank, half free         (collector, concurrently, bounded lag)
      hand every finished episode to the bank's manager: usage, credit, distillation            (manager, concurrently)
      actor:      A within (group, condition); one clipped policy-gradient step                 (GRPO, paper Eq. 5)
      extractor:  when its buffer is full, one CISPO step on the experiences' mean rewards      (paper Eq. 3, 7; in its own thread)
      publish both weights to their samplers

Owns: the order of things in a run. Promises: lag is at most ``run.max_lag`` versions; every wait has a deadline; a run that stops, for
whatever reason, ends its processes; what was saved can be resumed; a run that is told to stop (``preemption``) gives up the collection it
is in, or ends the step, and saves. Several processes of a job play a part of each batch each and take every step together. Does not: build
the parts (``build``), play episodes (``rollout``), or train the extractor in a job of its own (``extractor_job``).
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from crl_jax import build
from crl_jax.config.schema import Config
from crl_jax.evaluate import evaluate
from crl_jax.extractor_learner import ExtractorLearner
from crl_jax.job import Job, RoleName
from crl_jax.preemption import Preempted, Preemption, unless_stopped
from crl_jax.processes import Processes, Topology, join
from crl_jax.records import Condition, Episode, Group, Sum
from crl_jax.rollout.admission import Admission
from crl_jax.rollout.assemble import actor_samples, success_rate
from crl_jax.run import Run
from crl_jax.run_state import RunCounters, restore_run, save_at_once, save_run
from crl_jax.telemetry.histogram import Histogram
from crl_jax.telemetry.progress import progress_line
from crl_jax.telemetry.report import print_report
from crl_jax.telemetry.spans import Spans
from crl_jax.telemetry.tracker import displayed
from crl_jax.watchdog import Watchdog

SWITCH_S = 0.0005  # how long a thread may keep Python to itself
SLACK_S = 60.0  # the processes of a job wait for each other this much longer than for a batch that one of them still plays


@dataclasses.dataclass(frozen=True)
class Batch:
    """One collected batch, or this process's part of it: its groups, the task position it started at and how long it took (s)."""

    step: int
    groups: list[Group]
    collect_s: float

    @property
    def episodes(self) -> list[Episode]:
        """All episodes, group by group."""
        return [episode for group in self.groups for episode in group.episodes]


def train(config: Config, *, resume: bool = False, out: Callable[[str], None] = print, job: Job | None = None) -> pathlib.Path:
    """Run ``config`` to its last step and return the run's folder. ``resume`` continues from the newest complete checkpoint, if there is
    one. ``job`` says which of the models are trained here, and with which other processes; ``out`` is called in the first of them.

    Raises ConfigError when the configuration cannot be run, or the folder holds a run and ``resume`` is False; Preempted when the run was
    told to stop (by then it is saved); and whatever error stopped a part of the run.
    """
    spans, job = Spans(), job or Job()
    processes, say = job.processes, out if job.processes.first else _silent
    with (
        Preemption.of(config.run, processes) as stop,
        build.open_run(config, resume=resume, job=job) as run,
        ExtractorLearner(run) as extractor,
        processes,  # innermost: the others hear of an error before this process has stopped its parts
    ):
        started = run.clock()
        spans.so_far("start")
        with spans("restore"):
            run.counters = restore_run(run) if resume else RunCounters()
        say(run.describe(run.counters.step))
        admission = _admission(run)
        try:
            if run.counters.step == 0:
                with spans("evaluate"):
                    evaluate(run, step=0, around=functools.partial(unless_stopped, stop, processes))
            _steps(run, extractor, admission, spans, stop, started, say)
            if job.role is not None:
                run.tell_step(config.run.steps)  # the extractor's job ends with this
        except Preempted as stopped:
            admission.give_up()
            extractor.settle()  # what is saved must not change meanwhile
            step = save_at_once(run, spare_s=stop.left_s / 2)
            stop.saved = True
            raise stopped.after(step, run.folder) from None
        return run.folder


def _steps(
    run: Run,
    extractor: ExtractorLearner,
    admission: Admission[Batch],
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
            with spans("profile"):
                run.profiler.before(step)
            with spans("collect"):  # nothing of the step has changed anything yet
                batch = unless_stopped(stop, run.job.processes, functools.partial(admission.take, step))
            run.saver.check()
            metrics = _rollout_metrics(run, batch)
            with spans("bank"):
                run.feed_bank(batch.episodes, step)
            with spans("actor_step"):
                metrics |= _learn_actor(run, batch)
            late = run.job.processes.of_first(lambda: _out_of_time(config, run.clock() - started), "the time left")
            last = step + 1 == config.run.steps or late
            saves = last or (config.run.save_every > 0 and (step + 1) % config.run.save_every == 0)
            with spans("extractor_step"):
                extractor.step(step)
                if saves:
                    extractor.settle()  # what is saved must not change meanwhile
                metrics |= extractor.metrics()
            counters, measured = run.counters.after(int(metrics["rollout/env_steps"]), run.extractor_updates), dict[str, Any]()
            if last or (config.run.eval_every and (step + 1) % config.run.eval_every == 0):
                with spans("evaluate"):
                    measured = evaluate(run, step=step + 1)
            phases = spans.take()
            metrics |= run.metrics() | {"env_steps": counters.env_steps, "step_s": sum(phases.values())}
            run.trackers.log(step + 1, metrics | {f"phase_s/{name}": seconds for name, seconds in phases.items()})
            run.counters, run.scores = counters, _scores(config, metrics | measured)
            if run.job.processes.first:
                show_text(run, step, batch.episodes)
            out(progress_line(step + 1, config.run.steps, metrics, phases))
            # After the row of the step, so that a resumed run has the rows of all steps it does not take again; the seconds of this
            # span are in the row of the next step.
            if saves:
                with spans("checkpoint"):
                    save_run(run)
            if last:
                break
    with spans("checkpoint"):
        run.saver.wait()


def _admission(run: Run) -> Admission[Batch]:
    def wait(running: concurrent.futures.Future[Batch], step: int) -> Batch:
        return run.shell.wait(running, run.collect_deadline_s, f"the rollout of step {step}")

    settings = run.config.run
    return Admission(
        lambda step: run.shell.start(_collect(run, step)), wait, first=run.counters.step, end=settings.steps, ahead=settings.max_lag
    )


async def _collect(run: Run, step: int) -> Batch:
    started = run.clock()
    count = run.config.run.groups_per_step
    guided, mine = run.guided_per_group(step), run.job.processes.share(count)
    tasks = run.stream.tasks(step * count, count)[mine.start : mine.stop]
    groups = await run.collector.groups(tasks, batch_id=f"s{step}", guided=guided, first=mine.start)
    return Batch(step, groups, run.clock() - started)


def _learn_actor(run: Run, batch: Batch) -> dict[str, Any]:
    loss = run.config.actor.loss
    samples, counts = actor_samples(batch.groups, normalise=loss.normalise, split=loss.advantage_over == "subgroup")
    counted = {f"actor/{name}": n for name, n in counts.items()} | {"actor/samples": len(samples)}
    metrics = run.joined(counted, f"the samples of step {batch.step}")
    if metrics["actor/samples"] and run.trains_actor:
        metrics |= {f"actor/{name}": value for name, value in run.actor.update(samples).items()}
        run.actor.publish()
    return metrics | {"actor/version": run.actor.version}


def _rollout_metrics(run: Run, batch: Batch) -> dict[str, Any]:
    """Of all processes: a batch is there when the slowest of them has its part."""
    metrics = run.joined(_measured(run, batch), f"the episodes of step {batch.step}")
    return metrics | {"rollout/tokens_per_s": metrics["rollout/tokens"] / max(metrics["rollout/collect_s"], 1e-9)}


def _measured(run: Run, batch: Batch) -> dict[str, Any]:
    episodes, version = batch.episodes, run.actor.version
    tokens = sum(int(e.log.loss_mask.sum()) for e in episodes)
    lags = [version - e.started_version for e in episodes]
    metrics: dict[str, Any] = {
        "rollout/turns": Sum(sum(len(e.turns) for e in episodes), len(episodes)),
        "rollout/invalid": Sum(sum(not t.valid for e in episodes for t in e.turns), sum(len(e.turns) for e in episodes)),
        "rollout/env_steps": sum(not t.tool for e in episodes for t in e.turns),
        "rollout/asks": Sum(sum(t.tool for e in episodes for t in e.turns), len(episodes)),
        "rollout/env_errors": sum(e.reward is None for e in episodes),
        "rollout/tokens": sum(len(e.log) for e in episodes),
        "rollout/sampled_tokens": tokens,
        "rollout/collect_s": batch.collect_s,
        "lag/mean": Sum(sum(lags), len(lags)),
        "lag/max": max(lags),
        "lag/episodes": Histogram.of(lags),  # when they began
        "lag/tokens": sum((Histogram.of(version - e.log.versions[e.log.loss_mask]) for e in episodes), Histogram({})),
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


def show_text(run: Run, step: int, episodes: list[Episode]) -> None:
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


def _silent(text: str) -> None:
    del text


def main(config: Config, *, resume: bool = False, role: RoleName | None = None, topology: Topology | None = None) -> int:
    """``crl train``: run, then print the report of the run; returns the exit code."""
    say = functools.partial(print, flush=True)
    # At Python's 5 ms a thread that waits for the lock (the bank's writer, the event loop) loses most of a step beside a busy one.
    sys.setswitchinterval(SWITCH_S)
    topology = topology or Topology()
    Job(role, Processes(topology.process_id, topology.processes, None)).check(config)  # before it waits for others that would say the same
    with join(topology) as processes:
        processes.deadline_s = max(processes.deadline_s, config.run.collect_timeout_s + SLACK_S)
        job = Job(role, processes)
        if role == "extractor":
            from crl_jax.extractor_job import learn_and_serve  # imports the HTTP server

            learn_and_serve(config, resume=resume, out=say, job=job)
            return 0
        folder = train(config, resume=resume, out=say, job=job)
        return print_report(folder) if processes.first else 0
