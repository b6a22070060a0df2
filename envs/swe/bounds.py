"""How much a command in the sandbox may use.

Owns: ``Limits`` and the look at a running command from outside: its processes, their memory, the size of its tree.
Promises: needs no signal handler, no cgroup and no right over the command, so it works from any thread and as any user; a tree is only
looked at through directory descriptors, so links in it lead nowhere.
Does not: kill anything.

Limits of single processes (address space, processor time, file size) are the kernel's, set inside. What the kernel does not sum without a
cgroup, and the number of processes, which it does not limit for a user that is root outside, are watched every ``WATCH_EVERY_S``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from pathlib import Path

WATCH_EVERY_S = 0.1
_PAGE = os.sysconf("SC_PAGE_SIZE")
_MIB = 1 << 20


@dataclasses.dataclass(frozen=True)
class Limits:
    """Bounds of one command. ``head`` and ``tail``: bytes kept from the beginning and the end of what it prints."""

    wall_s: float = 30.0
    cpu_s: int = 60  # of each process
    address_mib: int = 2048  # of each process
    memory_mib: int = 1536  # resident, of all processes together
    file_mib: int = 64  # largest file it may write
    tmp_mib: int = 64  # of /tmp and /dev/shm, each
    processes: int = 128
    tree_mib: int = 256
    tree_files: int = 20_000
    head: int = 6_000
    tail: int = 6_000


def excess(pid: int, limits: Limits) -> str:
    """What the descendants of process ``pid`` use too much of: "processes", "memory", or "" when all is well."""
    running = _descendants(pid, 4 * limits.processes)
    if len(running) > limits.processes + 2:  # the sandbox's own two
        return "processes"
    return "memory" if sum(map(_resident, running)) > limits.memory_mib * _MIB else ""


def tree_excess(tree: Path, limits: Limits, allowed: tuple[int, int] = (0, 0)) -> bool:
    """True when ``tree`` is larger than the limits and than ``allowed`` (bytes, files: what it had before)."""
    most_bytes, most_files = max(limits.tree_mib * _MIB, allowed[0]), max(limits.tree_files, allowed[1])
    size, files = tree_size(tree, most_files + 1)
    return size > most_bytes or files > most_files


def tree_size(tree: Path, stop_at: int) -> tuple[int, int]:
    """Bytes and number of files and folders in ``tree``, counted up to ``stop_at`` of them. A tree too deep to walk counts as full."""
    size = files = 0
    try:
        for _, folders, plain, fd in os.fwalk(tree, follow_symlinks=False):
            files += len(folders) + len(plain)
            for name in plain:
                with contextlib.suppress(OSError):  # it is gone
                    size += os.stat(name, dir_fd=fd, follow_symlinks=False).st_blocks * 512
            if files >= stop_at:
                break
    except RecursionError:
        return size, stop_at
    except OSError:  # a folder vanished or was closed to us in the middle
        return size, files
    return size, files


def _descendants(pid: int, most: int) -> list[int]:
    found, queue = [], [pid]
    while queue and len(found) < most:
        for child in children(queue.pop()):
            found.append(child)
            queue.append(child)
    return found


def children(pid: int) -> list[int]:
    """Its child processes."""
    found: list[int] = []
    with contextlib.suppress(OSError):  # it ended
        for task in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{task}/children", encoding="ascii") as listed:
                found += map(int, listed.read().split())
    return found


def _resident(pid: int) -> int:
    with contextlib.suppress(OSError, IndexError), open(f"/proc/{pid}/statm", encoding="ascii") as table:
        return int(table.read().split()[1]) * _PAGE
    return 0
