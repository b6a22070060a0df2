"""Names of environments, and how to make them.

Owns: the table of families. A family is a module with ``names()``, ``spec(name, **options)``, ``make(name, **options)`` and ``prepare()``;
it is imported on first use and imports its game only in the last two, so listing and describing environments needs no game installed.
Promises: an unknown name or option is an error that names the nearest known ones; a missing package is ``EnvUnavailable``.
Does not: keep instances (see the worker process).
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
from types import ModuleType
from typing import Any

from envs.api import EnvSpec, EnvUnavailable, TextEnv

_FAMILIES = {"minihack": "envs.minihack.tasks", "dungeon": "envs.dungeon.dungeons"}


def names() -> tuple[str, ...]:
    """All environment names, family by family."""
    return tuple(f"{family}/{name}" for family in _FAMILIES for name in _family(family).names())


def spec(name: str, **options: Any) -> EnvSpec:
    """Describe an environment without making it; ``options`` as for ``make``. Raises KeyError (unknown name), TypeError (bad option)."""
    module, short = _resolve(name)
    return module.spec(short, **options)


def make(name: str, **options: Any) -> TextEnv:
    """A fresh environment. Raises KeyError, TypeError as ``spec`` does, and ``EnvUnavailable`` when its game is not installed."""
    module, short = _resolve(name)
    return module.make(short, **options)


def prepare() -> None:
    """Import the games that are installed. They are slow to load; a missing one is told by ``make``, to whoever wants it."""
    for family in _FAMILIES:
        with contextlib.suppress(EnvUnavailable):
            _family(family).prepare()


def splits(family: str) -> dict[str, tuple[str, ...]]:
    """Environment names of a family by split: ``train``, and ``heldout`` where it keeps some back. Raises KeyError (unknown family)."""
    if family not in _FAMILIES:
        raise KeyError(f"no environment family {family!r}: use one of {sorted(_FAMILIES)}")
    module = _family(family)
    found: dict[str, tuple[str, ...]] = module.splits() if hasattr(module, "splits") else {"train": module.names()}
    return {split: tuple(f"{family}/{name}" for name in named) for split, named in found.items()}


def _family(family: str) -> ModuleType:
    return importlib.import_module(_FAMILIES[family])


def _resolve(name: str) -> tuple[ModuleType, str]:
    family, _, short = name.partition("/")
    if family in _FAMILIES and short in _family(family).names():
        return _family(family), short
    near = difflib.get_close_matches(name, names(), n=3, cutoff=0.4)
    raise KeyError(f"no environment {name!r}; nearest: {', '.join(near) or 'see envs.registry.names()'}")
