"""Whether an agent's tree solves an instance.

Owns: taking the agent's patch, and grading a patch in a fresh checkout: the patch, then what steers the test runner and the test files as
they were, then the hidden tests; resolved when every listed test passes.
Promises: all of it in the sandbox. What the agent did wrong (a patch that does not apply, tests that hang, a process that ends early) is
"unresolved"; what is wrong with the sandbox, git or the instance is ``EnvError``, never a reward.
Does not: let the agent see the tests: they enter a copy that it never had, when it has no process left.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import secrets
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from envs.api import EnvError
from envs.swe.bounds import Limits
from envs.swe.instance import Instance
from envs.swe.layout import TOOLBOX, TREE, Bind
from envs.swe.sandbox import Finished, Sandbox

PATCH_MOST = 4_000_000  # bytes
_AGENT = "/agent"
_PATCH = (
    f"export GIT_DIR={TREE}/.git GIT_WORK_TREE={_AGENT}; git -c core.safecrlf=false add -A . >/dev/null 2>&1 || exit 3; "
    "git diff --cached --binary --full-index --no-color --no-ext-diff --no-textconv --no-renames HEAD"
)
_INSIDE = Path(__file__).with_name("inside")
_ARRANGE = _INSIDE.joinpath("arrange.py").read_text(encoding="utf-8")
_JUDGE = _INSIDE.joinpath("judge.py").read_text(encoding="utf-8")


@dataclasses.dataclass(frozen=True)
class Verdict:
    """``failed``: listed tests that did not pass. ``why``: in a few words, when no test was run or they were not run to the end."""

    resolved: bool
    failed: tuple[str, ...]
    why: str = ""


PARTS = 3  # what the grader has run, one after the other, each within its limits: telling the patch, laying it on, the tests


@dataclasses.dataclass(frozen=True)
class Grader:
    """Grades in ``sandbox``. ``narrow``: the sandbox shows pytest alone (see ``layout``). ``limits``: of each of the ``PARTS``."""

    sandbox: Sandbox
    narrow: bool = True
    limits: Limits = dataclasses.field(default_factory=lambda: Limits(wall_s=120.0, cpu_s=120))

    def patch_of(self, tree: Path, repository: Path) -> bytes | None:
        """What changed in ``tree`` since the base commit, as git's binary patch; None when it cannot be told (too large, unreadable).

        Raises ``EnvError``.
        """
        with _Checkout(repository) as fresh:
            binds = [Bind(str(fresh), TREE, writable=True), Bind(str(tree), _AGENT)]
            limits = dataclasses.replace(self.limits, head=PATCH_MOST + 1, tail=0)
            done = self.sandbox.run(["/usr/bin/bash", "-c", _PATCH], limits, binds=binds, cwd=_AGENT)
            return done.output if done.code == 0 and not done.dropped and len(done.output) <= PATCH_MOST else None

    def grade(self, instance: Instance, repository: Path, patch: bytes | None) -> Verdict:
        """Grade ``patch``. Raises ``EnvError``."""
        everything = (*instance.fail_to_pass, *instance.pass_to_pass)
        if patch is None:
            return Verdict(False, everything, "the changes cannot be told as a patch")
        with _Checkout(repository) as fresh:
            binds = [Bind(str(fresh), TREE, writable=True)]
            arranged = self._arrange(instance, patch, binds)
            if arranged["applied"] == "broken":
                raise EnvError(f"swe: the test patch of {instance.instance_id} does not apply: {arranged['why']}")
            if arranged["applied"] == "no":
                return Verdict(False, everything, f"the patch does not apply: {arranged['why']}")
            passed, why = self._run_tests(instance, binds)
        failed = tuple(test for test in everything if test not in passed)
        return Verdict(not failed, failed, why)

    def _arrange(self, instance: Instance, patch: bytes, binds: Sequence[Bind]) -> dict[str, Any]:
        order = {"patch": _base64(patch), "test_patch": _base64(instance.test_patch.encode()), "tests": instance.test_files}
        limits = dataclasses.replace(self.limits, head=65_536, tail=0)
        done = self.sandbox.run(self._python(_ARRANGE), limits, binds=binds, stdin=json.dumps(order).encode())
        if done.stopped:
            return {"applied": "no", "why": f"stopped by the limit of {done.stopped}"}
        try:
            return json.loads(done.output)
        except ValueError:
            raise EnvError(f"swe: preparing {instance.instance_id} for grading failed: {_last(done)}") from None

    def _run_tests(self, instance: Instance, binds: Sequence[Bind]) -> tuple[set[str], str]:
        """The tests that passed, and why there may be more that did not."""
        word = secrets.token_hex(16)  # not for the outcome: nothing that is graded depends on it
        files = sorted({test.partition("::")[0] for test in (*instance.fail_to_pass, *instance.pass_to_pass)})
        order = {"word": word, "root": TREE, "files": files, "narrow": self.narrow, "site": f"{TOOLBOX}/site"}
        limits = dataclasses.replace(self.limits, head=8_000_000, tail=0)
        done = self.sandbox.run(self._python(_JUDGE), limits, binds=binds, stdin=json.dumps(order).encode())
        told = [
            json.loads(line[len(word) :]) for line in done.output.decode(errors="replace").split("\n")[:-1] if line.startswith(f"{word} ")
        ]
        if not told or told[0] != ["ready"]:
            raise EnvError(f"swe: the test runner did not start for {instance.instance_id}: {_last(done)}")
        phases: dict[str, list[tuple[str, bool]]] = {}
        for kind, *what in told:
            if kind == "test":
                phases.setdefault(what[0], []).append((what[1], what[2]))
        passed = {
            test for test, seen in phases.items() if [when for when, _ in seen] == ["setup", "call", "teardown"] and all(g for _, g in seen)
        }
        if told[-1][0] == "end" and done.code == 0:
            return passed, ""
        return set(), f"the tests were not run to the end ({f'limit of {done.stopped}' if done.stopped else f'exit status {done.code}'})"

    def _python(self, program: str) -> list[str]:
        return [self.sandbox.layout.python, "-I", *(["-S"] if self.narrow else []), "-c", program]


class _Checkout:
    """A copy of a repository for the time of a ``with`` block."""

    def __init__(self, repository: Path) -> None:
        self._repository = repository
        self._home = ""

    def __enter__(self) -> Path:
        self._home = tempfile.mkdtemp(prefix="swe-grade-")
        return Path(shutil.copytree(self._repository, Path(self._home) / "tree", symlinks=True))

    def __exit__(self, *error: object) -> None:
        shutil.rmtree(self._home, ignore_errors=True)


def _base64(content: bytes) -> str:
    return base64.b64encode(content).decode()


def _last(done: Finished) -> str:
    return f"exit status {done.code} {done.stopped}: {done.output.decode(errors='replace').strip()[-300:]}"
