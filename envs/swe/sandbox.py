"""Runs commands where they can do no harm, or not at all.

Owns: finding a way to isolate (``bwrap``: bubblewrap; ``userns``: util-linux ``unshare`` and a script of ours), and running one command.
Promises: fails closed: without a way that worked when tried, ``EnvUnavailable`` and no process. A command has its own namespaces of users,
mounts, processes, network, IPC and host name: no network, no process of the host, everything read-only but the folders bound writable and a
small /tmp; no variable of the host, nothing on stdin unless given. When it ends, or a limit ends it, every process it left is gone.
Deadlines are kept by looking at the clock, so they work from any thread. A sandbox that did not start is ``EnvError``, never a failed
command.
Does not: keep anything between two commands but what they wrote into writable folders.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import selectors
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from envs.api import EnvError, EnvUnavailable
from envs.swe.bounds import WATCH_EVERY_S, Limits, children, excess, tree_excess
from envs.swe.cgroup import Group
from envs.swe.layout import TREE, Bind, Layout
from envs.swe.namespaces import bwrap_command, userns_command

Backend = Literal["bwrap", "userns"]

_PROGRAMS: tuple[tuple[Backend, str], ...] = (("bwrap", "bwrap"), ("userns", "unshare"))
_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"  # of the isolating tools themselves
_END_S = 5.0  # from the kill to the end of the last process
_STARTED = b"started\n"
NOTE = 9  # descriptor on which a command may leave a note, see ``Finished.note``
# The last step inside: limits, the descriptor for notes, a sign of life, then the command.
_ENTER = (
    "ulimit -c 0 -n 512 -t {cpu_s} -v {address_kib} -f {file_kib} -u {processes} && {note} printf 'started\\n' >&9 || exit 125; "
    'cd -- {cwd} || exit 126; exec "$@"'
)


@dataclasses.dataclass(frozen=True)
class Finished:
    """How a command ended.

    ``output``: stdout and stderr together, cut in the middle when ``dropped`` bytes did not fit. ``code``: its exit status, None when it
    was stopped; ``stopped``: by what ("time", "processes", "memory", "disk") or "". ``note``: what it wrote to the descriptor ``NOTE``.
    """

    output: bytes
    dropped: int
    code: int | None
    stopped: str
    note: bytes
    seconds: float


def find_backend(wanted: Literal["auto", "bwrap", "userns"] = "auto") -> tuple[Backend, str]:
    """The way to isolate and its program. Tried once per process. Raises ``EnvUnavailable`` with the line that installs one."""
    reasons = []
    for backend, program in _PROGRAMS:
        if wanted in ("auto", backend):
            path = shutil.which(program)
            reason = f"{program} is not on PATH" if path is None else _probe(backend, path)
            if path is not None and not reason:
                return backend, path
            reasons.append(reason)
    raise EnvUnavailable(
        f"swe: no sandbox works here ({'; '.join(reasons)}), and nothing runs without one: apt-get install bubblewrap, on a system that "
        "allows user namespaces"
    )


class Sandbox:
    """Runs commands in ``layout``. Raises ``EnvUnavailable`` when there is no way to isolate them. Keeps no state; safe to share."""

    def __init__(self, layout: Layout, wanted: Literal["auto", "bwrap", "userns"] = "auto") -> None:
        self.layout = layout
        self.backend: Backend
        self.backend, self._program = find_backend(wanted)

    def run(
        self,
        argv: Sequence[str],
        limits: Limits,
        *,
        binds: Sequence[Bind] = (),
        cwd: str = TREE,
        stdin: bytes = b"",
        watch: Path | None = None,
        allowed: tuple[int, int] = (0, 0),
    ) -> Finished:
        """Run ``argv`` to its end. ``watch``: the host's folder whose size is limited (see ``tree_excess``). Raises ``EnvError``."""
        return _run(self.backend, self._program, self.layout, argv, limits, binds, cwd, stdin, watch, allowed)


@functools.cache
def _probe(backend: Backend, program: str) -> str:
    """Why this way does not work, or ""."""
    bare = Layout(_system(), (), _system_links(), (("PATH", "/usr/bin:/bin"),), "")
    try:
        done = _run(backend, program, bare, ["/usr/bin/env", "true"], Limits(wall_s=10.0), (), "/tmp", b"", None, (0, 0))
    except (EnvError, OSError) as failure:
        return f"{backend}: {failure}"
    return "" if done.code == 0 else f"{backend}: trying it ended with {done.code} {done.stopped}"


def _system() -> tuple[Bind, ...]:
    real = [name for name in ("/bin", "/lib", "/lib64") if os.path.isdir(name) and not os.path.islink(name)]
    return tuple(Bind(name, name) for name in ("/usr", *real))


def _system_links() -> tuple[tuple[str, str], ...]:
    return tuple((os.readlink(name), name) for name in ("/bin", "/lib", "/lib64") if os.path.islink(name))


def _run(
    backend: Backend,
    program: str,
    layout: Layout,
    argv: Sequence[str],
    limits: Limits,
    binds: Sequence[Bind],
    cwd: str,
    stdin: bytes,
    watch: Path | None,
    allowed: tuple[int, int],
) -> Finished:
    everything = dataclasses.replace(layout, binds=(*layout.binds, *binds))
    note_out, note_in = os.pipe()
    root = tempfile.mkdtemp(prefix="swe-root-") if backend == "userns" else ""  # where its script hangs the new file system
    inner = ["/usr/bin/bash", "-c", _enter(limits, cwd, note_in), "bash", *argv]
    if backend == "bwrap":
        command = bwrap_command(program, everything, inner, limits.tmp_mib)
    else:
        command = userns_command(program, everything, inner, limits.tmp_mib, root)
    try:
        with Group(limits) as group:
            process = subprocess.Popen(
                group.entering(command),
                stdin=subprocess.PIPE if stdin else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=[note_in],
                start_new_session=True,
                env={"PATH": _PATH},
                cwd="/",
            )
            os.close(note_in)
            note_in = -1
            with process:
                return _Watch(process, note_out, limits, watch, allowed).finish(stdin)
    except OSError as failure:
        raise EnvError(f"swe: the sandbox could not be started: {failure}") from failure
    finally:
        os.close(note_out)
        if note_in >= 0:
            os.close(note_in)
        if root:
            shutil.rmtree(root, ignore_errors=True)  # empty: what was mounted there went with the namespace


def _enter(limits: Limits, cwd: str, fd: int) -> str:
    return _ENTER.format(
        cpu_s=limits.cpu_s,
        address_kib=limits.address_mib * 1024,
        file_kib=limits.file_mib * 1024,
        processes=limits.processes,
        cwd="'" + cwd.replace("'", "'\\''") + "'",
        note="" if fd == NOTE else f"exec {NOTE}>&{fd} {fd}>&- &&",
    )


class _Watch:
    """Reads what a running sandbox says, and ends it when it takes too much."""

    def __init__(self, process: subprocess.Popen[bytes], note: int, limits: Limits, tree: Path | None, allowed: tuple[int, int]) -> None:
        self._process, self._note_fd, self._limits, self._tree, self._allowed = process, note, limits, tree, allowed
        self._output = _Kept(limits.head, limits.tail)
        self._note = _Kept(65_536, 0)
        self._began = time.monotonic()

    def finish(self, stdin: bytes) -> Finished:
        """Wait for the end. Raises ``EnvError``."""
        try:
            stopped = self._serve(stdin)
        except BaseException:
            self._kill()
            raise
        note = self._note.text()
        if not note.startswith(_STARTED):
            said = self._output.text().decode(errors="replace").strip()[-500:]
            raise EnvError(
                f"swe: the sandbox did not start ({stopped or f'exit status {self._process.returncode}'}): {said or 'no message'}"
            )
        code = None if stopped else self._process.returncode
        return Finished(self._output.text(), self._output.dropped, code, stopped, note[len(_STARTED) :], time.monotonic() - self._began)

    def _serve(self, stdin: bytes) -> str:
        killed, stopped, deadline, look_at = False, "", self._began + self._limits.wall_s, self._began + WATCH_EVERY_S
        with selectors.DefaultSelector() as selector:
            self._register(selector, stdin)
            while selector.get_map():
                now = time.monotonic()
                if now >= deadline:
                    if stopped:
                        raise EnvError("swe: a sandbox was killed and does not end")
                    stopped = "time"
                elif now >= look_at and not stopped:
                    stopped = self._look()
                    look_at = time.monotonic() + WATCH_EVERY_S
                if stopped and not killed:
                    self._kill()
                    killed, deadline = True, time.monotonic() + _END_S
                for key, _ in selector.select(max(0.0, min(deadline, look_at) - time.monotonic()) if not stopped else WATCH_EVERY_S):
                    key.data(selector, key.fileobj)
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            raise EnvError("swe: a sandbox closed its output and does not end") from None
        if not stopped and self._tree is not None and tree_excess(self._tree, self._limits, self._allowed):
            return "disk"
        return stopped

    def _kill(self) -> None:
        """End the namespace: with its first process, a child of our child, everything in there dies."""
        for child in children(self._process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        self._process.kill()

    def _look(self) -> str:
        if self._tree is not None and tree_excess(self._tree, self._limits, self._allowed):
            return "disk"
        return excess(self._process.pid, self._limits)

    def _register(self, selector: selectors.BaseSelector, stdin: bytes) -> None:
        assert self._process.stdout is not None
        selector.register(self._process.stdout, selectors.EVENT_READ, functools.partial(self._read, self._output))
        selector.register(self._note_fd, selectors.EVENT_READ, functools.partial(self._read, self._note))
        if self._process.stdin is not None:
            os.set_blocking(self._process.stdin.fileno(), False)
            left = memoryview(stdin)

            def write(selector: selectors.BaseSelector, pipe: int) -> None:
                nonlocal left
                assert self._process.stdin is not None
                try:
                    left = left[os.write(self._process.stdin.fileno(), left) :]
                except BrokenPipeError:
                    left = left[:0]
                if not left:
                    selector.unregister(pipe)
                    self._process.stdin.close()

            selector.register(self._process.stdin, selectors.EVENT_WRITE, write)

    @staticmethod
    def _read(kept: _Kept, selector: selectors.BaseSelector, pipe: int) -> None:
        some = os.read(pipe if isinstance(pipe, int) else pipe.fileno(), 65_536)
        if some:
            kept.add(some)
        else:
            selector.unregister(pipe)


class _Kept:
    """The beginning and the end of a stream."""

    def __init__(self, head: int, tail: int) -> None:
        self._head_size, self._tail_size = head, tail
        self._head, self._tail = bytearray(), bytearray()
        self.dropped = 0

    def add(self, some: bytes) -> None:
        """One more piece."""
        room = self._head_size - len(self._head)
        self._head += some[:room]
        self._tail += some[room:]
        over = len(self._tail) - self._tail_size
        if over > 0:
            del self._tail[:over]
            self.dropped += over

    def text(self) -> bytes:
        """What was kept, with a mark where something is missing."""
        gap = f"\n[... {self.dropped} bytes left out ...]\n".encode() if self.dropped and self._tail_size else b""
        return bytes(self._head) + gap + bytes(self._tail)
