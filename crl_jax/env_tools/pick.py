"""What a person asks for in ``crl envs``: families, environments, tasks and options, from words to values.

Owns: the look-ups and the error for what does not exist. Promises: the error names what there is. Does not: make an environment.
"""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterator, Sequence
from typing import Any

import yaml

from crl_jax.errors import UserError
from envs import registry
from envs.api import EnvTask, EnvUnavailable


class WrongWords(UserError):
    """A name, task or option that does not exist."""

    exit_code = 2


def options_of(pairs: Sequence[str]) -> dict[str, Any]:
    """``["max_turns=20"]`` as ``{"max_turns": 20}``. Raises WrongWords."""
    parsed: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise WrongWords(f"option {pair!r}: write key=value, e.g. max_turns=20")
        try:
            parsed[key] = yaml.safe_load(value)
        except yaml.YAMLError:
            parsed[key] = value  # the environment says what it wants instead
    return parsed


def family_of(word: str) -> str:
    """A family's name, checked. Raises WrongWords."""
    if word not in registry.families():
        raise WrongWords(f"no environment family {word!r}: use one of {', '.join(registry.families())}")
    return word


def names_of(word: str) -> tuple[str, ...]:
    """The environments that a name or a family stands for. Raises WrongWords."""
    if "/" not in word:
        return tuple(f"{word}/{name}" for name in registry.module_of(family_of(word)).names())
    with explained():
        return (registry.spec(word).name,)


def tasks_of(name: str) -> tuple[EnvTask, ...]:
    """All tasks of an environment, training ones first. Raises ``EnvUnavailable`` when they lie in data that is missing."""
    return registry.tasks(name, "train") + registry.tasks(name, "heldout")


def task_of(name: str, wanted: str | None, seed: int) -> EnvTask:
    """The task with the id ``wanted``, or the one that ``seed`` chooses. Raises WrongWords."""
    with explained():
        tasks = tasks_of(name)
        known = {task.id: task for task in tasks}
        if wanted is None:
            return tasks[seed % len(tasks)] if tasks else EnvTask(name, "", registry.spec(name).goal)
    if wanted not in known:
        near = difflib.get_close_matches(wanted, known, n=3, cutoff=0.3) or [id for id in known if id][:3]
        if not near:
            raise WrongWords(f"{name} has no tasks with ids: leave --task out")
        raise WrongWords(f"{name} has no task {wanted!r}; of its {len(known)} tasks the nearest: {', '.join(near)}")
    return known[wanted]


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Turns what wrong names and options raise into WrongWords."""
    try:
        yield
    except EnvUnavailable:
        raise
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise WrongWords(str(error.args[0] if error.args else error)) from error
