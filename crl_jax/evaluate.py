"""Evaluation: fixed tasks, with and without experience, greedy and sampled, against a bank that is only read.

Promises: the same tasks and seeds at every evaluation of a run; nothing is counted, distilled, credited or asked; with and without
experience are paired. Does not: touch the learners.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from crl_jax.config.schema import Config
from crl_jax.job import Job, RoleName
from crl_jax.records import Episode, Sum
from crl_jax.rollout.assemble import success_rate
from crl_jax.telemetry.tracker import displayed

if TYPE_CHECKING:
    from crl_jax.run import Run

Around = Callable[[Callable[[], dict[str, Any]]], dict[str, Any]]


def evaluate(run: Run, *, step: int, around: Around | None = None) -> dict[str, Any]:
    """Evaluate and log under ``eval/<set>/<with|without>/<greedy|sampled>`` (success) and ``.../turns``; returns the metrics.

    Sets: ``known`` (unseen episodes of the training tasks) and ``heldout`` (tasks never trained on), as the configuration has them; of a
    mixture also each part alone, as ``known.<part>``. ``around`` calls what plays the episodes, and may give it up by raising.
    """
    played = (around or _plainly)(functools.partial(_play, run))
    metrics = run.joined(played, f"the evaluation of step {step}")
    run.trackers.log(step, metrics)
    return metrics


def _plainly(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    return work()


def _play(run: Run) -> dict[str, Any]:
    """This process's part of all evaluations."""
    sampled = dataclasses.replace(run.collector.settings.sampling, seed=run.config.run.seed)
    modes = {"greedy": dataclasses.replace(sampled, temperature=0.0), "sampled": sampled}
    metrics: dict[str, Any] = {}
    for name, tasks in run.eval_sets.items():
        mine = run.job.processes.share(len(tasks))
        for guided in (False, True) if run.manager is not None else (False,):
            for mode in run.config.run.eval_modes:
                kind, how = "with" if guided else "without", {"guided": guided, "sampling": modes[mode], "first": mine.start}
                episodes = run.shell.call(
                    run.collector.evaluate(tasks[mine.start : mine.stop], name=f"eval/{name}/{mode}", **how),
                    run.collect_deadline_s,
                    f"evaluation {name} {kind} experience",
                )
                for part, found in {"": episodes, **run.by_part(episodes)}.items():
                    if found:
                        metrics |= _metrics(found, f"eval/{name}{f'.{part}' if part else ''}/{kind}/{mode}")
    return metrics


def _metrics(episodes: Sequence[Episode], key: str) -> dict[str, Sum]:
    won, played = success_rate(episodes)
    turns, read = sum(len(e.turns) for e in episodes), sum(bool(e.shown) for e in episodes)
    return {key: Sum(won, played), f"{key}/turns": Sum(turns, played), f"{key}/read": Sum(read, len(episodes))}


def main(config: Config, *, step: int | None = None, role: RoleName | None = None) -> int:
    """``crl eval``: evaluate the newest (or the given) checkpoint of a run, print the success rates, leave the run's files alone.

    ``role``: of a run whose models were trained in jobs of their own, the actor's.
    """
    from crl_jax import build
    from crl_jax.run_state import restore_run

    with build.open_run(config, resume=True, read_only=True, job=Job(role)) as run:
        counters = restore_run(run, step=step)
        for key, value in displayed(evaluate(run, step=counters.step)).items():
            print(f"{key:<44} {value:.3f}")
    return 0
