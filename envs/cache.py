"""Where families keep what they make once: generated games, catalogues, repositories.

Owns: the folder (``CRL_CACHE``, else ``~/.cache/crl_jax``) and making something in it exactly once.
Promises: ``made_once`` never shows half-made files, whoever is killed or does the same at the same time; a folder that cannot be written
is ``EnvUnavailable``.
Does not: know what is made, or remove anything old.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from envs.api import EnvUnavailable

# No fault of a moment: trying again, or in another episode, is of no use.
_CLOSED = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.ENOENT}


def folder(family: str) -> Path:
    """The family's folder; not made yet. Raises ``EnvUnavailable``."""
    return path_of(os.environ.get("CRL_CACHE") or "~/.cache/crl_jax", "CRL_CACHE") / family


def path_of(given: str, variable: str) -> Path:
    """The path that somebody gave in ``variable``. Raises ``EnvUnavailable`` when it begins in the home folder of nobody."""
    try:
        return Path(given).expanduser()
    except RuntimeError as unknown:
        raise EnvUnavailable(f"{variable}={given}: no such home folder: give {variable} a whole path, e.g. /data/crl") from unknown


def made_once(target: Path, make: Callable[[Path], None]) -> Path:
    """``target``, a folder that ``make`` filled: now, unless it is there. ``make`` gets an empty folder beside it, which is renamed at the
    end. The name of ``target`` must hold what it depends on (a version, a seed). Raises what ``make`` raises, ``EnvUnavailable``, OSError.
    """
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        half = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    except OSError as failure:
        if failure.errno not in _CLOSED:
            raise
        raise EnvUnavailable(
            f"{target.parent} cannot be written ({failure.strerror}): let CRL_CACHE name one that can, or fill it with `crl envs prepare`"
        ) from failure
    try:
        make(half)
        half.chmod(0o755)
        with contextlib.suppress(OSError):  # somebody else finished first
            half.rename(target)
        if not target.is_dir():
            raise OSError(f"{target} cannot be made: something else has its name")
    finally:
        shutil.rmtree(half, ignore_errors=True)
    return target
