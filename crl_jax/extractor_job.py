"""The extractor in a job of its own: it serves its model for the bank to sample from, and learns whenever the bank has a full batch.

    repeat, until the bank says that the actor's job has taken its last step
      the first process asks the bank for a batch of credited generations, and tells the others
      one CISPO step by all processes together
      every process serves the new weights: requests in flight go on with them

Owns: the order of things in such a job. Promises: serving never waits for learning; what was saved can be resumed (steps are counted in
updates); a job that is told to stop saves and leaves with code 75; every wait has a deadline (an update ``run.step_timeout_s``). Does not:
see episodes or the actor.

The batch that a killed job was learning from, or a stopped one had just been given, is lost: it had left the bank's buffer. A resumed job
numbers its versions on from those of its checkpoint; the log-probabilities that a generation was sampled at are its own, so the ratio of
the loss is right whatever its number.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import pathlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from crl_jax import build, lookup, run_folder
from crl_jax.bank_service import bank_pb2 as pb
from crl_jax.bank_service import codec
from crl_jax.config.schema import Config
from crl_jax.experience.buffer import Sample
from crl_jax.extractor_learner import learn_from
from crl_jax.host_memory import keep_freed_memory
from crl_jax.job import Job
from crl_jax.models import transformer
from crl_jax.preemption import Preempted, Preemption, unless_stopped
from crl_jax.processes import Processes
from crl_jax.role import Role
from crl_jax.role_front import RoleFront, open_front, reserved
from crl_jax.rollout.shell import Shell
from crl_jax.run import Parts
from crl_jax.run_bank import RunBank, shared_bank
from crl_jax.run_state import RunCounters, restore_run, save_at_once, save_run
from crl_jax.serving.sampler import EngineSampler
from crl_jax.telemetry.spans import Spans
from crl_jax.telemetry.tracker import displayed
from crl_jax.token_file import read_token
from crl_jax.watchdog import Watchdog

LOOK_S = 0.5  # between looks at the bank
EARLIER_S = 600.0  # the actor's job begins within this, so what the bank says of the run is true then
WORD_S = 60.0  # between lines that say that it still waits
_CALL_S = 60.0  # of a call to the bank beyond its own deadline


@dataclasses.dataclass(kw_only=True)
class ExtractorParts(Parts):
    """A started job of the extractor. Steps are its updates."""

    extractor: Role
    bank: RunBank
    front: RoleFront
    began: float = 0.0  # when it looked at the bank first
    went_on: bool = False  # whether this run was seen before its end, by this process or one before

    @property
    def roles(self) -> dict[str, Role]:
        """The one model."""
        return {"extractor": self.extractor}

    def call(self, coroutine: Any, what: str) -> Any:
        """An answer of the bank."""
        return self.shell.call(coroutine, self.config.bank.server.timeout_s + _CALL_S, what)


def learn_and_serve(config: Config, *, resume: bool, out: Callable[[str], None], job: Job) -> pathlib.Path:
    """Runs the job to its end and returns its folder. ``out`` is called in the first process.

    Raises ConfigError when it cannot be run; Preempted when it was told to stop (it is saved then); whatever stopped a part of it.
    """
    say: Callable[[str], None] = out if job.processes.first else _silent
    with Preemption.of(config.run, job.processes) as stop, open_job(config, job, resume=resume) as parts, job.processes:
        parts.counters = restore_run(parts) if resume else RunCounters()
        parts.extractor_updates = parts.counters.step
        say(_described(parts))
        try:
            with Watchdog(config.run.step_timeout_s) as watchdog:
                _learn(parts, stop, watchdog, say)
        except Preempted as stopped:
            step = save_at_once(parts)
            stop.saved = True
            raise stopped.after(step, parts.folder) from None
        save_at_once(parts)
        return parts.folder


@contextlib.contextmanager
def open_job(config: Config, job: Job, *, resume: bool) -> Iterator[ExtractorParts]:
    """Builds and starts what the job needs. Raises ConfigError before anything starts when it cannot run here."""
    job.check(config)
    build.keep_compiled_programs(config.run.compile_cache)
    if jax.default_backend() == "cpu":
        keep_freed_memory()
    listen = config.extractor.listen
    with contextlib.ExitStack() as stack:
        token = read_token(pathlib.Path(listen.token_file) if listen.token_file else None)
        at = stack.enter_context(reserved(listen.host, listen.port, token))
        folder = stack.enter_context(run_folder.claim(config, job.processes, resume=resume))
        model = lookup.run_parts(config, ("extractor",))["extractor"]
        saver, trackers, profiler = build.open_outputs(config, folder, job, stack)
        shell = stack.enter_context(Shell())
        extractor = build.open_role(config, "extractor", model, None, shell, stack, job.processes)
        bank = shared_bank(config, shell, stack, read_only=False)
        queue = 4 * config.extractor.slots + config.extractor.concurrency
        assert isinstance(extractor.sampler, EngineSampler)  # `Job.check`
        front = stack.enter_context(open_front("extractor", extractor.sampler, model.codec, at=at, shell=shell, queue=queue))
        went_on = run_folder.holds_run(folder)
        if job.processes.first:
            run_folder.write_config(folder, config)
        outputs = {"trackers": trackers, "profiler": profiler, "saver": saver}
        models = {"extractor": extractor, "bank": bank, "front": front, "manager": None, "went_on": went_on}
        yield ExtractorParts(config=config, job=job, folder=folder, shell=shell, **models, **outputs)


def _learn(parts: ExtractorParts, stop: Preemption, watchdog: Watchdog, say: Callable[[str], None]) -> None:
    """All updates until the run is over."""
    spans, told = Spans(), parts.clock()
    while True:
        parts.front.check()
        parts.saver.check()
        with spans("wait"):
            unless_stopped(stop, parts.job.processes, functools.partial(_pause, parts))
            evidence, over, step = _look(parts)  # what it takes from the bank is learned from before the job stops
        if evidence:
            watchdog.begin(parts.counters.step)
            metrics = _update(parts, evidence, step, spans)
            _note(parts, metrics, spans, say)
            watchdog.rest()
            told = parts.clock()
        elif over:
            return
        elif parts.clock() - told > WORD_S:
            say(f"the extractor waits for a full batch of evidence; the actor's job is at step {step} of {parts.config.run.steps}")
            told = parts.clock()


def _pause(parts: ExtractorParts) -> None:
    """The time between looks at the bank; the other processes wait for the first."""
    if parts.job.processes.first:
        time.sleep(LOOK_S)


def _look(parts: ExtractorParts) -> tuple[list[Sample], bool, int]:
    """What the first process finds in the bank, in all of them: a batch if there is one, whether the run is over, its newest step."""
    processes, evidence = parts.job.processes, list[Sample]()

    def asked() -> tuple[bool, int, bool]:
        evidence.extend(parts.call(parts.bank.pop_batch(), "the extractor's batch") or ())
        step = int(parts.call(parts.bank.stats(), "looking how far the run is").get("step", 0))
        parts.went_on |= step < parts.config.run.steps
        return step >= parts.config.run.steps and _of_this_run(parts), step, bool(evidence)

    over, step, some = processes.of_first(asked, "what there is to do")
    if some and processes.count > 1:
        evidence = _handed_round(processes, evidence)
    return evidence, over, step


def _of_this_run(parts: ExtractorParts) -> bool:
    """Whether the bank speaks of this run's end. A bank that is used again says that of the run before, until the actor's job has begun."""
    parts.began = parts.began or parts.clock()
    return parts.went_on or parts.clock() - parts.began > EARLIER_S


def _handed_round(processes: Processes, evidence: Sequence[Sample]) -> list[Sample]:
    """The evidence of the first process, in all of them."""
    message = pb.GenerationsReply(generations=[codec.generation_to_proto(sample.generation) for sample in evidence])
    values = processes.of_first(lambda: [codec.sample_values(sample) for sample in evidence], "what the evidence is worth")
    received = pb.GenerationsReply.FromString(processes.bytes_of_first(message.SerializeToString(), "the evidence"))
    return [codec.sample_of(codec.generation_from_proto(m), found) for m, found in zip(received.generations, values, strict=True)]


def _update(parts: ExtractorParts, evidence: Sequence[Sample], step: int, spans: Spans) -> dict[str, Any]:
    processes, extractor = parts.job.processes, parts.extractor
    share = processes.share(len(evidence))
    parts.profiler.before(parts.counters.step)
    with spans("extractor_step"):
        sums, weights = learn_from(extractor, evidence, step=step, loss=parts.config.extractor.loss, mine=slice(share.start, share.stop))
    if processes.first:
        trained = [s.generation.id for s, weight in zip(evidence, weights, strict=True) if weight > 0]
        with spans("bank"):
            parts.call(parts.bank.record_trained(trained, step=step), "recording the extractor's batch")
    with spans("publish"):
        extractor.publish()
    parts.extractor_updates += 1
    return {f"extractor/{name}": value for name, value in sums.items()} | {"extractor/version": extractor.version, "run/step": step}


def _note(parts: ExtractorParts, metrics: dict[str, Any], spans: Spans, say: Callable[[str], None]) -> None:
    """The row of an update, and its checkpoint if one is due."""
    phases = spans.take()
    row = metrics | parts.metrics() | {"step_s": sum(phases.values())} | {f"phase_s/{name}": s for name, s in phases.items()}
    parts.counters = RunCounters(parts.counters.step + 1, 0, parts.extractor_updates)
    parts.trackers.log(parts.counters.step, row)
    numbers = displayed(row)
    where = f"update {parts.counters.step:>4}  at step {metrics['run/step']}/{parts.config.run.steps} of the run"
    learned = f"reward {numbers['extractor/reward']:+.2f}  lag {numbers['extractor/lag']:.1f}"
    say("  ".join([where, learned, *(f"{name} {s:.1f}s" for name, s in phases.items())]))
    every = parts.config.run.save_every
    if every and parts.counters.step % every == 0:
        with spans("checkpoint"):
            save_run(parts)


def _described(parts: ExtractorParts) -> str:
    c = parts.config
    model = f"extractor {c.extractor.model} ({transformer.count_params(parts.extractor.model_config) / 1e6:.2f} M)"
    what = f"run {c.run.name}: {model}, seed {c.run.seed}, {parts.devices()}, from update {parts.counters.step}"
    return f"{what}; served at {parts.front.url}/v1; files in {parts.folder}"


def _silent(text: str) -> None:
    del text
