"""Reading what a model wrote: JSON and nothing else.

Owns: where the answer stands in a response, the JSON dialect, what counts as the text of a lesson. Promises: everything outside the
dialect raises one of `UNREADABLE`, whose message is the reason that is counted. Does not: know any grammar above JSON.
"""

from __future__ import annotations

import json
import re
from typing import Any


class Rejected(ValueError):
    """The response does not follow the grammar; the message is the reason that is counted."""


UNREADABLE = (Rejected, json.JSONDecodeError, RecursionError)
"""Everything that `strict_json` and the readers on top of it raise."""


def answer_text(response: str) -> str:
    """The last ``<answer>`` block, or, without one, everything after the thinking (nothing, if the thinking was cut off)."""
    spoken = response.rsplit("</think>", 1)[-1].split("<think>", 1)[0]
    blocks = re.findall(r"<answer>(.*?)</answer>", spoken, flags=re.DOTALL)
    return (blocks[-1] if blocks else spoken).strip()


def strict_json(text: str) -> object:
    """One JSON value without NaN, Infinity, duplicate keys, fractions or integers of more than nine digits."""

    def no_constant(name: str) -> Any:
        raise Rejected(f"{name} is not JSON")

    def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len({key for key, _ in pairs}) != len(pairs):
            raise Rejected("duplicate key")
        return dict(pairs)

    def short_int(digits: str) -> int:
        if len(digits) > 9:
            raise Rejected("number out of range")
        return int(digits)

    def no_float(digits: str) -> Any:
        raise Rejected(f"{digits[:20]} is not an integer")

    return json.loads(text, parse_constant=no_constant, object_pairs_hook=no_duplicates, parse_int=short_int, parse_float=no_float)


def lesson_text(value: object, max_chars: int) -> str:
    """``value`` as the text of a lesson, without space around it. Raises Rejected if it is none."""
    if not isinstance(value, str) or not value.strip():
        raise Rejected("experience must be non-empty text")
    if any("\ud800" <= char <= "\udfff" for char in value):
        raise Rejected("experience has half a surrogate pair")
    if len(value) > max_chars:
        raise Rejected(f"experience has {len(value)} characters, allowed are {max_chars}")
    return value.strip()


def reason(error: BaseException) -> str:
    """The reason as it is stored: kind of the error and its message."""
    return f"{type(error).__name__}: {error}"
