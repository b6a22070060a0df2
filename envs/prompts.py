"""The words around the game, read from ``prompts.yaml``.

Owns: system prompts and the notice for an invalid action.
Does not: render observations.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import yaml

from envs.parse import Grammar


@functools.cache
def _texts() -> dict[str, Any]:
    return yaml.safe_load(Path(__file__).with_name("prompts.yaml").read_text(encoding="utf-8"))


def system_prompt(family: str, style: str, grammar: Grammar, actions: tuple[str, ...], max_turns: int) -> str:
    """What the model is told before the first observation: the game's rules in this style, then how to answer."""
    rules = _texts()[family][style].format(max_turns=max_turns)
    answer = _texts()["grammar"][grammar].format(actions=", ".join(actions), example=actions[0])
    return f"{rules}\n{answer}"


def invalid_notice(style: str) -> str:
    """What the model is told when its reply was no action."""
    return _texts()["notice"][style]
