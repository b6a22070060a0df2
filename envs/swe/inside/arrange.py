"""Puts a fresh checkout into the state that is graded, as a program that runs inside the sandbox.

Owns: the order: the agent's patch, then the files that steer the test runner as they were at the base commit, then the test files as they
were, then the test patch.
Promises: nothing the agent wrote into those files, or put in their place or above them (a link, a file where a folder was), is left.
Does not: run tests. Reads one JSON object on stdin ({patch, test_patch, tests}; patches in base64), writes one on stdout:
{applied, why} where ``applied`` is "all", "no" (the agent's patch does not apply) or "broken" (the test patch does not).
"""

import base64
import json
import os
import shutil
import subprocess
import sys

STEERING = {
    "conftest.py",
    "pytest.ini",
    ".pytest.ini",
    "pytest.toml",
    ".pytest.toml",
    "tox.ini",
    "setup.cfg",
    "pyproject.toml",
    "sitecustomize.py",
    "usercustomize.py",
}


def git(*words, content=b""):
    """Run git; its exit status and what it said."""
    done = subprocess.run(["git", *words], input=content, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    return done.returncode, done.stdout


def arrange(order):
    """The answer to one order."""
    base = set(git("ls-tree", "-r", "-z", "--name-only", "HEAD")[1].decode(errors="surrogateescape").split("\0"))
    patch = base64.b64decode(order["patch"])
    if patch.strip():
        status, said = git("apply", "--binary", "--whitespace=nowarn", "-", content=patch)
        if status:
            return {"applied": "no", "why": said.decode(errors="replace")[-300:]}
    for path in sorted(changed()):
        if os.path.basename(path) in STEERING or path.endswith(".pth"):
            restore(path, base)
    for path in order["tests"]:
        restore(path, base)
    test_patch = base64.b64decode(order["test_patch"])
    if test_patch.strip():
        status, said = git("apply", "--binary", "--whitespace=nowarn", "-", content=test_patch)
        if status:
            return {"applied": "broken", "why": said.decode(errors="replace")[-300:]}
    return {"applied": "all", "why": ""}


def changed():
    """Paths that differ from the base commit, new ones included."""
    tracked = git("diff", "--name-only", "-z", "--no-renames", "HEAD")[1]
    new = git("ls-files", "-z", "--others")[1]
    return {path for path in (tracked + new).decode(errors="surrogateescape").split("\0") if path}


def restore(path, base):
    """``path`` as it was at the base commit, whatever stands there or above it now."""
    parts = path.split("/")
    for n in range(1, len(parts)):
        above = "/".join(parts[:n])
        if os.path.islink(above) or (os.path.lexists(above) and not os.path.isdir(above)):
            os.unlink(above)
            git("checkout", "-q", "HEAD", "--", above)
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    elif os.path.lexists(path):
        os.unlink(path)
    if path in base:
        git("checkout", "-q", "HEAD", "--", path)


if __name__ == "__main__":
    json.dump(arrange(json.load(sys.stdin)), sys.stdout)
