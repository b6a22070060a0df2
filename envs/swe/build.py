"""``python -m envs.swe.build [--verify] [ID ...]``: make all repositories at once, and check that each instance is one.

Owns: the command, and what it means that an instance is sound: without a patch the FAIL_TO_PASS tests fail and the PASS_TO_PASS tests pass;
with the repair all pass.
Promises: one line per instance; the exit status is 1 when one is unsound, 0 otherwise; those refused because of another pip are counted.
Does not: need a model.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from envs.swe import repositories
from envs.swe.grading import Grader
from envs.swe.layout import narrow
from envs.swe.sandbox import Sandbox


def unsound(instance_id: str, grader: Grader) -> str:
    """Why an instance is none, or "". Raises ``EnvError``, ``EnvUnavailable``."""
    instance = repositories.instance(instance_id)
    repository = repositories.repository(instance_id, grader.sandbox)
    before = grader.grade(instance, repository, b"")
    if set(before.failed) != set(instance.fail_to_pass):
        return f"without a patch these failed: {before.failed} {before.why}; they should be {instance.fail_to_pass}"
    after = grader.grade(instance, repository, instance.patch.encode())
    return "" if after.resolved else f"with the repair these failed: {after.failed} {after.why}"


def main(arguments: Sequence[str]) -> int:
    """Make, and with ``--verify`` check, the named instances or all."""
    names = [argument for argument in arguments if argument != "--verify"]
    grader = Grader(Sandbox(narrow()))
    refused, bad = repositories.refused(), 0
    for name in names or repositories.recipes():
        if name in refused:
            print(f"{name}: refused: {refused[name]}")
            continue
        repositories.repository(name, grader.sandbox)
        problem = unsound(name, grader) if "--verify" in arguments else ""
        bad += bool(problem)
        print(f"{name}: {problem or ('sound' if '--verify' in arguments else 'made')}", flush=True)
    print(f"{len(names or repositories.recipes()) - len(refused)} instances, {bad} unsound, {len(refused)} refused")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
