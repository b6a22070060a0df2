"""A process with the CPU time of its whole session, read again at every row it writes.

Owns: ``run_timed``. Promises: ends with the process, whose session is killed when this one is interrupted. Does not: read the rows.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence

LOOK_EVERY_S = 0.1
TICKS = os.sysconf("SC_CLK_TCK")


@dataclasses.dataclass(frozen=True)
class Timed:
    """``cpu_s[n]`` is what the session had used when the file had ``n + 1`` lines (seconds, of live processes and reaped ones)."""

    code: int
    wall_s: float
    cpu_s: list[float]


def run_timed(command: Sequence[str], env: Mapping[str, str], *, log: pathlib.Path, rows: pathlib.Path) -> Timed:
    """Run ``command`` in a session of its own, with ``env`` besides this process's, until it ends; ``rows`` is the file it appends to."""
    started, cpu_s = time.monotonic(), list[float]()
    with log.open("w") as sink:
        process = subprocess.Popen(command, stdout=sink, stderr=sink, env={**os.environ, **env}, start_new_session=True)
        try:
            while process.poll() is None:
                time.sleep(LOOK_EVERY_S)
                lines = rows.read_bytes().count(b"\n") if rows.exists() else 0
                if lines > len(cpu_s):
                    cpu_s += [session_cpu_s(process.pid)] * (lines - len(cpu_s))
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    return Timed(process.returncode, time.monotonic() - started, cpu_s)


def session_cpu_s(session: int) -> float:
    """User and system seconds of a session's live processes and of their children that have ended; 0 where the system does not tell."""
    ticks = 0
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it ended meanwhile
            continue
        if int(fields[3]) == session:
            ticks += sum(map(int, fields[11:15]))
    return ticks / TICKS
