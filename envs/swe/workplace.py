"""Where an episode's tools run and its result is graded.

Owns: the two protocols, and the place on this machine (the sandbox).
Does not: know turns or rewards. The place in Docker is in ``docker``.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from envs.swe.bounds import Limits, tree_size
from envs.swe.calls import Call
from envs.swe.catalogue import Catalogue
from envs.swe.grading import Grader, Verdict
from envs.swe.instance import Instance
from envs.swe.layout import TREE, Bind
from envs.swe.sandbox import Finished, Sandbox
from envs.swe.tools import Tools


class Workbench(Protocol):
    """Tools on the working copy of one episode. ``seconds``: spent in tools so far."""

    seconds: float

    def use(self, call: Call) -> tuple[str, bool]:
        """The tool's answer, and whether it may have changed something. Raises ``EnvError``."""
        ...

    def grade(self) -> Verdict:
        """Grade what the copy is now. Raises ``EnvError``."""
        ...

    def close(self) -> None:
        """Remove the copy. May be called twice."""
        ...


class Workplace(Protocol):
    """Makes workbenches."""

    def open(self, instance: Instance) -> Workbench:
        """A fresh one. Raises ``EnvError``, ``EnvUnavailable``."""
        ...


class Here:
    """In the sandbox on this machine."""

    def __init__(self, catalogue: Catalogue, sandbox: Sandbox, limits: Limits, grading: Limits) -> None:
        self._catalogue, self._sandbox, self._limits = catalogue, sandbox, limits
        self._grader = Grader(sandbox, catalogue.narrow, grading)

    def open(self, instance: Instance) -> Workbench:
        """As ``Workplace``."""
        repository = self._catalogue.repository(instance.instance_id, self._sandbox)
        return _HereBench(_Copy(self._sandbox, repository), repository, self._limits, self._grader, instance)


class _Copy:
    """A ``Runner`` on a fresh copy of a repository."""

    def __init__(self, sandbox: Sandbox, repository: Path) -> None:
        self._sandbox, self.python = sandbox, sandbox.layout.python
        self._home = Path(tempfile.mkdtemp(prefix="swe-"))
        self.tree = Path(shutil.copytree(repository, self._home / "tree", symlinks=True))
        self._allowed = (0, 0)

    def run(self, argv: Sequence[str], limits: Limits, *, stdin: bytes = b"") -> Finished:
        """As ``Runner``; the copy is kept small."""
        self.tree.chmod(0o755)  # a command may have closed it to the next
        binds = [Bind(str(self.tree), TREE, writable=True)]
        done = self._sandbox.run(argv, limits, binds=binds, stdin=stdin, watch=self.tree, allowed=self._allowed)
        if done.stopped == "disk":  # what is there may stay, so that the next command can tidy up
            self._allowed = tree_size(self.tree, 10 * limits.tree_files)
        return done

    def remove(self) -> None:
        """Remove the copy, whatever has been made of it."""
        try:
            shutil.rmtree(self._home)
        except FileNotFoundError:
            return
        except (OSError, RecursionError):  # folders without rights, or nested deeper than Python walks: the shell's tools do better
            argv = ["/usr/bin/bash", "-c", f"chmod -R u+rwx {TREE}; find {TREE} -mindepth 1 -delete"]
            self.tree.chmod(0o755)
            self._sandbox.run(argv, Limits(wall_s=60.0), binds=[Bind(str(self.tree), TREE, writable=True)])
            shutil.rmtree(self._home, ignore_errors=True)


class _HereBench(Tools):
    def __init__(self, copy: _Copy, repository: Path, limits: Limits, grader: Grader, instance: Instance) -> None:
        super().__init__(copy, limits)
        self._copy, self._repository, self._grader, self._instance = copy, repository, grader, instance

    def grade(self) -> Verdict:
        """As ``Workbench``."""
        patch = self._grader.patch_of(self._copy.tree, self._repository)
        return self._grader.grade(self._instance, self._repository, patch)

    def close(self) -> None:
        """As ``Workbench``."""
        self._copy.remove()
