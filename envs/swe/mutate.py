"""One operator changed at a named place.

Owns: finding the place (function, kind of node, how many of that kind come before) in a module's syntax tree, and changing the text there.
Promises: nothing but the operator's own characters changes; a place that does not read as it should is ``PlaceNotFound``, never a guess.
Does not: know which changes are bugs.
"""

from __future__ import annotations

import ast
import dataclasses
import itertools

_NODES: dict[str, type[ast.AST]] = {"Compare": ast.Compare, "BoolOp": ast.BoolOp, "BinOp": ast.BinOp, "Constant": ast.Constant}


class PlaceNotFound(ValueError):
    """The source has changed since the place was written down."""


@dataclasses.dataclass(frozen=True)
class Place:
    """``function``: its qualified name ("Version.__lt__"). ``node``: "Compare", "BoolOp", "BinOp" (the operator's characters change) or
    "Constant" (all of it does). ``nth``: counted from 0 in reading order among the nodes of the function whose text is ``old``."""

    function: str
    node: str
    nth: int
    old: str
    new: str


def mutate(source: str, place: Place) -> str:
    """``source`` with ``place.old`` replaced by ``place.new``. Raises ``PlaceNotFound``."""
    function = _function(ast.parse(source), place.function)
    spans = sorted(
        span
        for node in ast.walk(function)
        if isinstance(node, _NODES[place.node])
        for span in _spans(source, node)
        if source[span[0] : span[1]] == place.old
    )
    if place.nth >= len(spans):
        raise PlaceNotFound(f"{place.function} has {len(spans)} times {place.old!r}, not {place.nth + 1}")
    begin, end = spans[place.nth]
    changed = source[:begin] + place.new + source[end:]
    ast.parse(changed)
    return changed


def _function(tree: ast.AST, name: str) -> ast.AST:
    for part in name.split("."):
        inner = [node for node in ast.iter_child_nodes(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == part]
        if not inner:
            raise PlaceNotFound(f"there is no {name}")
        tree = inner[-1]
    return tree


def _spans(source: str, node: ast.AST) -> list[tuple[int, int]]:
    """Where the operators (or the constant) of ``node`` stand in ``source``."""
    if isinstance(node, ast.Constant):
        return [(_offset(source, node.lineno, node.col_offset), _end(source, node))]
    if isinstance(node, ast.Compare):
        operands: list[ast.expr] = [node.left, *node.comparators]
    elif isinstance(node, ast.BoolOp):
        operands = node.values
    else:
        assert isinstance(node, ast.BinOp)
        operands = [node.left, node.right]
    found = []
    for left, right in itertools.pairwise(operands):
        begin, end = _end(source, left), _offset(source, right.lineno, right.col_offset)
        between = source[begin:end]
        operator = between.strip(" \n\\()")
        if operator and between.count(operator) == 1:
            begin += between.index(operator)
            found.append((begin, begin + len(operator)))
    return found


def _end(source: str, node: ast.expr) -> int:
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    return _offset(source, node.end_lineno, node.end_col_offset)


def _offset(source: str, line: int, column: int) -> int:
    """Characters before ``column`` (in UTF-8 bytes) of ``line``."""
    lines = source.split("\n")
    return sum(len(text) + 1 for text in lines[: line - 1]) + len(lines[line - 1].encode()[:column].decode())
