"""Scripted players of repair tasks.

Owns: three policies:
    random  looks around and tries harmless commands, and submits at some point
    expert  looks behind: makes the accepted repair with the editor, runs the visible tests, submits
    follow  does what a lesson says (a file, the lines to replace, and those to put there: see ``lesson``), submits
Promises: deterministic given the seed.
Does not: read the issue.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping
from typing import Any

from envs.api import EnvTask
from envs.players import Player
from envs.swe import repositories
from envs.swe.calls import write_call

KINDS = ("random", "expert", "follow")

_LOOKS = (
    "ls",
    "git log --oneline",
    "git status --short",
    "python -m pytest -q 2>&1 | tail -n 5",
    "cat README.md",
    "find . -name '*.py' | sort | head -n 20",
    "wc -l tests/*.py",
)
_LESSON = re.compile(r"in (\S+), replace\n<<<\n(.*)\n===\n(.*)\n>>>", re.DOTALL)


def make_player(kind: str, task: EnvTask, *, seed: int, options: Mapping[str, Any], lesson: str = "") -> Player:
    """A player for one episode. Raises ValueError for an unknown kind and for a lesson that says nothing to do."""
    if kind == "random":
        return _random(random.Random(f"swe/{task.id}/{seed}"))
    if kind == "expert":
        return _say(_repairs(_lesson_of(task, right=True), check=True))
    if kind == "follow":
        return _say(_repairs(lesson, check=False))
    raise ValueError(f"no player {kind!r}: use one of {', '.join(KINDS)}")


def lesson(task: EnvTask, seed: int, *, right: bool = True) -> str:
    """The place of the bug and what to write there; not ``right``: a change that repairs nothing."""
    return _lesson_of(task, right=right)


def _random(draw: random.Random) -> Player:
    def say(text: str, actions: tuple[str, ...]) -> str:
        if draw.random() < 0.1:
            return write_call("submit", {})
        if draw.random() < 0.2:
            return write_call("str_replace_editor", {"command": "view", "path": "/testbed"})
        return write_call("execute_bash", {"command": draw.choice(_LOOKS)})

    return say


def _say(replies: Iterator[str]) -> Player:
    return lambda text, actions: next(replies, write_call("submit", {}))


def _repairs(lesson: str, *, check: bool) -> Iterator[str]:
    """The replies that carry a lesson out. Raises ValueError at once when it says nothing."""
    said = _LESSON.fullmatch(lesson)
    if said is None:
        raise ValueError(f"lesson {lesson[:80]!r} names no file and no lines: use lesson()")
    path, old, new = said.groups()
    edit = write_call("str_replace_editor", {"command": "str_replace", "path": path, "old_str": old, "new_str": new})
    test = write_call("execute_bash", {"command": "python -m pytest -q"})
    return iter([edit, test] if check else [edit])


def _lesson_of(task: EnvTask, *, right: bool) -> str:
    path, old, new = _change(task.id)
    if not right:
        new = "\n".join(f"{line}  # looked at" if at == 0 else line for at, line in enumerate(old.split("\n")))
    return f"in {path}, replace\n<<<\n{old}\n===\n{new}\n>>>"


def _change(instance_id: str) -> tuple[str, str, str]:
    """File, lines to replace and lines to put there: the accepted repair, with as many lines around it as make the place unique.

    Raises KeyError for instances that are not the package's own.
    """
    name, wrong, right = repositories.repair(instance_id)
    before, after = wrong.split("\n"), right.split("\n")
    first = next(n for n, (one, other) in enumerate(zip(before, after, strict=False)) if one != other)
    end = next(n for n, (one, other) in enumerate(zip(before[::-1], after[::-1], strict=False)) if one != other)
    end = min(end, len(before) - first, len(after) - first)
    for around in range(len(before)):
        start, stop = max(0, first - around), max(0, end - around)
        old = "\n".join(before[start : len(before) - stop])
        if old and wrong.count(old) == 1:
            return name, old, "\n".join(after[start : len(after) - stop])
    raise ValueError(f"{instance_id}: no unique place to change")
