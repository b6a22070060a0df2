"""A process that sees to it that nothing another one started outlives it.

Owns: ``under_guard``, which splits the calling process in two: the *guard*, which only waits, and the *ward*, which goes on. Promises (on
Linux): when the ward ends, the guard is told to end (SIGTERM), or the process that started the guard dies in any way, every descendant of
the ward is killed, those in sessions of their own too, then the folder is removed. Does not: survive a SIGKILL of its own; the ward dies
with it then, the ward's children may not.

Elsewhere only the ward's process group is killed, and the death of the starting process is not noticed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import sys
import time
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_KILL_S = 10.0  # a process that does not die within this time cannot be killed (it waits for a device)
_WAKE = (signal.SIGTERM, signal.SIGCHLD)


def under_guard(parent: int, folder: str = "", close_fd: int | None = None) -> None:
    """Fork; return in the child, the ward. The caller's process becomes its guard and ends with the ward's exit code (128 + the number of
    the signal that killed it).

    ``parent`` is the id of the process that started this one. ``close_fd`` is the ward's alone: its other side must see it close when the
    ward dies. Call it before there is a second thread.
    """
    _call_prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    _call_prctl(_PR_SET_CHILD_SUBREAPER, 1)  # orphans among the descendants become children of the guard, however they were started
    if os.getppid() != parent:  # it died before the lines above
        os._exit(0)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)  # a signal whose default is to be ignored may not wait while it is blocked
    signal.pthread_sigmask(signal.SIG_BLOCK, _WAKE)
    guard = os.getpid()
    ward = os.fork()
    if ward == 0:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _WAKE)
        os.setpgid(0, 0)
        _call_prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != guard:
            os._exit(0)
        return
    if close_fd is not None:
        os.close(close_fd)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides when to stop
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    _wait(ward, folder)


def descendants(pid: int) -> list[int]:
    """Ids of the living descendants of a process, nearest first (Linux; empty elsewhere)."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            state, parent = stat.read_text(errors="replace").rpartition(")")[2].split()[:2]
            if state not in "ZX":
                children.setdefault(int(parent), []).append(int(stat.parent.name))
    found = [pid]
    for one in found:
        found += children.get(one, [])
    return found[1:]


def _wait(ward: int, folder: str) -> None:
    """The guard's life."""
    code: int | None = None
    while code is None and signal.sigwait(_WAKE) == signal.SIGCHLD:
        code = _reap(ward)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(ward, signal.SIGKILL)
    end = time.monotonic() + _KILL_S
    while time.monotonic() < end:
        for pid in descendants(os.getpid()):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        reaped = _reap(ward)
        code = reaped if code is None else code
        if not descendants(os.getpid()):
            break
        time.sleep(0.002)
    if folder:
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(0 if code is None else code)


def _reap(ward: int) -> int | None:
    """Collect every dead child; the exit code of ``ward`` if it was among them."""
    code = None
    with contextlib.suppress(ChildProcessError):
        while (dead := os.waitpid(-1, os.WNOHANG))[0]:
            if dead[0] == ward:
                ended = os.waitstatus_to_exitcode(dead[1])
                code = ended if ended >= 0 else 128 - ended
    return code


def _call_prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value)
