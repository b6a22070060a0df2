"""Where families keep what they make once: generated games, catalogues, repositories.

Owns: the folder (``CRL_CACHE``, else ``~/.cache/crl_jax``) and making something in it exactly once.
Promises: ``made_once`` never shows half-made files, whoever is killed or does the same at the same time.
Does not: know what is made, or remove anything old.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path


def folder(family: str) -> Path:
    """The family's folder; not made yet."""
    return Path(os.environ.get("CRL_CACHE") or "~/.cache/crl_jax").expanduser() / family


def made_once(target: Path, make: Callable[[Path], None]) -> Path:
    """``target``, a folder that ``make`` filled: now, unless it is there. ``make`` gets an empty folder beside it, which is renamed at the
    end. The name of ``target`` must hold what it depends on (a version, a seed). Raises what ``make`` raises, and OSError.
    """
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    half = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
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
