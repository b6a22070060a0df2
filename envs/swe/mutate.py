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
    function, text = _function(ast.parse(source), place.function), _Text(source)
    spans = sorted(
        (begin, end)
        for node in ast.walk(function)
        if isinstance(node, _NODES[place.node])
        for begin, end in text.spans(node)
        if source[begin:end] == place.old
    )
    if place.nth >= len(spans):
        raise PlaceNotFound(f"{place.function} has {len(spans)} times {place.old!r}, not {place.nth + 1}")
    begin, end = spans[place.nth]
    return source[:begin] + place.new + source[end:]


def _function(tree: ast.AST, name: str) -> ast.AST:
    for part in name.split("."):
        inner = [node for node in ast.iter_child_nodes(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == part]
        if not inner:
            raise PlaceNotFound(f"there is no {name}")
        tree = inner[-1]
    return tree


class _Text:
    """Where nodes stand in ``source``."""

    def __init__(self, source: str) -> None:
        self._source, self._lines = source, source.split("\n")
        self._starts = list(itertools.accumulate((len(line) + 1 for line in self._lines), initial=0))

    def spans(self, node: ast.AST) -> list[tuple[int, int]]:
        """The operators of ``node``, or the constant."""
        if isinstance(node, ast.Constant):
            return [(self._begin(node), self._end(node))]
        if isinstance(node, ast.Compare):
            operands: list[ast.expr] = [node.left, *node.comparators]
        elif isinstance(node, ast.BoolOp):
            operands = node.values
        else:
            assert isinstance(node, ast.BinOp)
            operands = [node.left, node.right]
        found = []
        for left, right in itertools.pairwise(operands):
            begin = self._end(left)
            between = self._source[begin : self._begin(right)]
            operator = between.strip(" \n\\()")
            if operator and between.count(operator) == 1:
                begin += between.index(operator)
                found.append((begin, begin + len(operator)))
        return found

    def _begin(self, node: ast.expr) -> int:
        return self._offset(node.lineno, node.col_offset)

    def _end(self, node: ast.expr) -> int:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._offset(node.end_lineno, node.end_col_offset)

    def _offset(self, line: int, column: int) -> int:
        """Characters before ``column`` (in UTF-8 bytes) of ``line``."""
        return self._starts[line - 1] + len(self._lines[line - 1].encode()[:column].decode())
