"""The tools at work on one repository.

Owns: what a tool call becomes, the directory that ``execute_bash`` is in, and what ``undo_edit`` brings back.
Promises: nothing is run or edited but by the runner; an answer is text of bounded length; times that a test runner prints are left out, so
that the same commands give the same text.
Does not: grade.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from envs.api import EnvError
from envs.swe.bounds import Limits
from envs.swe.calls import Call
from envs.swe.layout import TREE
from envs.swe.sandbox import NOTE, Finished

_EDIT = Path(__file__).with_name("inside").joinpath("edit.py").read_text(encoding="utf-8")
_COMMAND_MOST = 100_000  # bytes; the kernel takes 128 KiB as one argument
_UNDO_MOST = 20
# The directory is told at the end, whatever the command did; "exec" and a kill leave it as it was.
_BASH = f'trap \'pwd -P >&{NOTE}\' EXIT; cd -- "$1" 2>/dev/null || cd {TREE}; eval "$2"'
_TIMES = re.compile(r"(\bin )\d+\.\d+(?:s\b| ?seconds\b)( \(\d+:\d\d:\d\d\))?")
_STOPPED = {
    "time": "stopped after {wall_s:g} s, with everything it had started",
    "memory": "stopped: its processes took more than {memory_mib} MiB of memory",
    "processes": "stopped: more than {processes} processes",
    "disk": "stopped: the repository grew over {tree_mib} MiB or {tree_files} files",
}


class Runner(Protocol):
    """Runs commands on one working copy at ``/testbed``. ``python``: an interpreter's name in there."""

    python: str

    def run(self, argv: Sequence[str], limits: Limits, *, stdin: bytes = b"") -> Finished:
        """Run ``argv`` to its end, in bounds. Raises ``EnvError``."""
        ...


class Tools:
    """The tools, by ``runner``. ``limits`` are those of one command. ``seconds``: spent in tools so far."""

    def __init__(self, runner: Runner, limits: Limits) -> None:
        self._runner, self._limits = runner, limits
        self._cwd = TREE
        self._undo: list[tuple[str, str | None]] = []
        self.seconds = 0.0

    def use(self, call: Call) -> tuple[str, bool]:
        """The tool's answer, and whether it changed something (a shell command is taken to). Raises ``EnvError``."""
        if call.name == "execute_bash":
            return self._bash(call.text["command"]), True
        if call.name == "undo_edit":
            return self._undo_edit(call.text["path"])
        done = self._edit(call.name, call.text["path"], call.text, call.numbers)
        if done["changed"]:
            self._undo = [*self._undo, (done["path"], done["before"])][-_UNDO_MOST:]
        return done["text"], done["changed"]

    def _bash(self, command: str) -> str:
        if len(command.encode()) > _COMMAND_MOST:
            return f"Error: the command is longer than {_COMMAND_MOST} bytes; write a file instead"
        done = self._run(["/usr/bin/bash", "-c", _BASH, "bash", self._cwd, command])
        if done.note:
            where = done.note.decode(errors="surrogateescape").rstrip("\n").rpartition("\n")[2]
            self._cwd = where if (where == TREE or where.startswith(f"{TREE}/")) and len(where) < 4096 and "\0" not in where else TREE
        text = _TIMES.sub(r"\1N s", done.output.decode(errors="replace")).replace("\0", "\N{REPLACEMENT CHARACTER}").rstrip("\n")
        if done.stopped:
            end = f"[{_STOPPED[done.stopped].format(**vars(self._limits))}]"
        else:
            end = f"[exit status {done.code}]" if done.code else ""
        return "\n".join(part for part in (text, end) if part) or "[no output]"

    def _edit(self, command: str, path: str, text: Mapping[str, str | None], numbers: tuple[int, ...] = ()) -> dict[str, Any]:
        request = {"root": TREE, "command": command, "path": path, "text": dict(text), "numbers": numbers}
        limits = Limits(wall_s=self._limits.wall_s, head=4_000_000, tail=0)
        argv = [self._runner.python, "-I", "-S", "-c", _EDIT]
        done = self._run(argv, stdin=json.dumps(request).encode(), limits=limits)
        if done.stopped:  # what the agent asked for, or made of its tree, was too much: no failure of the environment
            return {"text": f"Error: {_STOPPED[done.stopped].format(**vars(self._limits))}", "changed": False}
        try:
            answer = json.loads(done.output)
            return {**answer, "text": answer["text"].encode(errors="replace").decode()}  # names of files need not be text
        except ValueError:
            said = done.output.decode(errors="replace")[-300:]
            raise EnvError(f"swe: the editor ended with {done.code} {done.stopped}: {said}") from None

    def _undo_edit(self, path: str) -> tuple[str, bool]:
        full = posixpath.normpath(posixpath.join(TREE, path.strip()))
        if not full.startswith(f"{TREE}/"):
            return f"Error: {path.strip()} is outside {TREE}", False
        for at in range(len(self._undo) - 1, -1, -1):
            if self._undo[at][0] == full:
                done = self._edit("put_back", full, {"before": self._undo.pop(at)[1]})
                return done["text"], done["changed"]
        return f"Error: no edit of {path.strip()} to undo", False

    def _run(self, argv: list[str], *, stdin: bytes = b"", limits: Limits | None = None) -> Finished:
        done = self._runner.run(argv, limits or self._limits, stdin=stdin)
        self.seconds += done.seconds
        return done
