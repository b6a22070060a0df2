"""``crl bank seed --demonstrations``: what a person did, distilled by the run's extractor like any episode.

Owns: episodes made of demonstrations, and what is said about them. Promises: the file is read to its end first; the lessons are logged with
the reason ``seed``, whole generations with them; a demonstration the extractor could not use is counted and named. Does not: train.
"""

from __future__ import annotations

import hashlib
import pathlib
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from crl_jax.bank_tools import offline
from crl_jax.bank_tools.lessons import Demonstration, read_demonstrations
from crl_jax.bank_tools.place import Place, undone_by_resume
from crl_jax.records import Condition, Episode, Status, Task, TokenLog

if TYPE_CHECKING:
    from crl_jax.config.schema import Config
    from crl_jax.experience.manager import ExperienceManager


def episodes(demonstrations: Sequence[Demonstration]) -> list[Episode]:
    """Finished episodes that read no experience; the same demonstration has the same id in every file."""
    return [
        Episode(
            id=(name := f"demonstration-{hashlib.sha256(repr(d).encode()).hexdigest()[:12]}"),
            group_id=name,
            condition=Condition.FREE,
            task=Task("demonstration", 0, d.goal, d.namespace),
            log=TokenLog.empty(),
            turns=d.turns,
            final_observation=d.final_observation,
            status=Status.TERMINATED,
            success=d.success,
            reward=float(d.success),
        )
        for d in demonstrations
    ]


def seed_demonstrations(place: Place, file: pathlib.Path, config: Config | None) -> int:
    """Distil the demonstrations of a file into the bank. 1 if the extractor could use none of them."""
    found = episodes(read_demonstrations(file))
    recipe = offline.recipe(place, config)
    with offline.opened(place, recipe, purpose="seed") as ready:
        before = len(ready.manager.state)
        deadline_s = ready.deadline_s * max(1, len(found))
        ready.shell.call(_distil(ready.manager, found, deadline_s), deadline_s + 30, "distilling the demonstrations")
        counts, entries = ready.manager.counts, len(ready.manager.state)
    written, unread = counts["entries_written"], counts["parse_failures"]
    silent = counts["distil_failed"]
    print(f"{len(found)} demonstrations read by the extractor ({ready.weights}): {written} lessons written, {entries - before:+d} entries")
    if unread or silent or counts["prompts_too_long"]:
        print(f"{unread} answers could not be read, {silent} demonstrations had none ({counts['prompts_too_long']} are too long)")
    if warning := undone_by_resume(place):
        print(warning, file=sys.stderr)
    return 0 if written else 1


async def _distil(manager: ExperienceManager, found: Sequence[Episode], deadline_s: float) -> None:
    for episode in found:
        await manager.submit(episode)
    if left := await manager.drain(deadline_s):
        raise TimeoutError(f"{left} demonstrations were not distilled within {deadline_s:.0f} s (raise run.collect_timeout_s)")
