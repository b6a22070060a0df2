"""The words around the games.

Owns: system prompts and the notice for an invalid action. A family's rules are in ``envs/<family>/prompts.yaml``, by style (``full``,
``compact``); under ``notice`` it may have its own notices. What all families share is in ``prompts.yaml`` here.
Does not: render observations.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import yaml

from envs.parse import Grammar


def system_prompt(family: str, style: str, grammar: Grammar, actions: tuple[str, ...], max_turns: int, *, example: str = "") -> str:
    """What the model is told before the first observation: the game's rules in this style, then how to answer.

    With ``actions`` the answer is one of them. Without, the rules tell what may be said and ``example`` is one such action.
    """
    rules = _family(family)[style].replace("{max_turns}", str(max_turns))
    how = _shared()["grammar" if actions else "grammar_free"][grammar]
    return f"{rules}\n{how.replace('{actions}', ', '.join(actions)).replace('{example}', example or next(iter(actions), ''))}"


def with_notice(family: str, style: str, observation: str) -> str:
    """``observation`` again, with the notice that the reply was no action."""
    notice = _family(family).get("notice", {}).get(style) or _shared()["notice"][style]
    return f"{observation} {notice}" if style == "compact" else f"{notice}\n\n{observation}"


@functools.cache
def _shared() -> dict[str, Any]:
    return yaml.safe_load(Path(__file__).with_name("prompts.yaml").read_text(encoding="utf-8"))


@functools.cache
def _family(family: str) -> dict[str, Any]:
    return yaml.safe_load(Path(__file__).parent.joinpath(family, "prompts.yaml").read_text(encoding="utf-8"))
