"""A started run: its parts, and what is asked of several of them at once.

Owns: the calls from the learner's thread to the asynchronous side, and the metrics of all parts. Promises: every call has a deadline; in a
job of several processes the first one speaks for all where the bank or a file is shared, and counts are those of all. Does not: start or
end the parts (``build``).
"""

from __future__ import annotations

import abc
import dataclasses
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from crl_jax.checkpoint.background import Saver
from crl_jax.config.schema import Config
from crl_jax.experience.buffer import Sample
from crl_jax.job import Job
from crl_jax.models import transformer
from crl_jax.records import Episode, Experience, Task
from crl_jax.role import Role
from crl_jax.rollout.collector import Collector
from crl_jax.rollout.shell import Shell
from crl_jax.rollout.tasks import Mixture, TaskStream
from crl_jax.run_bank import RunBank
from crl_jax.run_state import RunCounters
from crl_jax.telemetry.joined import join_rows, pack_row
from crl_jax.telemetry.memory import memory_metrics
from crl_jax.telemetry.profiler import ProfilerWindow
from crl_jax.telemetry.totals import Totals
from crl_jax.telemetry.tracker import FanOut


@dataclasses.dataclass(kw_only=True)
class Parts(abc.ABC):
    """What every job of a run has, whichever models it trains."""

    config: Config
    job: Job
    folder: pathlib.Path
    shell: Shell
    manager: RunBank | None
    trackers: FanOut
    profiler: ProfilerWindow
    saver: Saver
    clock: Callable[[], float] = time.monotonic
    extractor_updates: int = 0
    totals: Totals = dataclasses.field(default_factory=Totals)
    counters: RunCounters = dataclasses.field(default_factory=RunCounters)  # of the steps that are finished, whose rows are written
    scores: dict[str, float] = dataclasses.field(default_factory=dict[str, float])  # metrics of the last of them, for its checkpoint

    @property
    @abc.abstractmethod
    def roles(self) -> dict[str, Role]:
        """The models of this job by name."""

    @property
    def saved_bank(self) -> RunBank | None:
        """The bank, if it is for this job to say what a checkpoint keeps of it."""
        return None

    @property
    def collect_deadline_s(self) -> float:
        """The longest wait for one batch, one generation or one call of the bank, in seconds."""
        return self.config.run.collect_timeout_s

    def carried(self) -> Any:
        """What else a checkpoint keeps."""
        return None

    def go_on(self, carried: Any) -> None:
        """Take up what a checkpoint kept (`carried`)."""
        del carried  # nothing is kept

    def counted(self) -> dict[str, Any]:
        """Counters and gauges of this process's parts since its start."""
        found: dict[str, Any] = {"extractor/updates": self.extractor_updates} | memory_metrics()
        found |= {f"profile/{name}": value for name, value in self.profiler.counts().items()}
        for role in self.roles.values():
            found |= {f"serve/{role.name}/{name}": value for name, value in role.sampler.stats().items()}
            found |= {f"publish/{role.name}/{name}": value for name, value in role.published.metrics().items()}
        return found

    def joined(self, row: Mapping[str, Any], what: str) -> dict[str, Any]:
        """``row`` of all processes together."""
        processes = self.job.processes
        return dict(row) if processes.count == 1 else join_rows(processes.gather(pack_row(row), what))

    def metrics(self) -> dict[str, Any]:
        """Counters (of the whole run, also of its earlier processes) and gauges of the environments, the bank, the samplers, the
        checkpoints and this job's processes."""
        counted = self.joined(self.counted(), "counting")
        return self.totals.of(counted) | {f"checkpoint/{name}": value for name, value in self.saver.stats().items()}

    def devices(self) -> str:
        """For the start of a run: on what it runs."""
        found, count = f"{jax.device_count()} {jax.default_backend()} device(s)", self.job.processes.count
        return found if count == 1 else f"{found} of {count} processes"


@dataclasses.dataclass(kw_only=True)
class Run(Parts):
    """A started run that trains the actor: every part of it, ready to be used by ``train`` and ``evaluate``."""

    collector: Collector
    stream: TaskStream | Mixture
    eval_sets: dict[str, list[Task]]
    actor: Role
    extractor: Role | None

    @property
    def roles(self) -> dict[str, Role]:
        """The models of this job by name."""
        return {role.name: role for role in (self.actor, self.extractor) if role is not None}

    @property
    def saved_bank(self) -> RunBank | None:
        """The bank of the run."""
        return self.manager

    def carried(self) -> Any:
        """The gate's tally."""
        return None if self.collector.gate is None else self.collector.gate.carry()

    def go_on(self, carried: Any) -> None:
        """With the gate's tally."""
        if self.collector.gate is not None and carried:
            self.collector.gate.go_on(carried)

    @property
    def trains_actor(self) -> bool:
        """False for the method that only grows experience."""
        return self.config.run.method != "exp_only"

    @property
    def trains_extractor(self) -> bool:
        """False without a bank and for the method whose extractor stays frozen."""
        return self.config.run.method in ("exp_only", "complementary")

    def guided_per_group(self, step: int) -> int:
        """How many episodes of each group read the bank at ``step``: none before the bank's warm-up is over."""
        run = self.config.run
        warm = self.manager is not None and step >= self.config.bank.warmup_steps
        return round(run.guided_fraction * run.group_size) if warm else 0

    def feed_bank(self, episodes: Sequence[Episode], step: int) -> None:
        """Usage, credit and distillation of finished episodes. In a synchronous run it waits until all of them are distilled."""
        if self.manager is not None:
            self.tell_step(step)
            deadline_s = self.collect_deadline_s + 10  # the drain inside names what is late, so it may end first
            self.shell.call(self._feed(self.manager, episodes, step), deadline_s, f"feeding the bank at step {step}")

    def tell_step(self, step: int) -> None:
        """The bank's clock stands at ``step`` when this returns in any process of the job; ``run.steps`` says that the run is over."""
        if self.manager is not None and self.job.processes.first:
            self.shell.call(self.manager.on_step(step), self.collect_deadline_s, f"telling the bank of step {step}")
        self.job.processes.meet(f"step {step} at the bank")

    async def _feed(self, manager: RunBank, episodes: Sequence[Episode], step: int) -> None:
        await manager.observe(episodes)
        which = self.config.extractor.submit
        for episode in episodes:
            wanted = which == "all" or (which == "guided" and episode.shown) or (which == "success" and episode.success)
            if wanted and episode.reward is not None:
                await manager.submit(episode)
        if self.config.run.sync and (left := await manager.drain(self.collect_deadline_s)):
            late = f"{left} episodes of step {step} were not distilled within {self.collect_deadline_s:.0f} s"
            raise TimeoutError(f"{late} (raise run.collect_timeout_s)")

    def pop_evidence(self, step: int) -> list[Sample] | None:
        """The next full extractor batch, or None."""
        assert self.manager is not None
        return self.shell.call(self.manager.pop_batch(), self.collect_deadline_s, "the extractor's batch")

    def record_training(self, evidence: Sequence[Sample], weights: Sequence[float], step: int) -> None:
        """The extractor was just trained on ``evidence``; those of weight 0 do not count as trained."""
        assert self.manager is not None
        self.extractor_updates += 1
        trained = [s.generation.id for s, w in zip(evidence, weights, strict=True) if w > 0]
        self.shell.call(self.manager.record_trained(trained, step=step), self.collect_deadline_s, "recording the extractor's batch")

    def lesson_texts(self, episode: Episode) -> list[str]:
        """Texts of the lessons the episode read that are still in the bank."""
        if self.manager is None:
            return []
        refined = {verdict.experience_id: verdict.text for verdict in episode.verdicts if verdict.text}
        found = self.shell.call(self.manager.find(episode.shown), self.collect_deadline_s, "reading lessons")
        return [refined.get(entry.id, entry.text) for entry in found]

    def by_part(self, episodes: Sequence[Episode]) -> dict[str, list[Episode]]:
        """The episodes of each part of the mixture, in the recipe's order; empty without a mixture."""
        envs = self.collector.settings.envs
        return {part: [e for e in episodes if envs[e.task.env].part == part] for part in self.config.env.mixture}

    def newest_lessons(self, limit: int) -> list[Experience]:
        """The newest entries of the bank, newest first."""
        return [] if self.manager is None else self.shell.call(self.manager.newest(limit), self.collect_deadline_s, "reading lessons")

    def counted(self) -> dict[str, Any]:
        """Also of the environments, the bank and the gate."""
        found = super().counted() | {f"env/{name}": value for name, value in dataclasses.asdict(self.collector.pool.stats()).items()}
        if self.manager is not None:
            stats = self.shell.call(self.manager.stats(), self.collect_deadline_s, "counting in the bank")
            found |= {f"bank/{name}": value for name, value in stats.items()}
            found["bank/size"] = found["bank/entries"]
        if self.collector.gate is not None:
            found |= {f"gate/{name}": value for name, value in self.collector.gate.stats().items()}
        return found

    def describe(self, first_step: int) -> str:
        """One line for the start of the run."""
        c, n = self.config, transformer.count_params
        roles = f"actor {c.actor.model} ({n(self.actor.model_config) / 1e6:.2f} M)"
        if self.extractor is not None:
            roles += f", extractor {c.extractor.model} ({n(self.extractor.model_config) / 1e6:.2f} M)"
        what = f"run {c.run.name}: {c.run.method}, seed {c.run.seed}, {roles}, {len(self.stream.goals)} tasks, {self.devices()}"
        return f"{what}, from step {first_step} of {c.run.steps}; files in {self.folder}"
