"""Reading the fields of a JSON object that someone else wrote.

Owns: type and range checks whose errors say what to write. Promises: a bool is no number, a number no string, and a single string never
becomes a list of letters; null counts as absent; a field nobody read is an error that names the nearest one. Does not: know what the
fields mean.
"""

from __future__ import annotations

import difflib
import json
import math
import sys
from typing import Any

from crl_jax.serving.http.errors import ApiError

_LARGEST = sys.float_info.max  # JSON has whole numbers that no float holds


def parse_object(raw: bytes) -> dict[str, Any]:
    """The JSON object in ``raw``. Raises ApiError (400) for anything else: NaN, Infinity, repeated keys and half
    characters among it.
    """

    def refuse(constant: str) -> Any:
        raise ValueError(f"{constant} is no JSON number")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            raise ValueError("a key is repeated")
        return found

    try:
        body = json.loads(raw.decode("utf-8"), parse_constant=refuse, object_pairs_hook=unique)
        if b"\\u" in raw:  # an escape can be half a character, which no tokenizer and no answer in UTF-8 takes
            json.dumps(body, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is no valid JSON ({error}): send a JSON object in UTF-8", code="invalid_json") from error
    if not isinstance(body, dict):
        raise ApiError(400, f'the body is a JSON {_kind(body)}: send an object, e.g. {{"prompt": "..."}}', code="invalid_json")
    return body


class Fields:
    """The fields of one object; each method reads one, and ``finish`` complains about the rest."""

    def __init__(self, body: dict[str, Any]) -> None:
        self._left = {name: value for name, value in body.items() if value is not None}
        self._known: list[str] = []

    def raw(self, name: str) -> Any:
        """The value as it is, None when absent."""
        self._known.append(name)
        return self._left.pop(name, None)

    def integer(self, name: str, default: int, low: int, high: int) -> int:
        """A whole number in [low, high]."""
        value = self.raw(name)
        if value is None:
            return default
        if type(value) is not int or not low <= value <= high:
            raise self._wrong(name, f"a whole number from {low} to {high}", value)
        return value

    def optional_integer(self, name: str, low: int, high: int) -> int | None:
        """As ``integer``, None when absent: 0 is not absent."""
        return self.integer(name, low, low, high) if self._left.get(name) is not None else self.raw(name)

    def number(self, name: str, default: float, low: float = -math.inf, high: float = math.inf) -> float:
        """A finite number in [low, high]."""
        value = self.raw(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not (low <= value <= high and -_LARGEST <= value <= _LARGEST):
            span = "a finite number" if low == -math.inf else f"a number from {low:g} to {high:g}"
            raise self._wrong(name, span, value)
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        """true or false."""
        value = self.raw(name)
        if value is not None and not isinstance(value, bool):
            raise self._wrong(name, "true or false", value)
        return default if value is None else value

    def text(self, name: str, default: str = "") -> str:
        """A string."""
        value = self.raw(name)
        if value is not None and not isinstance(value, str):
            raise self._wrong(name, "a string", value)
        return default if value is None else value

    def strings(self, name: str, limit: int) -> tuple[str, ...]:
        """A string or a list of strings, none of them empty, at most ``limit``."""
        value = self.raw(name)
        listed = [] if value is None else [value] if isinstance(value, str) else value
        if not isinstance(listed, list) or len(listed) > limit or not all(isinstance(s, str) and s for s in listed):
            raise self._wrong(name, f"a string or a list of at most {limit} strings, none of them empty", value)
        return tuple(listed)

    def integers(self, name: str, high: int) -> tuple[int, ...]:
        """A list of whole numbers from 0 to ``high``."""
        value = self.raw(name)
        listed = [] if value is None else value
        if not isinstance(listed, list) or not all(type(i) is int and 0 <= i <= high for i in listed):
            raise self._wrong(name, f"a list of whole numbers from 0 to {high}", value)
        return tuple(listed)

    def only(self, name: str, *allowed: Any, because: str) -> None:
        """A field of the protocol that this server has no use for: any value but those ``allowed`` is an error."""
        value = self.raw(name)
        same = any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in allowed)  # true is no 1 here
        if value is not None and not same:
            raise ApiError(400, f"`{name}`: {because}: leave it out", param=name, code="unsupported")

    def finish(self) -> None:
        """Raises ApiError for fields that were not read."""
        for name in self._left:
            near = difflib.get_close_matches(name, self._known, n=1, cutoff=0.6)
            hint = f"did you mean `{near[0]}`?" if near else "known here: " + ", ".join(sorted(self._known))
            raise ApiError(400, f"unknown field `{name}`; {hint}", param=name, code="unknown_field")

    def _wrong(self, name: str, wanted: str, value: Any) -> ApiError:
        shown = json.dumps(value)
        return ApiError(400, f"`{name}` must be {wanted}, got {_kind(value)} {shown[:80]}", param=name, code="invalid_value")


def _kind(value: Any) -> str:
    names = {bool: "boolean", int: "number", float: "number", str: "string", list: "array", dict: "object", type(None): "null"}
    return names[type(value)]
