"""``crl ckpt ls | show | export-hf | prune``: the checkpoints of a run, for people.

Owns: what is told of a checkpoint, and the order of an export. Promises: ``ls`` and ``show`` change nothing and build no model; ``prune``
never removes the newest checkpoint that is whole, and refuses while a run writes; every function returns lines and prints nothing. Does
not: read or delete anything itself (``checkpoint``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import fcntl
import json
import math
import pathlib
import shutil
from collections import Counter
from collections.abc import Iterator
from typing import Any

from crl_jax.checkpoint import CheckpointError, retention, store
from crl_jax.checkpoint.manifest import NAME, Leaf
from crl_jax.checkpoint.retention import Keep
from crl_jax.config import ConfigError, load
from crl_jax.config.roles import MeshConfig
from crl_jax.config.schema import Config
from crl_jax.errors import UserError
from crl_jax.run_files import CONFIG

COMPLETE, HALF, DAMAGED = "complete", "half-written", "damaged"


class NoCheckpoint(UserError, LookupError):
    """There is no such run or checkpoint."""


@dataclasses.dataclass(frozen=True)
class Found:
    """One step's folder. ``state`` is complete, half-written (a kill left it) or damaged, ``why`` what is wrong with a damaged one."""

    step: int
    state: str
    why: str
    nbytes: int
    saved: str  # local time
    versions: dict[str, int]
    revision: int | None  # of the bank
    metrics: dict[str, float]
    best: bool


def look(folder: pathlib.Path, *, metric: str = "") -> list[Found]:
    """All steps of the run in ``folder``, oldest first; ``best`` by ``metric``, else by what the run keeps its best by."""
    root = _root(folder)
    keep = _keep(folder)
    keep = dataclasses.replace(keep, best=max(1, keep.best), metric=metric) if metric else keep
    best = retention.best(root, keep)
    return [_found(root, step, step in best) for step in store.steps(root)]


def ls(folder: pathlib.Path, *, metric: str = "", as_json: bool = False) -> list[str]:
    """One line for each step."""
    found = look(folder, metric=metric)
    if as_json:
        return [json.dumps(dataclasses.asdict(one)) for one in found]
    if not found:
        return [f"{folder} holds no checkpoint yet"]
    lines = [f"{'step':>8}  {'MiB':>8}  {'saved':<19}  {'bank':>8}  {'versions':<24}  state"]
    for one in found:
        versions = " ".join(f"{name} {n}" for name, n in one.versions.items())
        state = one.state + (f": {one.why}" if one.why else "") + (", best" if one.best else "")
        bank = "-" if one.revision is None else str(one.revision)
        lines.append(f"{one.step:>8}  {one.nbytes / 2**20:>8.1f}  {one.saved:<19}  {bank:>8}  {versions:<24}  {state}")
    return lines


def show(folder: pathlib.Path, step: int | None = None, *, leaves: bool = False, as_json: bool = False) -> list[str]:
    """What is in the checkpoint of ``step`` (None: the newest complete one); ``leaves``: every array."""
    root = _root(folder)
    step = _step(root, step)
    manifest, records = store.read_manifest(root, step), store.read_records(root, step)
    one, run, bank = _found(root, step, False), records.get("run", {}), records.get("bank")
    trees = {name: _trees(table) for name, table in manifest.leaves.items()}
    told: dict[str, Any] = {
        **{key: value for key, value in dataclasses.asdict(one).items() if key not in ("best", "why")},
        **{key: run[key] for key in ("method", "seed", "counters", "adapters") if key in run},
        "buffer": None if bank is None else len(json.loads(bank["buffer"])["waiting"]),
        "trees": trees,
        "files": len(manifest.files),
    }
    if as_json:
        every = {name: [dataclasses.asdict(leaf) for leaf in table] for name, table in manifest.leaves.items()}
        return [json.dumps(told | ({"leaves": every} if leaves else {}))]
    lines = [f"step {step}, {one.state}, saved {one.saved}, {one.nbytes / 2**20:.1f} MiB in {len(manifest.files)} files"]
    lines += [f"  {key}: {told[key]}" for key in ("method", "seed") if key in told]
    lines += [f"  {name}: {n}" for name, n in told.get("counters", {}).items() if name != "step"]
    lines += [f"  version of the {name}: {n}" for name, n in one.versions.items()]
    if one.revision is not None:
        lines.append(f"  bank: revision {one.revision}, {told['buffer']} generations wait in the training buffer")
    lines += [f"  {name} {value:g}" for name, value in sorted(one.metrics.items())]
    for name, parts in trees.items():
        lines += [f"  {name}.{part}: {text}" for part, text in parts.items()]
        lines += [f"    {leaf.path} {leaf.dtype}{list(leaf.shape)}" for leaf in manifest.leaves[name] if leaves]
    return lines


def export_hf(folder: pathlib.Path, role: str, out: pathlib.Path, *, step: int | None = None, dtype: str = "bfloat16") -> list[str]:
    """Write the weights of ``role`` (adapters merged) as a Hugging Face model folder ``out``, which must not exist.

    Raises NoCheckpoint, CheckpointError, ConfigError, and UserError for a model that no Hugging Face architecture stands for.
    """
    root = _root(folder)
    step = _step(root, step)
    if role not in (saved := store.read_records(root, step)["run"]["versions"]):
        raise NoCheckpoint(f"step {step} of {folder} has no {role}: it holds {', '.join(saved)}")
    if out.exists():
        raise NoCheckpoint(f"{out} exists: export to a folder that does not")
    config = _config(folder)
    from crl_jax import lookup, served_role
    from crl_jax.models.hf_weights import export_hf as write
    from crl_jax.serving.publisher import Serving

    trained = config.actor if role == "actor" else config.extractor
    chosen = dataclasses.replace(trained, mesh=MeshConfig(), serve_tensor=0)  # here there may be fewer devices than it was trained on
    config = dataclasses.replace(config, **{role: chosen})
    parts = lookup.role_parts(config, role)
    serving = Serving(parts.mesh)
    params, version = served_role.checkpoint_weights(config, role, chosen, parts, serving, root, step)
    source = pathlib.Path(chosen.model)
    try:
        write(parts.model, params, out, dtype=dtype, source=source if source.is_dir() else None)
    except ValueError as error:
        raise UserError(f"the {role} cannot be exported: {error}") from error
    told = f"{out}: the {role} of step {step} (version {version}) as {dtype}"
    return [told, _tokenizer(chosen.tokenizer, out)]


def prune(folder: pathlib.Path, *, last: int | None = None, best: int | None = None, metric: str = "", dry_run: bool = False) -> list[str]:
    """Delete all checkpoints but the newest ``last`` and the ``best`` by ``metric`` (None: as the run's recipe says), and half-written
    ones older than the newest complete one. Raises ConfigError for a number below 1 and while a run trains in the folder."""
    root, keep = _root(folder), _keep(folder)
    keep = Keep(keep.last if last is None else last, keep.best if best is None else best, metric or keep.metric, keep.lowest)
    if keep.last < 1 or keep.best < 0:
        raise ConfigError(f"--keep-last {keep.last} --keep-best {keep.best}: keep at least the newest one (--keep-last 1)")
    if keep.best and not keep.metric:
        raise ConfigError("--keep-best needs to know by what: add --metric, e.g. --metric eval/known/with/sampled")
    with _idle(folder):
        doomed = retention.doomed(root, keep)
        freed = sum(store.size_of(root, step) for step in doomed)
        if not dry_run:
            retention.prune(root, keep)
    left = [step for step in store.steps(root) if step not in doomed]
    what = "would delete" if dry_run else "deleted"
    return [f"{what} {_steps(doomed)} ({freed / 2**20:.1f} MiB); kept: {_steps(left)}"]


def _found(root: pathlib.Path, step: int, best: bool) -> Found:
    state, why, run, bank = COMPLETE, "", dict[str, Any](), dict[str, Any]()
    marker = root / f"step_{step:08d}" / NAME
    try:
        records = store.read_records(root, step)
        run, bank = records.get("run", {}), records.get("bank") or {}
    except CheckpointError as error:
        state, why = (DAMAGED, str(error)) if marker.exists() else (HALF, "")
    when = (marker if marker.exists() else marker.parent).stat().st_mtime
    saved = datetime.datetime.fromtimestamp(when).isoformat(" ", "seconds")
    metrics = retention.metrics_of(root, step) if state == COMPLETE else {}
    return Found(step, state, why, store.size_of(root, step), saved, run.get("versions", {}), bank.get("revision"), metrics, best)


def _trees(table: tuple[Leaf, ...]) -> dict[str, str]:
    """The parts of a tree, each in a few words."""
    parts: dict[str, list[Leaf]] = {}
    for leaf in table:
        parts.setdefault(leaf.path.lstrip(".[").split(".")[0].split("[")[0].strip("'\"]") or "value", []).append(leaf)
    return {part: _summary(found) for part, found in parts.items()}


def _summary(leaves: list[Leaf]) -> str:
    sizes = Counter[str]()
    for leaf in leaves:
        sizes[leaf.dtype] += math.prod(leaf.shape)
    return f"{len(leaves)} arrays, " + ", ".join(f"{n:,} x {dtype}" for dtype, n in sizes.most_common())


def _tokenizer(name: str, out: pathlib.Path) -> str:
    """Puts the tokenizer ``name`` into ``out``, as far as it has files of its own; says what came of it."""
    from crl_jax.models.hf_weights import COPIED
    from crl_jax.models.load import MICRO_VOCAB

    path = MICRO_VOCAB if name == "builtin:micro" else pathlib.Path(name)
    if path.is_dir():
        for file in (path / one for one in COPIED):
            if file.is_file():
                shutil.copyfile(file, out / file.name)
        return f"  with the tokenizer of {path}"
    if path.is_file() and path.suffix in (".txt", ".json"):
        shutil.copyfile(path, out / path.name)
        return f"  its tokenizer is none of Hugging Face's: {path.name} beside it is for crl (actor.tokenizer={out / path.name})"
    return f"  without a tokenizer: {name} has no files of its own; use that name in a recipe"


def _root(folder: pathlib.Path) -> pathlib.Path:
    root = folder / "checkpoints"
    if not root.is_dir():
        raise NoCheckpoint(f"{root} does not exist: give the folder of a run that has saved, e.g. runs/quickstart")
    return root


def _step(root: pathlib.Path, step: int | None) -> int:
    if step is None:
        step = store.latest(root)
        if step is None:
            raise NoCheckpoint(f"{root} holds no complete checkpoint: `crl ckpt ls` says what is there")
    elif step not in store.steps(root):
        raise NoCheckpoint(f"{root} has no step {step}: it has {_steps(store.steps(root))}")
    return step


def _config(folder: pathlib.Path) -> Config:
    return load(folder / CONFIG)


def _keep(folder: pathlib.Path) -> Keep:
    """What the run's recipe keeps; of a folder without a recipe that can be read, the defaults."""
    try:
        run = _config(folder).run
    except (ConfigError, OSError):
        run = Config().run
    return Keep(run.keep_last, run.keep_best.count if run.keep_best.metric else 0, run.keep_best.metric, run.keep_best.lowest)


@contextlib.contextmanager
def _idle(folder: pathlib.Path) -> Iterator[None]:
    """No run trains in ``folder`` inside the block."""
    with (folder / "lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f"a run trains in {folder} and prunes by itself (run.keep_last): wait for its end") from error
        yield


def _steps(steps: list[int]) -> str:
    return ", ".join(f"step {step}" for step in steps) or "nothing"
