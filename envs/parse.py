"""From a model's reply to an action.

Owns: the two action grammars that all families share.
Promises: reasoning is never executed; a malformed reply is ``None``, never a guess.
Does not: know which actions an environment has beyond the tuple it is given.

``bare``    the whole reply, stripped, is the action (any case).
``tagged``  the *last* well-formed ``<action>..</action>`` outside ``<think>..</think>``. Several actions in one reply: the last one counts.
            A ``</think>`` without its opening tag closes reasoning that the chat template opened; a ``<think>`` never closed makes all that
            follows reasoning.
"""

from __future__ import annotations

import re
from typing import Literal

Grammar = Literal["bare", "tagged"]

_THINK = re.compile(r"<(/?)think>", re.IGNORECASE)
_ACTION = re.compile(r"<action>([^<>]*)</action>", re.IGNORECASE)


def parse_action(reply: str, actions: tuple[str, ...], grammar: Grammar) -> str | None:
    """The canonical action that ``reply`` names, or None. Raises ValueError for an unknown grammar."""
    found = said(reply, grammar)
    return None if found is None else one_of(actions, found)


def said(reply: str, grammar: Grammar) -> str | None:
    """The part of ``reply`` that names the action, stripped; None when there is none. Raises ValueError for an unknown grammar."""
    if grammar == "bare":
        return reply.strip()
    if grammar == "tagged":
        found = _ACTION.findall(without_reasoning(reply))
        return found[-1].strip() if found else None
    raise ValueError(f"unknown action grammar {grammar!r}: use 'bare' or 'tagged'")


def one_of(actions: tuple[str, ...], text: str) -> str | None:
    """The action that ``text`` is in any case, or None."""
    wanted = text.casefold()
    return next((action for action in actions if action.casefold() == wanted), None)


def without_reasoning(reply: str) -> str:
    """What is said outside ``<think>..</think>``, by the rules of the module's docstring. Its time grows with the reply's length only."""
    said, start, inside = [], 0, False
    for tag in _THINK.finditer(reply):
        if tag[1]:
            if not inside:  # the chat template opened it: all before was reasoning
                said.clear()
            start, inside = tag.end(), False
        elif not inside:
            said.append(reply[start : tag.start()])
            inside = True
    return "".join(said) + ("" if inside else reply[start:])
