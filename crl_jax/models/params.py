"""Parameters as plain nested dicts, and their dotted names.

Owns: the ``Params`` type, the one naming scheme of parameters (``layers.0.attn.q``) shared by files, partition rules and errors, and the
check that a tree is complete. Promises: ``unflatten(flatten(p)) == p``; nothing is ever filled in for a missing parameter. Does not: read
files or place arrays on devices.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Params = dict[str, Any]
"""Nested dicts with string keys; the leaves are arrays (or anything that stands for one, such as a ShapeDtypeStruct or a sharding)."""


def flatten(params: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted name -> leaf, depth first in the tree's own order."""
    flat: dict[str, Any] = {}
    for key, value in params.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{name}."))
        else:
            flat[name] = value
    return flat


def unflatten(flat: Mapping[str, Any]) -> Params:
    """The nested tree of a dotted-name mapping."""
    tree: Params = {}
    for name, leaf in flat.items():
        node = tree
        *parents, last = name.split(".")
        for part in parents:
            node = node.setdefault(part, {})
        node[last] = leaf
    return tree


def check_complete(found: Mapping[str, Any], expected: Mapping[str, Any], *, source: str) -> None:
    """Check that two flat mappings have the same names and shapes.

    Raises ValueError that names every missing and unexpected parameter and every wrong shape. A missing parameter is never replaced by its
    initial value: a model that runs with a random layer looks healthy and learns nothing.
    """
    missing = sorted(expected.keys() - found.keys())
    extra = sorted(found.keys() - expected.keys())
    wrong = [
        f"{name}: {tuple(found[name].shape)} instead of {tuple(expected[name].shape)}"
        for name in sorted(expected.keys() & found.keys())
        if tuple(found[name].shape) != tuple(expected[name].shape)
    ]
    problems = [
        f"{title}: {', '.join(names)}" for title, names in (("missing", missing), ("unexpected", extra), ("wrong shape", wrong)) if names
    ]
    if problems:
        raise ValueError(f"parameters of {source} do not fit the model ({'; '.join(problems)}): use the ModelConfig they were saved with")
