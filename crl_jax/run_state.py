"""What a run saves and how it continues.

Owns: the content of a checkpoint: both learner states, both versions, the bank's revision, buffer and carry, the counters, the totals of
the metrics. Promises: the step saved is the number of finished steps, so a resumed run starts with the next one; the task stream, the
sampling seeds and the schedules follow from the step; a synchronous run that was killed and resumed equals the uninterrupted one to the
last bit (``telemetry.exact`` says in which metrics). In-flight episodes are not saved: they are played again. The bank keeps every
acknowledged operation: a resumed asynchronous run goes on with the newest bank, a synchronous one goes back to the revision of the
checkpoint (later operations stay in the log, marked abandoned).
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import warnings
from typing import TYPE_CHECKING, Any

from crl_jax.checkpoint import store as checkpoints
from crl_jax.config.schema import Config

if TYPE_CHECKING:
    from crl_jax.run import Parts


@dataclasses.dataclass(frozen=True)
class RunCounters:
    """Progress of a run: finished steps, environment steps taken for them, extractor updates."""

    step: int = 0
    env_steps: int = 0
    extractor_updates: int = 0

    def after(self, env_steps: int, extractor_updates: int) -> RunCounters:
        """One step later, for which ``env_steps`` more were taken."""
        return RunCounters(self.step + 1, self.env_steps + env_steps, extractor_updates)


def save_run(run: Parts) -> None:
    """Begin to write the checkpoint of the finished steps; raises OSError when the disk refused the one before (``Saver.save``)."""
    counters = dataclasses.replace(run.counters, extractor_updates=run.extractor_updates)  # one may have ended after the step
    roles = run.roles
    records: dict[str, Any] = {
        "run": {
            "counters": dataclasses.asdict(counters),
            "versions": {name: role.version for name, role in roles.items()},
            "method": run.config.run.method,
            "seed": run.config.run.seed,
            "adapters": {name: adapters_of(run.config, name) for name in roles},
            "gate": run.carried(),
            "totals": run.totals.newest,
            "metrics": run.scores,
        }
    }
    if (bank := run.saved_bank) is not None and run.job.processes.first:
        records["bank"] = run.shell.call(bank.checkpoint(), run.collect_deadline_s, "saving the bank's buffer")
    run.saver.save(counters.step, {name: role.state for name, role in roles.items()}, records, first=functools.partial(_bank_is_safe, run))


def _bank_is_safe(run: Parts) -> None:
    """Return when what the newest checkpoint needs of the bank is on disk."""
    if (bank := run.saved_bank) is not None and run.job.processes.first:
        run.shell.call(bank.snapshot_made(), run.collect_deadline_s, "copying the bank's file")


def save_at_once(run: Parts, *, spare_s: float = 0.0) -> int:
    """Save what is finished, if it is not saved yet, and return the number of steps. What goes on meanwhile (episodes that are being
    played) is not part of it: weights, counters, bank and buffer are those of the last finished step.

    While the checkpoint is written, and for at most ``spare_s`` (s), episodes that were finished are distilled: they will not be played
    again. What they teach is in the bank, with which an asynchronous run goes on; those that are left are counted and named in a warning.
    """
    run.saver.wait()
    step = run.counters.step
    if step and not run.job.processes.of_first(lambda: checkpoints.is_whole(run.saver.root, step), f"looking for step {step}"):
        save_run(run)
    finish = None if (bank := run.saved_bank) is None else bank.finish(spare_s)
    if finish is not None and (lost := run.shell.call(finish, spare_s + 10, "the last distillations")):
        left = f"the run was stopped before {lost} of its episodes were distilled: they teach nothing"
        warnings.warn(left, RuntimeWarning, stacklevel=2)
    run.saver.wait()
    return step


def restore_run(run: Parts, *, step: int | None = None) -> RunCounters:
    """Continue from the newest complete checkpoint (or that of ``step``); from the start when there is none.

    Raises CheckpointError for a missing ``step``, for a checkpoint of another method, seed or kind of adapters, or when all there are
    damaged.
    """
    root, processes = run.folder / "checkpoints", run.job.processes
    step = processes.of_first(lambda: checkpoints.latest(root), "finding the newest checkpoint") if step is None else step
    if step is None:
        if checkpoints.committed(root):
            raise checkpoints.CheckpointError(
                f"every checkpoint in {root} is damaged (see the warnings): put a copy back, or delete {root} to begin again at step 0"
            )
        if (bank := run.saved_bank) is not None and processes.first:  # killed before its first checkpoint: a few steps may have been played
            run.shell.call(bank.restart(rewind=run.config.run.sync), run.collect_deadline_s, "emptying the bank")
        run.trackers.rewind(0)
        return RunCounters()
    roles = run.roles
    saved = checkpoints.read_records(root, step)["run"]
    if saved["method"] != run.config.run.method:
        raise checkpoints.CheckpointError(
            f"{root} holds a {saved['method']} run, the configuration says {run.config.run.method}: choose another run.name"
        )
    if saved["seed"] != run.config.run.seed:
        raise checkpoints.CheckpointError(
            f"{root} holds a run of seed {saved['seed']}, the configuration says {run.config.run.seed}: set run.seed={saved['seed']}, "
            "or choose another run.name"
        )
    for name in roles:
        require_adapters(root, name, saved.get("adapters", {}).get(name), adapters_of(run.config, name))
    found = checkpoints.restore(root, step, {name: role.state for name, role in roles.items()})
    for name, role in roles.items():
        role.restore(found.arrays[name], saved["versions"][name])
    if (bank := run.saved_bank) is not None and processes.first:
        kept = found.records["bank"]
        run.shell.call(bank.restore(kept, rewind=run.config.run.sync), run.collect_deadline_s, "restoring the bank")
    run.go_on(saved.get("gate"))
    counters = RunCounters(**saved["counters"])
    run.extractor_updates = counters.extractor_updates
    run.trackers.rewind(counters.step)
    run.totals.go_on(saved.get("totals", {}), run.joined(run.counted(), "counting what was restored"))
    return counters


def adapters_of(config: Config, name: str) -> dict[str, Any]:
    """What the learner state of the role called ``name`` means, by key of its configuration: only the rank when all weights are trained,
    for their state stands alone; adapters are nothing without their scale and the weights they change.
    """
    role = config.actor if name == "actor" else config.extractor
    if not role.lora.rank:
        return {"lora.rank": 0}
    return {
        "lora.rank": role.lora.rank,
        "lora.alpha": role.lora.alpha,
        "lora.targets": list(role.lora.targets),
        "model": role.model,
        "weights": role.weights,
    }


def require_adapters(root: pathlib.Path, name: str, saved: dict[str, Any] | None, wanted: dict[str, Any]) -> None:
    """Raises CheckpointError when a learner state was saved (``saved``) with other adapters than ``wanted``: arrays of the right shape
    would be restored onto other weights, or with another scale, without a word.
    """
    if saved is None:  # before this was recorded
        return
    differing = [key for key in saved if _name(saved[key]) != _name(wanted.get(key))]
    if not differing:
        return
    settings = " ".join(f"{name}.{key}={_written(saved[key])}" for key in differing)
    kind = f"adapters of rank {saved['lora.rank']}" if saved["lora.rank"] else "all weights"
    raise checkpoints.CheckpointError(
        f"{root} holds {kind} of the {name} and was saved with other settings: set {settings}, or choose another run.name"
    )


def _name(value: Any) -> Any:
    """Files may have moved since: of a path only its last part counts."""
    return pathlib.PurePath(value).name if isinstance(value, str) else value


def _written(value: Any) -> str:
    return f"[{','.join(value)}]" if isinstance(value, list) else str(value)
