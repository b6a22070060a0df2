"""Rules about many episodes: none fails, and nothing is left.

Owns: the rules "episode", "leak" and "orphan". Counted are open files, threads, processes, temporary files and memory, always while no
instance is open, after the first quarter of the episodes and at the end.
"""

from __future__ import annotations

import dataclasses
import gc
import os
import tempfile
from pathlib import Path

from envs.conformance.exam import Exam
from envs.conformance.rules import Episode
from envs.guard import descendants

_MIB = 2**20
_ROOM_MIB = 16.0  # memory may grow by this and by the next number times the episodes: fragments, caches that fill
_ROOM_MIB_PER_EPISODE = 1 / 64


@dataclasses.dataclass(frozen=True, slots=True)
class _Held:
    """What this process holds."""

    files: int
    threads: int
    temporary: int
    memory_mib: float


def check_episodes(exam: Exam, episodes: int) -> None:
    """Play ``episodes`` random ones to their end, on an instance that is closed and made anew now and then."""
    renew = max(3, min(episodes // 4, 25))
    warm, held, env = min(max(renew, episodes // 4), 50), None, None
    tasks = exam.some_tasks(64)
    for number in range(episodes):
        env = exam.make() if env is None else env
        seed, task = 1000 + number, tasks[number % len(tasks)]
        with exam.no_raise("episode", f"seed {seed} task {task!r}"):
            Episode(exam, env, seed, task, exam.spec.max_turns).play(exam.player(seed, task), exam.spec.max_turns)
        exam.alive(number + 1)
        if (number + 1) % renew == 0 or number == episodes - 1:
            with exam.no_raise("episode", "close"):
                env.close()
            env = None
            if held is None and number + 1 >= warm:
                held = _hold()
    if held is not None:
        _compare(exam, held, _hold(), episodes - warm)
    if left := descendants(os.getpid()):
        names = sorted({_name_of(pid) for pid in left})
        exam.found("orphan", f"{len(left)} processes are left after every instance was closed: {', '.join(names[:5])}")


def _compare(exam: Exam, before: _Held, after: _Held, episodes: int) -> None:
    for what in ("files", "threads", "temporary"):
        grown = getattr(after, what) - getattr(before, what)
        if grown > 1:
            words = {"files": "open files", "threads": "threads", "temporary": "temporary files"}[what]
            exam.found("leak", f"{grown} more {words} after {episodes} more episodes")
    grown_mib = after.memory_mib - before.memory_mib
    if grown_mib > _ROOM_MIB + episodes * _ROOM_MIB_PER_EPISODE:
        exam.found("leak", f"{grown_mib:.0f} MiB more memory after {episodes} more episodes")


def _hold() -> _Held:
    gc.collect()
    status = Path("/proc/self/status")
    if not status.exists():
        return _Held(0, 0, 0, 0.0)
    rows = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
    temporary = sum(len(files) + len(folders) for _, folders, files in os.walk(tempfile.gettempdir()))
    memory = int(rows["VmRSS"].split()[0]) / 1024
    return _Held(len(os.listdir("/proc/self/fd")), int(rows["Threads"]), temporary, memory)


def _name_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return str(pid)
