"""``crl envs ls``: what there is, and what can be made here.

Owns: the two tables. Does not: make an environment; it only asks each family to import its game.
"""

from __future__ import annotations

import sys
from collections import Counter

from envs import registry
from envs.api import EnvUnavailable


def list_envs(prefix: str = "", *, families: bool = False) -> int:
    """Print families and, unless ``families``, the environments whose names start with ``prefix``; 1 if there is none."""
    shown = 0
    for family in registry.families():
        names = [f"{family}/{name}" for name in registry.module_of(family).names()]
        found = [name for name in names if name.startswith(prefix)]
        if not found:
            continue
        shown += len(found)
        tasks = _tasks(family)
        print(f"{family:<12} {_count(len(names), 'environment')}, {_in_words(tasks)}; {_here(family)}", flush=True)
        if families:
            continue
        for name in found:
            train, heldout = ("?" if tasks is None else str(tasks[split][name]) for split in ("train", "heldout"))
            print(f"  {name:<44} {train:>6} {heldout:>5}   {registry.spec(name).goal}")
    if not shown:
        print(f"no environment starts with {prefix!r}; see `crl envs ls`", file=sys.stderr)
    elif not families:
        print("\nThe numbers are training and held-out tasks.")
    return 0 if shown else 1


def _tasks(family: str) -> dict[str, Counter[str]] | None:
    """How many tasks every environment has, by split; None when that lies in data that is missing."""
    try:
        return {split: Counter(task.env for task in registry.tasks(family, split)) for split in ("train", "heldout")}
    except EnvUnavailable:
        return None


def _in_words(tasks: dict[str, Counter[str]] | None) -> str:
    if tasks is None:
        return "tasks unknown"
    return f"{tasks['train'].total()} training and {_count(tasks['heldout'].total(), 'held-out task')}"


def _here(family: str) -> str:
    """Whether the family can be made here."""
    try:
        registry.module_of(family).prepare()
    except EnvUnavailable as missing:
        return f"not here: {missing}"
    return "can be made here"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")
