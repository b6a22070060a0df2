"""What a run saves and how it continues.

Owns: the content of a checkpoint: both learner states, both versions, the bank's revision and buffer, the counters. Promises: the step
saved is the number of finished steps, so a resumed run starts with the next one; the task stream, the sampling seeds and the schedules
follow from the step. In-flight episodes are not saved: they are played again. The bank keeps every acknowledged operation: a resumed
asynchronous run goes on with the newest bank, a synchronous one goes back to the revision of the checkpoint (later operations stay in the
log, marked abandoned).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from crl_jax.checkpoint import store as checkpoints
from crl_jax.records import Episode

if TYPE_CHECKING:
    from crl_jax.build import Run


@dataclasses.dataclass(frozen=True)
class RunCounters:
    """Progress of a run: finished steps, environment steps taken for them, extractor updates."""

    step: int = 0
    env_steps: int = 0
    extractor_updates: int = 0

    def after(self, episodes: Sequence[Episode], extractor_updates: int) -> RunCounters:
        """One step later, having played ``episodes``; search-and-ask turns are no environment steps."""
        turns = sum(not turn.tool for episode in episodes for turn in episode.turns)
        return RunCounters(self.step + 1, self.env_steps + turns, extractor_updates)


def save_run(run: Run, counters: RunCounters) -> None:
    """Write the checkpoint of ``counters.step`` finished steps; raises OSError when the disk refuses."""
    roles = {role.name: role for role in (run.actor, run.extractor) if role is not None}
    records: dict[str, Any] = {
        "run": {
            "counters": dataclasses.asdict(counters),
            "versions": {name: role.version for name, role in roles.items()},
            "method": run.config.run.method,
            "seed": run.config.run.seed,
        }
    }
    if run.manager is not None:
        records["bank"] = run.shell.call(run.manager.checkpoint(), run.collect_deadline_s, "saving the bank's buffer")
    checkpoints.save(
        run.folder / "checkpoints",
        counters.step,
        {name: role.state for name, role in roles.items()},
        records,
        keep_last=run.config.run.keep_last,
    )


def restore_run(run: Run, *, step: int | None = None) -> RunCounters:
    """Continue from the newest complete checkpoint (or that of ``step``); from the start when there is none.

    Raises CheckpointError for a missing ``step``, for a checkpoint of another method or seed, or when all there are damaged.
    """
    root = run.folder / "checkpoints"
    step = checkpoints.latest(root) if step is None else step
    if step is None:
        if checkpoints.committed(root):
            raise checkpoints.CheckpointError(
                f"every checkpoint in {root} is damaged (see the warnings): put a copy back, or delete {root} to begin again at step 0"
            )
        if run.manager is not None:  # killed before its first checkpoint: an evaluation or a few steps may have been played
            run.shell.call(run.manager.restart(rewind=run.config.run.sync), run.collect_deadline_s, "emptying the bank")
        return RunCounters()
    roles = {role.name: role for role in (run.actor, run.extractor) if role is not None}
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
    found = checkpoints.restore(root, step, {name: role.state for name, role in roles.items()})
    for name, role in roles.items():
        role.restore(found.arrays[name], saved["versions"][name])
    if run.manager is not None:
        bank = found.records["bank"]
        run.shell.call(run.manager.restore(bank, rewind=run.config.run.sync), run.collect_deadline_s, "restoring the bank")
    counters = RunCounters(**saved["counters"])
    run.extractor_updates = counters.extractor_updates
    return counters
