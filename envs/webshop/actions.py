"""What a reply asks the shop to do.

Owns: the syntax ``search[words]``, ``click[what]`` and ``choose[what]`` (the same as click), in any letter case.
Promises: the last ``<action>..</action>`` outside the reasoning counts, and nothing else is looked at; a reply of any size is read in time
that grows with its length; what is not in the syntax is None, never a guess.
Does not: know what can be clicked.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Literal

from envs import parse

_SAYS = re.compile(r"\s*(search|click|choose)\s*\[(.*)\]\s*", re.IGNORECASE | re.DOTALL)
_TAG = re.compile(r"<(/?)action>", re.IGNORECASE)


@dataclasses.dataclass(frozen=True, slots=True)
class Asked:
    """``what`` is in lower case with single spaces; never empty."""

    verb: Literal["search", "click"]
    what: str


def said(reply: str, grammar: parse.Grammar) -> str | None:
    """As ``envs.parse.said``, but "<" and ">" may stand inside an action: two of the shop's buttons have them ("Next >")."""
    if grammar != "tagged":
        return parse.said(reply, grammar)
    text, opened, last = parse.without_reasoning(reply), -1, None
    for tag in _TAG.finditer(text):
        if not tag[1]:
            opened = tag.end()
        elif opened >= 0:
            opened, last = -1, text[opened : tag.start()].strip()
    return last


def read(text: str) -> Asked | None:
    """What ``text`` asks for, or None."""
    found = _SAYS.fullmatch(text)
    what = " ".join(found[2].lower().split()) if found else ""
    if found is None or not what:
        return None
    return Asked("search" if found[1].lower() == "search" else "click", what)
