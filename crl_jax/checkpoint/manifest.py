"""The manifest of one checkpointed step: the list of everything that belongs to it.

Owns: its format, writing it durably, and checking a step's folder against it.
Promises: a manifest is written whole or not at all (temporary file, fsync, rename, fsync of the folder); ``verify`` finds missing,
truncated, changed and foreign files. A foreign file is an error, so nothing that was put beside a checkpoint (a pickle, say) is ever
opened. Does not: hash the array files (their sizes are checked, their content by their own format).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import pathlib
from typing import Any

from crl_jax.checkpoint.paths import inside
from crl_jax.errors import UserError

NAME = "manifest.json"
FORMAT = 1


class CheckpointError(UserError, RuntimeError):
    """A checkpoint that cannot be used as asked; the message names the step and what is wrong."""


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One array of a tree: its key path, shape, dtype name, and for PRNG keys the implementation's name (else empty)."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    key_impl: str = ""


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a step consists of. ``files`` maps relative file names to sizes in bytes, ``sha256`` record files to their digests."""

    step: int
    leaves: dict[str, tuple[Leaf, ...]]
    records: tuple[str, ...]
    files: dict[str, int]
    sha256: dict[str, str]
    format: int = FORMAT


def write(folder: pathlib.Path, manifest: Manifest) -> None:
    """Commits the step: after this returns, the checkpoint exists even if the machine stops."""
    for path in list_files(folder):
        _fsync(folder / path)
    for path in [p for p in folder.rglob("*") if p.is_dir()]:
        _fsync(path)
    temporary = folder / (NAME + ".tmp")
    temporary.write_text(json.dumps(dataclasses.asdict(manifest), indent=1), encoding="utf-8")
    _fsync(temporary)
    os.replace(temporary, folder / NAME)
    _fsync(folder)
    _fsync(folder.parent)


def read(folder: pathlib.Path) -> Manifest | None:
    """The manifest of a step's folder; None when it has none (a half-written step).

    Raises CheckpointError for a manifest that is not understood.
    """
    try:
        row: dict[str, Any] = json.loads((folder / NAME).read_text(encoding="utf-8"))
        if row["format"] != FORMAT:
            raise CheckpointError(f"{folder / NAME} has format {row['format']}, this version reads {FORMAT}")
        leaves = {name: tuple(Leaf(**{**leaf, "shape": tuple(leaf["shape"])}) for leaf in tree) for name, tree in row["leaves"].items()}
        files, digests = dict[str, int](row["files"]), dict[str, str](row["sha256"])
        return Manifest(**{**row, "leaves": leaves, "records": tuple(row["records"]), "files": files, "sha256": digests})
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, KeyError, TypeError, AttributeError) as error:  # what is no JSON, or JSON of another shape
        raise CheckpointError(f"{folder / NAME} is damaged: {type(error).__name__}: {error}") from error


def verify(folder: pathlib.Path, manifest: Manifest) -> None:
    """Raises CheckpointError naming the first file that is missing, of another size, changed, or not listed."""
    present = list_files(folder)
    foreign = sorted(present.keys() - manifest.files.keys() - {NAME})
    if foreign:
        raise CheckpointError(f"{folder.name} holds files that no checkpoint wrote, so it is refused: {', '.join(foreign)}")
    if {f"records/{name}.json" for name in manifest.records} != set(manifest.sha256):
        raise CheckpointError(f"{folder / NAME} is damaged: it lists the records {list(manifest.records)}, but has other digests")
    for name, size in manifest.files.items():
        _ = _inside(folder, name)
        if present.get(name) != size:
            raise CheckpointError(f"{folder.name}/{name} has {present.get(name, 'no')} bytes, its manifest says {size}")
    for name, digest in manifest.sha256.items():
        if digest_of(_inside(folder, name)) != digest:
            raise CheckpointError(f"{folder.name}/{name} was changed after it was saved")


def _inside(folder: pathlib.Path, name: str) -> pathlib.Path:
    try:
        return inside(folder, name)
    except ValueError as error:
        raise CheckpointError(f"{folder / NAME} is damaged: {error}") from error


def list_files(folder: pathlib.Path) -> dict[str, int]:
    """Relative names and sizes of all files below ``folder``; links count as files of their own size and are never followed."""
    return {p.relative_to(folder).as_posix(): p.lstat().st_size for p in folder.rglob("*") if p.is_symlink() or not p.is_dir()}


def digest_of(path: pathlib.Path) -> str:
    """sha256 of a file, in hex."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _fsync(path: pathlib.Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
