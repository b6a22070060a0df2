"""Compiled programs as text, parsed just far enough to count what they do.

Owns: the data model of an HLO module (computations, instructions, shapes) and how often each computation runs. Promises: loops count with
their trip counts, which XLA's own cost analysis does not do; a loop whose count cannot be read is reported, not guessed silently.
Does not: know costs (``cost``).
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator

ITEM_BYTES = {"pred": 1, "s4": 0.5, "u4": 0.5, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2} | {
    "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8, "c64": 8, "c128": 16, "token": 0, "opaque": 0,
}  # fmt: skip
_SHAPE = re.compile(r"([a-z]+[0-9]*(?:e[0-9]m[0-9][a-z]*)?)\[([0-9,<=]*)\](?:\{([^{}]*)\})?")
_LAYOUT_SPACE = re.compile(r"S\((\d+)\)")
_OPCODE = re.compile(r"\s*([a-z][a-z0-9\-]*)\(")
_NAME = re.compile(r"%([\w.\-]+)")


@dataclasses.dataclass(frozen=True)
class Shape:
    """One array of an instruction's result. ``space`` 0 is HBM; others (vector memory, semaphores, host) cost no HBM traffic."""

    dtype: str
    dims: tuple[int, ...]
    space: int = 0

    @property
    def elements(self) -> int:
        """Number of scalars."""
        return math.prod(self.dims)

    @property
    def size(self) -> int:
        """Bytes without padding."""
        return int(self.elements * ITEM_BYTES.get(self.dtype, 1))


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line. ``shapes`` are the arrays of the result, in order; ``attributes`` is the unparsed rest of the line."""

    name: str
    opcode: str
    shapes: tuple[Shape, ...]
    operands: tuple[str, ...]
    attributes: str
    argument: str  # the text between the parentheses: a constant's value, a parameter's number
    root: bool

    def called(self, key: str) -> str | None:
        """Name of the computation in attribute ``key``."""
        match = re.search(rf"(?<![\w-]){key}=%?([\w.\-]+)", self.attributes)
        return match[1] if match else None

    @property
    def source(self) -> str:
        """The operation of the traced program it came from, e.g. ``jit(step)/dot_general``."""
        match = re.search(r'op_name="([^"]*)"', self.attributes)
        return match[1].replace("\\'", "'") if match else ""


Computation = dict[str, Instruction]


@dataclasses.dataclass(frozen=True)
class Module:
    """Computations by name; instructions by name within each."""

    computations: dict[str, Computation]
    entry: str


def parse_shapes(text: str) -> tuple[Shape, ...]:
    """The arrays of a type such as ``(f32[2,3]{1,0:T(8,128)S(1)}, u32[])``."""
    found: list[Shape] = []
    for dtype, dims, layout in _SHAPE.findall(text):
        if dtype in ITEM_BYTES or dtype.startswith("f8"):
            space = _LAYOUT_SPACE.search(layout)
            found.append(Shape(dtype, tuple(int(d.lstrip("<=")) for d in dims.split(",") if d), int(space[1]) if space else 0))
    return tuple(found)


def parse_module(text: str) -> Module:
    """The module of ``compiled.as_text()``. Raises ValueError when there is no entry computation."""
    computations: dict[str, Computation] = {}
    entry, current = "", None
    for line in _lines(text):
        if line.startswith(("%", "ENTRY")) and line.endswith("{"):
            name = _NAME.search(line)
            assert name is not None, line
            current = computations.setdefault(name[1], {})
            entry = name[1] if line.startswith("ENTRY") else entry
        elif line.rstrip() == "}":
            current = None
        elif current is not None and " = " in line and (instruction := _instruction(line)) is not None:
            current[instruction.name] = instruction
    if not entry:
        raise ValueError("no ENTRY computation in the text: pass `compiled.as_text()`")
    return Module(computations, entry)


def _lines(text: str) -> Iterator[str]:
    """Lines of ``text``, an instruction whose attributes go over several lines (those of Pallas kernels do) made one."""
    held = ""
    for line in text.splitlines():
        if line.startswith(("  ", "%", "ENTRY", "HloModule")) or line.rstrip() in ("", "}"):
            yield held
            held = line
        else:
            held += line
    yield held


def _instruction(line: str) -> Instruction | None:
    left, _, right = line.strip().partition(" = ")
    end = _closing(right) if right.startswith("(") else right.find(" ")
    opcode = _OPCODE.match(right, end)
    if opcode is None:
        return None
    stop = opcode.end() - 1 + _closing(right[opcode.end() - 1 :])
    inside = right[opcode.end() : stop - 1]
    return Instruction(
        name=left.removeprefix("ROOT ").lstrip("%"),
        opcode=opcode[1],
        shapes=parse_shapes(right[:end]),
        operands=tuple(_NAME.findall(inside)),
        attributes=right[stop:],
        argument=inside,
        root=left.startswith("ROOT "),
    )


def _closing(text: str) -> int:
    """Index after the parenthesis that closes the one at index 0."""
    depth = 0
    for at, char in enumerate(text):
        depth += (char == "(") - (char == ")")
        if depth == 0:
            return at + 1
    return len(text)


@dataclasses.dataclass(frozen=True)
class Visit:
    """A computation that is not fused, and how often one execution of the program runs it."""

    name: str
    times: float


@dataclasses.dataclass
class Walk:
    """``visits`` in execution order and the loops whose trip count could not be read."""

    visits: list[Visit]
    unknown_loops: list[str]


def walk(module: Module, *, unknown_trips: int = 1) -> Walk:
    """Every computation that runs outside fusions, loops multiplied out; of a conditional every branch counts once (an upper bound).

    ``unknown_trips``: iterations of a loop whose count is not in the text.
    """
    found = Walk([], [])
    _walk(module, module.entry, 1.0, found, unknown_trips)
    return found


def _walk(module: Module, name: str, times: float, found: Walk, unknown: int) -> None:
    found.visits.append(Visit(name, times))
    computation = module.computations[name]
    for instruction in computation.values():
        if instruction.opcode == "while":
            body = instruction.called("body")
            trips = trip_count(module, computation, instruction)
            if trips is None:
                found.unknown_loops.append(instruction.source or instruction.name)
            if body in module.computations:
                _walk(module, body, times * (unknown if trips is None else trips), found, unknown)
        elif instruction.opcode in ("call", "conditional"):
            for callee in _callees(instruction):
                if callee in module.computations:
                    _walk(module, callee, times, found, unknown)


def _callees(instruction: Instruction) -> Iterator[str]:
    branches = re.search(r"branch_computations=\{([^}]*)\}", instruction.attributes)
    if branches:
        yield from _NAME.findall(branches[1])
    for key in ("to_apply", "true_computation", "false_computation"):
        if (name := instruction.called(key)) is not None:
            yield name


def trip_count(module: Module, computation: Computation, loop: Instruction) -> int | None:
    """Iterations of a counted loop: from its annotation, or from ``i < constant`` in its condition and the start and the stride of i (2
    where the compiler put two turns into one); None if unknown.
    """
    known = re.search(r'known_trip_count"?:\s*\{"n":"?(\d+)', loop.attributes)
    if known:
        return int(known[1])
    condition = module.computations.get(loop.called("condition") or "", {})
    root = next((i for i in condition.values() if i.root), None)
    if root is None:
        return None
    compare = root
    where, bindings = condition, {}
    if root.opcode == "fusion":  # the comparison may have been fused: its parameters are then the fusion's operands
        where = module.computations.get(root.called("calls") or "", {})
        bindings = {i.name: root.operands[int(i.argument)] for i in where.values() if i.opcode == "parameter"}
        compare = next((i for i in where.values() if i.root), root)
    if compare.opcode != "compare" or "direction=LT" not in compare.attributes or len(compare.operands) != 2:
        return None
    index, limit = (_follow(where, bindings, condition, operand) for operand in compare.operands)
    if index is None or limit is None or limit.opcode != "constant" or index.opcode != "get-tuple-element":
        return None
    position = re.search(r"index=(\d+)", index.attributes)
    if position is None:
        return None
    start, stride = _start(computation, loop, int(position[1])), _stride(module, loop, int(position[1]))
    return None if start is None or not stride else max(0, math.ceil((int(limit.argument) - start) / stride))


def _follow(where: Computation, bindings: dict[str, str], outer: Computation, name: str) -> Instruction | None:
    found = outer.get(bindings[name]) if name in bindings else where.get(name)
    while found is not None and found.opcode in ("copy", "bitcast", "convert") and found.operands:
        found = outer.get(found.operands[0]) or where.get(found.operands[0])
    return found


def _stride(module: Module, loop: Instruction, position: int) -> int | None:
    """What one turn adds to element ``position`` of the loop's state."""
    body = module.computations.get(loop.called("body") or "", {})
    root = next((i for i in body.values() if i.root), None)
    if root is None or root.opcode != "tuple" or position >= len(root.operands):
        return None
    added, where, bindings, value = 0, body, dict[str, str](), body.get(root.operands[position])
    while value is not None and value.opcode != "get-tuple-element":
        if value.opcode == "fusion":  # goes on inside; its parameters are the fusion's operands
            where = module.computations.get(value.called("calls") or "", {})
            bindings = {i.name: value.operands[int(i.argument)] for i in where.values() if i.opcode == "parameter"}
            value = next((i for i in where.values() if i.root), None)
            continue
        operands = [_follow(where, bindings, body, name) for name in value.operands]
        constants = [o for o in operands if o is not None and o.opcode == "constant"]
        if value.opcode == "add" and len(constants) == 1:
            added += int(constants[0].argument)
            value = next(o for o in operands if o is not constants[0])
        elif value.opcode in ("copy", "bitcast", "convert") and operands:
            value = operands[0]
        else:
            return None
    return added if value is not None and re.search(rf"index={position}\b", value.attributes) else None


def _start(computation: Computation, loop: Instruction, position: int) -> int | None:
    """The constant that element ``position`` of the loop's first state has."""
    state = computation.get(loop.operands[0])
    if state is None or state.opcode != "tuple" or position >= len(state.operands):
        return None
    value = computation.get(state.operands[position])
    while value is not None and value.opcode in ("copy", "bitcast", "copy-done", "copy-start") and value.operands:
        value = computation.get(value.operands[0])
    return int(value.argument) if value is not None and value.opcode == "constant" else None
