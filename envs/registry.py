"""Names of environments, their tasks, and how to make them.

Owns: the table of families. A family is a module with ``names()``, ``spec(name, **options)``, ``make(name, **options)`` and ``prepare()``
(names without the family). Where its tasks are more than one per environment, or some are kept back, it has ``tasks(split)`` too. It is
imported on first use and imports its game only in ``make`` and ``prepare``, so listing and describing environments needs no game installed.
Promises: an unknown name or option is an error that names the nearest known ones; a missing package is ``EnvUnavailable``.
Does not: keep instances (see the worker process).
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
from types import ModuleType
from typing import Any

from envs.api import EnvSpec, EnvTask, EnvUnavailable, Split, TextEnv

_FAMILIES = {
    "minihack": "envs.minihack.tasks",
    "dungeon": "envs.dungeon.dungeons",
    "webshop": "envs.webshop.tasks",
    "alfworld": "envs.alfworld.tasks",
    "sokoban": "envs.sokoban.tasks",
    "frozen_lake": "envs.frozen_lake.tasks",
    "gymnax": "envs.gymnax.tasks",
    "swe": "envs.swe.tasks",
}


def families() -> tuple[str, ...]:
    """The names of all families."""
    return tuple(_FAMILIES)


def names() -> tuple[str, ...]:
    """All environment names, family by family."""
    return tuple(f"{family}/{name}" for family in _FAMILIES for name in module_of(family).names())


def spec(name: str, **options: Any) -> EnvSpec:
    """Describe an environment without making it; ``options`` as for ``make``. Raises KeyError (unknown name), TypeError (bad option)."""
    module, short = _resolve(name)
    return module.spec(short, **options)


def make(name: str, **options: Any) -> TextEnv:
    """A fresh environment. Raises KeyError, TypeError as ``spec`` does, and ``EnvUnavailable`` when its game is not installed."""
    module, short = _resolve(name)
    return module.make(short, **options)


def prepare(*wanted: str) -> None:
    """Import the games of the families ``wanted`` (none named: all) that are installed. They are slow to load; a missing one is told by
    ``make``, to whoever wants it.
    """
    for family in wanted or _FAMILIES:
        with contextlib.suppress(EnvUnavailable):
            module_of(family).prepare()


def tasks(what: str, split: Split = "train") -> tuple[EnvTask, ...]:
    """The tasks of a family or of one environment in a split; "heldout" is empty where nothing is kept back.

    Raises KeyError for an unknown family or environment, ``EnvUnavailable`` when the tasks lie in data that is missing.
    """
    family, _, short = what.partition("/")
    if short:
        _resolve(what)
    module = module_of(family)
    if hasattr(module, "tasks"):
        found: tuple[EnvTask, ...] = module.tasks(split)
    else:
        found = tuple(EnvTask(f"{family}/{name}", "", module.spec(name).goal) for name in module.names()) if split == "train" else ()
    return found if not short else tuple(task for task in found if task.env == what)


def module_of(family: str) -> ModuleType:
    """The module of a family. Raises KeyError."""
    if family not in _FAMILIES:
        raise KeyError(f"no environment family {family!r}: use one of {sorted(_FAMILIES)}")
    return importlib.import_module(_FAMILIES[family])


def _resolve(name: str) -> tuple[ModuleType, str]:
    family, _, short = name.partition("/")
    if family in _FAMILIES and short in module_of(family).names():
        return module_of(family), short
    near = difflib.get_close_matches(name, names(), n=3, cutoff=0.4)
    raise KeyError(f"no environment {name!r}; nearest: {', '.join(near) or 'see envs.registry.names()'}")
