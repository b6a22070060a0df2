"""Folders for the temporary files of environment workers.

Owns: their names, which say whose they are: ``crl-envs-HOST-PID-RANDOM`` in the system's folder for temporary files. Promises: `sweep`
removes only folders of processes of this host that are gone; a folder whose owner cannot be told stays. Does not: remove the folders of a
living process (the pool does, when a worker stops).

The host is part of the name because machines and containers may share the folder, and a process id means nothing outside its own.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import tempfile
from pathlib import Path

_PREFIX = "crl-envs-"


def make() -> str:
    """Make a folder that belongs to this process; its path."""
    return tempfile.mkdtemp(prefix=f"{_PREFIX}{socket.gethostname()}-{os.getpid()}-")


def sweep(parent: str | None = None) -> int:
    """Remove what processes that were killed left in ``parent`` (the system's folder for temporary files); how many folders went.

    What cannot be removed (another user's, say) stays.
    """
    ours = re.compile(rf"{_PREFIX}{re.escape(socket.gethostname())}-(\d+)-[^-]+")
    removed = 0
    for folder in Path(parent or tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        owner = ours.fullmatch(folder.name)
        if owner is None or folder.is_symlink() or _alive(int(owner[1])):
            continue
        shutil.rmtree(folder, ignore_errors=True)
        removed += not folder.exists()
    return removed


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)  # asks only
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's process
        return True
    return True
