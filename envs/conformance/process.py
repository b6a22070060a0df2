"""The process that examines an environment for ``envs.check``.

Owns: the order of the rules. Tells lines of JSON: ``{"at"}``, ``{"rule", "message"}``, ``{"case", "digest"}``, ``{"episodes"}``,
``{"raise", "message"}`` and at the end ``{"done"}``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from typing import Any

from envs.api import EnvUnavailable
from envs.conformance import behaviour, leaks, rules
from envs.conformance.exam import Exam
from envs.guard import under_guard


def main(argv: list[str]) -> None:
    """``argv``: file descriptor to tell on, the parent's process id, the folder for temporary files, the plan, then the import paths."""
    fd, parent, folder, plan, *paths = argv
    under_guard(int(parent), close_fd=int(fd))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.set_inheritable(int(fd), False)
    os.dup2(2, 1)  # games print
    sys.path[:] = paths
    tempfile.tempdir = folder
    lock = threading.Lock()

    def tell(line: dict[str, Any]) -> None:
        with lock:
            os.write(int(fd), json.dumps(line).encode() + b"\n")

    try:
        examine(json.loads(plan), tell)
    except (EnvUnavailable, KeyError, TypeError, ValueError) as error:  # of spec and make: the caller's to hear
        tell({"raise": type(error).__name__, "message": str(error.args[0] if error.args else error)})
    else:
        tell({"done": True})


def examine(plan: dict[str, Any], tell: Callable[[dict[str, Any]], None]) -> None:
    """Apply the rules. Raises what ``spec``, ``tasks`` and the first ``make`` raise."""
    tell({"at": "make"})
    exam = Exam(plan["source"], plan["name"], plan["options"], tell)
    exam.make().close()  # builds what is built once
    quick = plan["phase"] == "digests"
    parts: list[tuple[str, str, Callable[[], None]]] = [
        ("reproduction", "reproduce", lambda: rules.check_reproduction(exam, quick=quick)),
    ]
    if not quick:
        parts = [
            ("its specification", "spec", lambda: rules.check_spec(exam)),
            ("its tasks", "tasks", lambda: rules.check_tasks(exam)),
            *parts,
            ("pickling", "pickle", lambda: rules.check_pickle(exam)),
            ("invalid and hostile replies", "reply", lambda: behaviour.check_replies(exam)),
            ("calls in the wrong order", "lifecycle", lambda: behaviour.check_lifecycle(exam)),
            ("random episodes", "episode", lambda: leaks.check_episodes(exam, plan["episodes"])),
        ]
    for name, rule, part in parts:
        exam.at(name)
        with exam.no_raise(rule, name):
            part()
