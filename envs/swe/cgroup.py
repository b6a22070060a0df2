"""Control groups for sandboxes, where this process may make them.

Owns: making a group per command with a bound on processes and, in version 2, on the memory of all processes together (also in files in
memory, which no other limit sums); how the command enters it; removing it. The bounds lie above those that are looked at from outside
(``bounds``), which tell what was exceeded; these hold in between.
Promises: where groups cannot be made (most users, most containers) there are none, and the looks are all there is; groups of
processes that were killed are removed by the next one.
Does not: change a group that is not its own.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import time
from collections.abc import Sequence
from pathlib import Path

from envs.swe.bounds import Limits

ENTER = 'for group do shift; [ "$group" = -- ] && break; echo 0 > "$group/cgroup.procs" || exit 125; done; exec "$@"'

_ROOT = Path("/sys/fs/cgroup")
_NAME = "crl-swe"
_EXTRA = 8  # processes of the sandbox itself
_numbers = itertools.count()


class Group:
    """The control group of one command, for a ``with`` block; none where none can be made."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._folders: list[Path] = []

    def __enter__(self) -> Group:
        memory = (self._limits.memory_mib * 3 // 2 + 64) << 20
        bounds = {"pids.max": 2 * self._limits.processes + _EXTRA, "memory.max": memory, "memory.swap.max": 0}
        for parent in _parents():
            folder = parent / f"{_NAME}-{os.getpid()}-{next(_numbers)}"
            with contextlib.suppress(OSError):  # it may not be made, or no longer: go on without
                folder.mkdir()
                self._folders.append(folder)
                for name, value in bounds.items():
                    if (folder / name).exists():
                        (folder / name).write_text(str(value), encoding="ascii")
        return self

    def __exit__(self, *error: object) -> None:
        deadline = time.monotonic() + 2.0
        while self._folders and time.monotonic() < deadline:
            self._folders = [folder for folder in self._folders if not _remove(folder)]
            if self._folders:
                time.sleep(0.01)  # its last process is on its way out

    def entering(self, command: Sequence[str]) -> list[str]:
        """``command``, entering the groups first."""
        return ["/bin/sh", "-c", ENTER, "sh", *map(str, self._folders), "--", *command] if self._folders else list(command)


@functools.cache
def _parents() -> tuple[Path, ...]:
    """Where groups can be made without leaving the bounds this process is in: in version 2 beside its own group, in version 1 in it."""
    own = {line.split(":")[1]: line.split(":", 2)[2] for line in _read(Path("/proc/self/cgroup")).splitlines()}
    if (_ROOT / "cgroup.controllers").exists():
        group = _ROOT / own.get("", "/").lstrip("/")
        parent = group if group == _ROOT else group.parent
        return _swept(parent) if "pids" in _read(parent / "cgroup.subtree_control").split() else ()
    return _swept(_ROOT / "pids" / own["pids"].lstrip("/")) if "pids" in own else ()


def _swept(parent: Path) -> tuple[Path, ...]:
    """``parent``, if groups can be made in it, without what processes that are gone have left there."""
    if not os.access(parent, os.W_OK):
        return ()
    for left in parent.glob(f"{_NAME}-*"):
        if not Path("/proc", left.name.split("-")[2]).exists():
            _remove(left)
    return (parent,)


def _read(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text(encoding="ascii")
    return ""


def _remove(folder: Path) -> bool:
    try:
        folder.rmdir()
    except FileNotFoundError:
        return True
    except OSError:  # busy
        return False
    return True
