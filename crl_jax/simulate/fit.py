"""A workload read off a real run.

Owns: ``fit``, ``fit_capacity``. Promises: what the metrics say is taken as it is (means over the steps that are left after the first ones,
which compile); what they do not say is zero or constant, never guessed. Does not: read the metrics of an asynchronous run: its parts slow
each other down, so their durations are not those of the parts.

The time of a token is what makes the simulated rollout, and the simulated distillation, of one batch as long as the measured ones.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from crl_jax.config.load import load
from crl_jax.config.schema import Config
from crl_jax.errors import UserError
from crl_jax.simulate.schedule import simulate
from crl_jax.simulate.workload import Engine, Spread, Workload
from crl_jax.telemetry.tracker import read_jsonl

Row = Mapping[str, Any]
ROUNDS = 16  # of bisection: the answer is then known to 1 part in 65,000 of the interval


class CannotFit(UserError, ValueError):
    """These metrics do not say how long the parts of the run take."""

    exit_code = 2


def rows_of(folder: pathlib.Path) -> list[Row]:
    """The rows of a run's steps, in order; of a step that was taken twice the later one. Raises CannotFit without metrics."""
    path = folder / "metrics.jsonl"
    if not path.is_file():
        raise CannotFit(f"{path} is missing: give the folder of a run, e.g. runs/smoke")
    by_step = {int(row["step"]): row for row in read_jsonl(path) if row.get("kind") == "metrics" and "step_s" in row}
    return [by_step[step] for step in sorted(by_step)]


def config_of(folder: pathlib.Path) -> Config:
    """The recipe that the run in ``folder`` wrote down."""
    return load(folder / "config.yaml")


def fit(rows: Sequence[Row], config: Config, *, skip: int | None = None) -> Workload:
    """The workload of a synchronous run, from its rows after the first ``skip`` (None: a third, at least 2). Raises CannotFit."""
    if not config.run.sync:
        raise CannotFit("an asynchronous run does not tell how long its parts take alone: give a run with run.sync=true run.max_lag=0")
    skip = max(2, len(rows) // 3) if skip is None else skip
    before, used = rows[max(0, skip - 1) : skip], list(rows[skip:])
    if not used or not before:
        raise CannotFit(f"{len(rows)} steps are too few to leave out the first {skip}: give a longer run")
    workload = _counted(used, before[0], config)
    collect_s, lessons_s = _mean(used, "rollout/collect_s"), workload.bank_s
    workload = dataclasses.replace(workload, bank_s=0.0)
    actor_s = _solve(lambda s: _one_batch(workload, actor=dataclasses.replace(workload.actor, decode_s=s), phase="collect"), collect_s)
    made = dataclasses.replace(workload, actor=dataclasses.replace(workload.actor, decode_s=actor_s))
    if not lessons_s:
        return made
    extractor_s = _solve(lambda s: _one_batch(made, extractor=dataclasses.replace(made.extractor, decode_s=s), phase="bank"), lessons_s)
    return dataclasses.replace(made, extractor=dataclasses.replace(made.extractor, decode_s=extractor_s))


def fit_capacity(workload: Workload, step_s: float) -> float:
    """How many parts compute at full speed at once, so that ``workload``, which is asynchronous, takes ``step_s`` a step; from 0.2 to 8.

    For runs whose parts share one machine. A workload that does not depend on it gets the smallest that is fast enough.
    """
    return 1 / _solve(lambda inverse: seconds_per_step(dataclasses.replace(workload, capacity=1 / inverse)), step_s, low=1 / 8, high=5.0)


def seconds_per_step(workload: Workload) -> float:
    """Simulated; the first steps, in which nothing is ahead, are left out where there are others."""
    steps = simulate(workload).step_s
    steady = steps[workload.max_lag + 1 :] or steps
    return sum(steady) / len(steady)


def _counted(used: Sequence[Row], before: Row, config: Config) -> Workload:
    """All but the time of a token; ``bank_s`` is the time of a batch's distillations."""
    run, bank, e = config.run, config.bank, config.extractor

    def grown(name: str) -> float:
        return float(used[-1].get(name, 0.0)) - float(before.get(name, 0.0))

    episodes = run.groups_per_step * run.group_size
    turns = _mean(used, "rollout/turns")
    merges = [row for row in used if bank.merge_every and (int(row["step"]) - 1) % bank.merge_every == 0 and int(row["step"]) > 1]
    quiet = [row for row in used if row not in merges] or used
    lessons_s = _mean(quiet, "phase_s/bank")
    submitted, updates = grown("bank/submitted"), grown("extractor/updates")
    return Workload(
        seed=run.seed,
        steps=len(used),
        environments=episodes,
        max_lag=0,
        sync=True,
        turns=Spread(mean=turns),
        reply_tokens=Spread(mean=_mean(used, "rollout/sampled_tokens") / max(1.0, episodes * turns)),
        env_s=Spread(mean=grown("env/busy_s") / max(1.0, grown("env/steps") + grown("env/resets"))),
        env_workers=max(1, config.env.workers),
        actor=Engine(slots=config.actor.slots),
        learner_s=_mean(used, "phase_s/actor_step"),
        learner_episode_s=0.0,
        publish_s=0.0,
        guided=run.guided_fraction,
        written=min(1.0, grown("bank/entries_written") / submitted) if submitted else 0.0,
        bank_s=lessons_s,
        bank_entries=bank.capacity,
        warmup_steps=0,  # the steps that are left out are longer
        lesson_tokens=Spread(mean=max(1.0, grown("serve/extractor/decoded_tokens") / submitted) if submitted else 1.0),
        extractor=Engine(slots=e.slots),
        concurrency=e.concurrency,
        merge_every=bank.merge_every if merges else 0,
        merge_s=max(0.0, _mean(merges, "phase_s/bank") - lessons_s) if merges else 0.0,
        extractor_batch=e.batch_size,
        extractor_update_s=sum(float(row.get("extractor/busy_s", 0.0)) for row in used) / updates if updates else 0.0,
        buffer_capacity=e.buffer_capacity,
        max_age_steps=e.max_age_steps,
        other_s=_mean(used, "phase_s/other"),
    )


def _one_batch(workload: Workload, *, phase: str, **changes: Engine) -> float:
    """Simulated seconds of one batch in ``phase``."""
    return simulate(dataclasses.replace(workload, steps=1, merge_every=0, **changes)).phases_s[phase]


def _solve(seconds: Callable[[float], float], wanted: float, low: float = 0.0, high: float = 1.0) -> float:
    """Where ``seconds``, which does not fall, reaches ``wanted``; the nearer end of the interval where it does not."""
    for _ in range(ROUNDS):
        middle = (low + high) / 2
        low, high = (middle, high) if seconds(middle) < wanted else (low, middle)
    return high


def _mean(rows: Sequence[Row], name: str) -> float:
    return sum(float(row.get(name, 0.0)) for row in rows) / len(rows)
