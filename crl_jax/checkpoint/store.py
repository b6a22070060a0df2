"""Saves, finds, restores and prunes the checkpoints of a run.

Owns: the layout ``root/step_00000012/{arrays/NAME/, records/NAME.json, manifest.json}``.
Promises: a step counts only once its manifest is there, so a kill at any point leaves the previous step the latest; ``save`` blocks until
the step is committed, raises its errors in the caller, and a save that fails leaves nothing behind that takes up space; values, dtypes and
shardings come back as they were; only JSON and Orbax array files are ever read.
Does not: save in the background (``background``), or know which steps are worth keeping (``retention``).
"""

from __future__ import annotations

import dataclasses
import errno
import json
import pathlib
import re
import shutil
import warnings
from collections.abc import Callable, Collection, Mapping
from typing import Any

from crl_jax.checkpoint import manifest as manifests
from crl_jax.checkpoint.arrays import Held, begin_tree, hold, read_tree, write_tree
from crl_jax.checkpoint.manifest import CheckpointError, Manifest
from crl_jax.checkpoint.paths import inside
from crl_jax.processes import Processes

_STEP = re.compile(r"step_(\d{8,})")
_NAME = re.compile(r"[a-z][a-z0-9_]*")


@dataclasses.dataclass(frozen=True)
class Restored:
    """A checkpoint in memory: the step it was saved after, its trees, its JSON records."""

    step: int
    arrays: dict[str, Any]
    records: dict[str, Any]


def save(
    root: pathlib.Path, step: int, arrays: Mapping[str, Any], records: Mapping[str, Any], *, keep_last: int | None = None
) -> pathlib.Path:
    """Writes the checkpoint of ``step`` (the number of finished steps) and returns its folder.

    ``arrays`` are pytrees of JAX or NumPy arrays, or what `hold` made of them, ``records`` anything JSON can hold exactly. A half-written
    or damaged folder of the same step is replaced (a run that passed it over comes by again). With ``keep_last`` older steps are pruned
    afterwards. Raises ValueError for a bad name, CheckpointError if the step exists, OSError from the disk; the steps before stay usable.
    """
    for name in (*arrays, *records):
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} is no checkpoint part: use lower-case letters, digits and _")
    require_new(root, step)
    folder, held = _folder(root, step), {name: tree if isinstance(tree, Held) else hold(tree) for name, tree in arrays.items()}
    if folder.exists():
        shutil.rmtree(folder)
    needed = sum(tree.nbytes for tree in held.values())
    root.mkdir(parents=True, exist_ok=True)
    if (full := _too_little(root, needed)) is not None:  # before anything is written
        raise full
    try:
        _write(folder, step, held, records)
    except Exception as error:
        full = None if isinstance(error, OSError) else _too_little(root, needed)  # the array writer's own errors name no cause
        shutil.rmtree(folder, ignore_errors=True)
        if full is not None:
            raise full from error
        raise
    if keep_last is not None:
        prune(root, keep_last)
    return folder


def save_together(root: pathlib.Path, step: int, arrays: Mapping[str, Any], records: Mapping[str, Any], processes: Processes) -> None:
    """`save` by all processes of a job, each with its part of the arrays; the records are those of the first, which writes the manifest.

    Raises as `save`, in the process that failed; in the others PeerFailed or TimeoutError. The first removes what was half written.
    """
    begin_together(root, step, arrays, records, processes)(processes)


def begin_together(
    root: pathlib.Path, step: int, arrays: Mapping[str, Any], records: Mapping[str, Any], processes: Processes
) -> Callable[[Processes], None]:
    """The beginning of `save_together`: the arrays may be donated when it returns. The function it returns does the rest, in another thread
    with a channel of its own.
    """
    folder, held = _folder(root, step), {name: hold(tree) if not isinstance(tree, Held) else tree for name, tree in arrays.items()}

    def begin() -> None:
        require_new(root, step)
        if folder.exists():
            shutil.rmtree(folder)
        root.mkdir(parents=True, exist_ok=True)
        if (full := _too_little(root, sum(tree.nbytes for tree in held.values()))) is not None:
            raise full
        (folder / "arrays").mkdir(parents=True)

    def removed() -> None:
        if processes.first and not is_whole(root, step):
            shutil.rmtree(folder, ignore_errors=True)

    processes.of_first(begin, f"the folder of step {step}")
    try:
        writing = [begin_tree(folder / "arrays" / name, tree, wait_s=processes.deadline_s) for name, tree in held.items()]
    except Exception:
        removed()
        raise

    def finish(processes: Processes) -> None:
        try:
            for written in writing:
                written()
            processes.meet(f"the arrays of step {step}")
            leaves = {name: tree.table for name, tree in held.items()}
            processes.of_first(lambda: _commit(folder, step, leaves, records), f"the manifest of step {step}")
        except Exception:
            removed()
            raise

    return finish


def _write(folder: pathlib.Path, step: int, arrays: Mapping[str, Held], records: Mapping[str, Any]) -> None:
    (folder / "arrays").mkdir(parents=True)
    _commit(folder, step, {name: write_tree(folder / "arrays" / name, tree) for name, tree in arrays.items()}, records)


def _commit(folder: pathlib.Path, step: int, leaves: Mapping[str, Any], records: Mapping[str, Any]) -> None:
    """The records, then the manifest, which makes the step count."""
    (folder / "records").mkdir(parents=True)
    digests: dict[str, str] = {}
    for name, record in records.items():
        path = folder / "records" / f"{name}.json"
        path.write_text(json.dumps(record, ensure_ascii=False), encoding="utf-8")
        digests[f"records/{name}.json"] = manifests.digest_of(path)
    manifests.write(folder, Manifest(step, dict(leaves), tuple(records), manifests.list_files(folder), digests))


def latest(root: pathlib.Path) -> int | None:
    """The newest step that is complete and passes ``verify``; None if there is none.

    Half-written steps (no manifest) are what a kill leaves and are passed over. A step whose manifest is there but whose files are not as
    it says is passed over with a RuntimeWarning that names the damage.
    """
    for step in sorted(_steps(root), reverse=True):
        try:
            _verified(root, step)
        except CheckpointError as error:
            if _has_manifest(root, step):
                warnings.warn(f"checkpoint skipped: {error}", RuntimeWarning, stacklevel=2)
            continue
        return step
    return None


def committed(root: pathlib.Path) -> list[int]:
    """The steps that have a manifest, oldest first, whether they are still whole or not."""
    return sorted(step for step in _steps(root) if _has_manifest(root, step))


def restore(root: pathlib.Path, step: int, like: Mapping[str, Any]) -> Restored:
    """The checkpoint of ``step``; ``like`` has a template tree (arrays or ``ShapeDtypeStruct``) for every tree in it.

    Raises CheckpointError if the step is missing, incomplete, damaged or holds foreign files, or if a tree's keys, shapes or dtypes differ.
    """
    manifest = _verified(root, step)
    if set(like) != set(manifest.leaves):
        raise CheckpointError(f"step {step} holds the trees {sorted(manifest.leaves)}, asked for {sorted(like)}")
    folder = _folder(root, step)
    arrays = {name: read_tree(folder / "arrays" / name, manifest.leaves[name], tree, name) for name, tree in like.items()}
    return Restored(step, arrays, _records(folder, manifest))


def restore_tree(root: pathlib.Path, step: int, name: str, like: Any) -> Any:
    """The tree ``name`` of the checkpoint of ``step`` alone. Raises CheckpointError as ``restore`` does."""
    manifest = _verified(root, step)
    if name not in manifest.leaves:
        raise CheckpointError(f"step {step} in {root} holds the trees {sorted(manifest.leaves)}, not {name!r}")
    return read_tree(_folder(root, step) / "arrays" / name, manifest.leaves[name], like, name)


def read_records(root: pathlib.Path, step: int) -> dict[str, Any]:
    """Only the JSON records of ``step`` (verified), e.g. to look at a checkpoint without building its models."""
    return _records(_folder(root, step), _verified(root, step))


def prune(root: pathlib.Path, keep_last: int, *, keep: Collection[int] = ()) -> list[int]:
    """Deletes all but the newest ``keep_last`` complete steps and those to ``keep``, and half-written steps older than the newest complete
    one.

    Returns the steps deleted.
    """
    doomed = to_prune(root, keep_last, keep=keep)
    for step in doomed:
        folder = _folder(root, step)
        (folder / manifests.NAME).unlink(missing_ok=True)  # first, so a kill in between leaves a half-written step, not a damaged one
        shutil.rmtree(folder)
    return doomed


def to_prune(root: pathlib.Path, keep_last: int, *, keep: Collection[int] = ()) -> list[int]:
    """The steps that `prune` would delete: never the newest that is whole, so damaged newer ones cost no good one."""
    if keep_last < 1:
        raise ValueError(f"keep_last must be 1 or more, got {keep_last}")
    complete = committed(root)
    if not complete:
        return []
    whole = next((step for step in reversed(complete) if is_whole(root, step)), complete[-1])
    spared = {whole, *complete[-keep_last:], *keep}
    stale = [step for step in _steps(root) if step not in complete and step < complete[-1]]
    return sorted([*(step for step in complete if step not in spared), *stale])


def require_new(root: pathlib.Path, step: int) -> None:
    """Raises CheckpointError if ``step`` is there, whole."""
    if is_whole(root, step):
        raise CheckpointError(f"step {step} is already saved in {root}: a finished checkpoint is never overwritten")


def size_of(root: pathlib.Path, step: int) -> int:
    """Bytes on disk of whatever is there of ``step``."""
    return sum(manifests.list_files(_folder(root, step)).values())


def read_manifest(root: pathlib.Path, step: int) -> Manifest:
    """What ``step`` consists of. Raises CheckpointError if it is missing, half-written or damaged."""
    return _verified(root, step)


def steps(root: pathlib.Path) -> list[int]:
    """All steps of which there is anything, oldest first."""
    return sorted(_steps(root))


def _too_little(root: pathlib.Path, needed: int) -> OSError | None:
    free = shutil.disk_usage(root).free
    if free >= needed:
        return None
    return OSError(errno.ENOSPC, f"a checkpoint needs {needed / 2**20:.1f} MiB, {free / 2**20:.1f} MiB are free", str(root))


def _folder(root: pathlib.Path, step: int) -> pathlib.Path:
    if step < 0:
        raise ValueError(f"a step is 0 or more, got {step}")
    return inside(root, f"step_{step:08d}")


def _steps(root: pathlib.Path) -> list[int]:
    if not root.is_dir():
        return []
    found = (_STEP.fullmatch(entry.name) for entry in root.iterdir() if entry.is_dir() and not entry.is_symlink())
    return [int(match[1]) for match in found if match]


def _has_manifest(root: pathlib.Path, step: int) -> bool:
    return (_folder(root, step) / manifests.NAME).exists()


def is_whole(root: pathlib.Path, step: int) -> bool:
    """Whether ``step`` is there, complete and as its manifest says."""
    try:
        _verified(root, step)
    except CheckpointError:
        return False
    return True


def _verified(root: pathlib.Path, step: int) -> Manifest:
    folder = _folder(root, step)
    manifest = manifests.read(folder)
    if manifest is None:
        raise CheckpointError(f"step {step} in {root} is missing or half-written (no {manifests.NAME})")
    manifests.verify(folder, manifest)
    if manifest.step != step:
        raise CheckpointError(f"{folder / manifests.NAME} is that of step {manifest.step}")
    return manifest


def _records(folder: pathlib.Path, manifest: Manifest) -> dict[str, Any]:
    return {name: json.loads(inside(folder, f"records/{name}.json").read_text(encoding="utf-8")) for name in manifest.records}
