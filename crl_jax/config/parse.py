"""From parsed YAML to frozen dataclasses, with errors that name key, place, expected and got.

Owns: ``Tree`` (plain values with the place each came from) and ``build`` (the type rules).
Promises: ``build`` never guesses: a bool is no int, ``8.0`` and ``"8"`` are no int, a string is no list of strings; an int is a float;
NumPy integers and floats count as int and float (they arrive from code, not from YAML). An unknown key is an error that names the nearest
valid one. Does not: read files.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import numbers
import types
import typing
from typing import Any, TypeVar, cast

from crl_jax.errors import UserError

T = TypeVar("T")


class ConfigError(UserError, ValueError):
    """A configuration that cannot be used; the message names the key and the fix."""

    exit_code = 2


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A value and the place it was written, e.g. ``configs/smoke.yaml:12``."""

    value: Any
    place: str


Tree = dict[str, Any]  # str -> Tree | Leaf


def merge(below: Tree, above: Tree) -> Tree:
    """A new tree with the keys of both; where both have a leaf, the one of ``above`` counts."""
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        merged[key] = merge(cast(Tree, old), cast(Tree, value)) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def build(cls: type[T], tree: Tree, path: str = "") -> T:
    """An instance of dataclass ``cls`` from ``tree``; fields that are not in the tree keep their defaults.

    ``path`` is the dotted key of ``cls`` in the whole, for messages. Raises ConfigError.
    """
    hints = typing.get_type_hints(cls)
    values: dict[str, Any] = {}
    for key, node in tree.items():
        dotted = f"{path}.{key}" if path else key
        if key not in hints:
            raise ConfigError(_unknown(key, dotted, path, list(hints), _place_of(node)))
        values[key] = _value(hints[key], node, dotted)
    return cls(**values)


def _value(hint: Any, node: Any, dotted: str) -> Any:
    if dataclasses.is_dataclass(hint):
        return _section(hint, node, dotted)
    if typing.get_origin(hint) is dict:
        return _named(typing.get_args(hint)[1], node, dotted)
    return _field(hint, node, dotted)


def _named(hint: Any, node: Any, dotted: str) -> dict[str, Any]:
    """A section whose keys are names of the user's own, each with a value of type ``hint``."""
    if isinstance(node, Leaf):
        if not node.value:  # nothing below the key, or {}
            return {}
        raise ConfigError(f"{node.place}: `{dotted}` is a section of names, got {_show(node.value)}")
    return {name: _value(hint, value, f"{dotted}.{name}") for name, value in cast(Tree, node).items()}


def _section(cls: Any, node: Any, dotted: str) -> Any:
    if isinstance(node, Leaf):
        if node.value is None:  # "actor:" with nothing below it
            return cls()
        raise ConfigError(f"{node.place}: `{dotted}` is a section of keys, got {_show(node.value)}")
    return build(cls, node, dotted)


def _field(hint: Any, node: Any, dotted: str) -> Any:
    if not isinstance(node, Leaf):
        keys = ", ".join(cast(Tree, node))
        raise ConfigError(f"{_place_of(node)}: `{dotted}` expects {describe(hint)}, got a section with the keys {keys}")
    try:
        return convert(hint, node.value)
    except TypeError:
        raise ConfigError(f"{node.place}: `{dotted}` expects {describe(hint)}, got {_show(node.value)}") from None


def convert(hint: Any, value: Any) -> Any:
    """``value`` as the type ``hint`` says (int, float, bool, str, None, Literal, tuple, union of these). Raises TypeError."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        if any(value == choice and type(value) is type(choice) for choice in args):
            return value
    elif origin in (types.UnionType, typing.Union):
        for choice in args:
            try:
                return convert(choice, value)
            except TypeError:
                continue
    elif origin is tuple:
        if isinstance(value, list | tuple):
            items = list(cast("list[Any]", value))
            if len(args) == 2 and args[1] is Ellipsis:
                return tuple(convert(args[0], item) for item in items)
            if len(items) == len(args):
                return tuple(convert(arg, item) for arg, item in zip(args, items, strict=True))
    else:
        return _scalar(hint, value)
    raise TypeError


def _scalar(hint: Any, value: Any) -> Any:
    if hint is bool and isinstance(value, bool):
        return value
    if hint is str and isinstance(value, str):
        return value
    if hint is type(None) and value is None:
        return None
    if not isinstance(value, bool):
        if hint is int and isinstance(value, numbers.Integral):
            return int(value)
        if hint is float and isinstance(value, numbers.Real) and math.isfinite(float(value)):
            return float(value)
    raise TypeError


def describe(hint: Any) -> str:
    """The type in words: ``one of a, b``, ``a list of strings``, ``an integer``."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return "one of " + ", ".join(str(a) for a in args)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(describe(a) for a in args)
    if origin is tuple and len(args) == 2 and args[1] is Ellipsis:
        return "a list, each item " + describe(args[0])
    if origin is tuple:
        return "a list [" + ", ".join(describe(a) for a in args) + "]"
    names: dict[Any, str] = {bool: "true or false", int: "an integer", float: "a finite number", str: "a string", type(None): "null"}
    return names.get(hint, str(hint))


def _unknown(key: str, dotted: str, path: str, valid: list[str], place: str) -> str:
    near = difflib.get_close_matches(key, valid, n=1, cutoff=0.5)
    hint = f"did you mean `{path + '.' if path else ''}{near[0]}`?" if near else "valid keys here: " + ", ".join(valid)
    return f"{place}: unknown key `{dotted}`; {hint}"


def _place_of(node: Any) -> str:
    while not isinstance(node, Leaf):
        if not node:
            return "?"
        node = next(iter(cast(Tree, node).values()))
    return node.place


def _show(value: Any) -> str:
    name = type(cast(object, value)).__name__
    words = {"str": "string", "dict": "section", "bool": "boolean", "int": "integer", "float": "number"}
    return "null" if value is None else f"{words.get(name, name)} {value!r}"
