"""Options of an environment, as a person or a configuration gives them.

Owns: ``choose``. Promises: an unknown option is a TypeError that names the known ones; a value of the wrong kind is a ValueError that names
the allowed ones. Does not: know what an option means.
"""

from __future__ import annotations

import typing
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

T = TypeVar("T")


def choose(kind: type[T], options: Mapping[str, Any]) -> T:
    """``kind(**options)`` for a dataclass whose fields are whole numbers above 0 or ``Literal`` words. Raises TypeError, ValueError."""
    kinds = typing.get_type_hints(kind)
    for name, value in options.items():
        if name not in kinds:
            raise TypeError(f"unknown option {name!r}: use one of {', '.join(kinds)}")
        if typing.get_origin(kinds[name]) is Literal:
            allowed = typing.get_args(kinds[name])
            if value not in allowed:
                raise ValueError(f"{name}={value!r}: use one of {', '.join(allowed)}")
        elif not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name}={value!r}: use a whole number, 1 or more")
    return kind(**options)
