"""What one execution of a compiled program does on each chip: arithmetic, memory traffic, network traffic, large buffers.

Owns: the counting rules. Promises: per chip, loops multiplied out, fused work included. Matrix products (dot, convolution) and kernels that
declare their cost are counted as arithmetic; element-wise work is not. HBM traffic counts every buffer once per instruction that reads or
writes it in HBM, slices of a larger buffer by the slice. Does not: know how fast a chip is (``roofline``).

Network bytes are those one chip sends in a ring: (n-1) s for an all-gather of shards of s bytes over n chips, 2 s (n-1)/n for an all-reduce
of s bytes, s (n-1)/n for a reduce-scatter or all-to-all, s for a permutation (Thakur et al. 2005, doi:10.1177/1094342005051521).
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator

import numpy as np

from crl_jax.aot.hlo import Computation, Instruction, Module, Shape, walk

COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute")
_BOOKKEEPING = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "opt-barrier", "domain", "iota")
_CONTROL = ("while", "conditional", "call", "partition-id", "replica-id", "send", "send-done", "recv", "recv-done")
_FREE = frozenset((*_BOOKKEEPING, *_CONTROL))
ATTENTION_PRODUCTS = {"splash_mha_fwd": 2, "splash_mha_dq": 3, "splash_mha_dkv": 4}
"""Matrix products per (query, key) block in JAX's splash attention: forward q k and w v; dq also recomputes the weights, dkv too."""
_SLICERS = ("dynamic-slice", "gather", "slice")


@dataclasses.dataclass(frozen=True)
class Buffer:
    """One large array in HBM: bytes per chip, shape, and where it comes from."""

    size: int
    shape: str
    source: str


@dataclasses.dataclass
class Cost:
    """Per chip and execution. ``collectives``: ring bytes by kind, ``sent_by``: by kind and source; ``dcn_bytes``: sent between slices;
    ``unknown_loops``: those without a readable count; ``opaque_kernels``: custom kernels that declare no cost (their arithmetic is missing
    here).
    """

    flops: float = 0.0
    hbm_bytes: float = 0.0
    dcn_bytes: float = 0.0
    collectives: dict[str, float] = dataclasses.field(default_factory=dict[str, float])
    unknown_loops: list[str] = dataclasses.field(default_factory=list[str])
    opaque_kernels: list[str] = dataclasses.field(default_factory=list[str])
    buffers: list[Buffer] = dataclasses.field(default_factory=list[Buffer])
    sent_by: dict[tuple[str, str], float] = dataclasses.field(default_factory=dict[tuple[str, str], float])

    @property
    def ici_bytes(self) -> float:
        """Ring bytes of all kinds."""
        return sum(self.collectives.values())


def count(module: Module, *, devices: int, unknown_trips: int = 1, largest: int = 8) -> Cost:
    """The cost of one execution of ``module`` on each of its ``devices`` chips, with its ``largest`` distinct HBM buffers."""
    cost = Cost()
    walked = walk(module, unknown_trips=unknown_trips)
    cost.unknown_loops = walked.unknown_loops
    buffers: dict[tuple[str, str], Buffer] = {}
    owners: dict[str, str] = {}  # computation in which a collective begins; pieces of it may lie in loops further on
    for visit in walked.visits:
        computation = module.computations[visit.name]
        channels = {channel for channel, owner in owners.items() if owner != visit.name}
        for instruction in computation.values():
            for inner, fused_in in _fused(module, instruction, computation):
                cost.flops += visit.times * _flops(inner, fused_in, cost)
                _network(cost, inner, fused_in, instruction, channels, visit.times, devices)
            cost.hbm_bytes += visit.times * _traffic(module, instruction, computation)
            _keep_buffers(buffers, instruction, entry=visit.name == module.entry)
        owners |= {channel: visit.name for channel in channels if channel not in owners}
    cost.buffers = sorted(buffers.values(), key=lambda b: -b.size)[:largest]
    return cost


def _fused(module: Module, instruction: Instruction, computation: Computation) -> Iterator[tuple[Instruction, Computation]]:
    """The instruction, and if it is a fusion or an asynchronous wrapper those inside it."""
    yield instruction, computation
    if instruction.opcode == "fusion" or instruction.opcode.startswith("async-start"):
        inside = module.computations.get(instruction.called("calls") or "", {})
        for inner in inside.values():
            yield from _fused(module, inner, inside)


def _flops(instruction: Instruction, computation: Computation, cost: Cost) -> float:
    if instruction.opcode == "dot":
        left = computation[instruction.operands[0]].shapes[0].dims
        contracted = _numbers(instruction.attributes, "lhs_contracting_dims")
        return 2.0 * instruction.shapes[0].elements * math.prod(left[d] for d in contracted)
    if instruction.opcode == "convolution":
        return _convolution_flops(instruction, computation)
    if instruction.opcode == "custom-call" and "tpu_custom_call" in instruction.attributes:
        return _kernel_flops(instruction, computation, cost)
    return 0.0


def _kernel_flops(instruction: Instruction, computation: Computation, cost: Cost) -> float:
    """What a custom kernel declares, or what is known of attention kernels: products over causal (query, key) pairs."""
    declared = _declared(instruction, "flops")
    products = next((n for name, n in ATTENTION_PRODUCTS.items() if name in instruction.name), None)
    if declared is not None:
        return declared
    if products is not None:
        shapes = [computation[name].shapes[0] for name in instruction.operands if name in computation and computation[name].shapes]
        queries = max((shape for shape in shapes if len(shape.dims) > 2), key=lambda shape: shape.elements)
        return float(products * queries.elements * queries.dims[-2])  # 2 FLOPs per multiply-add, half of the pairs
    if (name := instruction.source or instruction.name) not in cost.opaque_kernels:
        cost.opaque_kernels.append(name)
    return 0.0


def _declared(instruction: Instruction, field: str) -> float | None:
    """A field of the cost estimate a Pallas kernel carries."""
    match = re.search(rf'cost_estimate\\?"[^}}]*?\\?"{field}\\?":\s*\\?"?([0-9.e+]+)', instruction.attributes)
    return float(match[1]) if match else None


def _numbers(attributes: str, key: str) -> list[int]:
    match = re.search(rf"{key}=\{{([0-9,]*)\}}", attributes)
    return [int(n) for n in match[1].split(",") if n] if match else []


def _convolution_flops(instruction: Instruction, computation: Computation) -> float:
    """2 x outputs x input features x window positions that hold data; the TPU compiler writes every matrix product as a convolution."""
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.attributes)
    assert labels is not None, instruction.attributes
    left, right = (computation[operand].shapes[0].dims for operand in instruction.operands[:2])
    out = instruction.shapes[0].dims
    features = right[labels[2].index("i")]
    spatial = sorted(c for c in labels[2] if c.isdigit())
    pairs = 1.0
    for at, label in enumerate(spatial):
        window = {key: _window(instruction.attributes, key, at, len(spatial)) for key in ("size", "stride", "lhs_dilate", "rhs_dilate")}
        size, low = window["size"], _padding(instruction.attributes, at, len(spatial))
        pairs *= _valid_pairs(left[labels[1].index(label)], size, out[labels[3].index(label)], low, window)
    return 2.0 * out[labels[3].index("b")] * out[labels[3].index("f")] * features * pairs


def _window(attributes: str, key: str, at: int, rank: int) -> int:
    match = re.search(rf"window=\{{[^}}]*\b{key}=([0-9x]+)", attributes)
    values = match[1].split("x") if match else ["1"] * rank
    return int(values[at])


def _padding(attributes: str, at: int, rank: int) -> int:
    match = re.search(r"window=\{[^}]*\bpad=([0-9x_\-]+)", attributes)
    values = match[1].split("x") if match else ["0_0"] * rank
    return int(values[at].split("_")[0])


def _valid_pairs(in_size: int, size: int, out_size: int, low: int, window: dict[str, int]) -> float:
    """How many (output position, window position) pairs meet an input element, not padding or a dilation hole."""
    if size == 1 and low == 0 and window["lhs_dilate"] == 1:
        return float(out_size)
    total = 0
    outputs = np.arange(out_size, dtype=np.int64) * window["stride"]
    for k in range(size):
        place = outputs - low + k * window["rhs_dilate"]
        total += int(np.sum((place >= 0) & (place < (in_size - 1) * window["lhs_dilate"] + 1) & (place % window["lhs_dilate"] == 0)))
    return float(total)


def _network(
    cost: Cost, instruction: Instruction, inside: Computation, outer: Instruction, seen: set[str], times: float, devices: int
) -> None:
    """Adds the traffic of a collective; pieces of one that the compiler spread over several fusions share a channel and count once."""
    if instruction.opcode == "send" and "megascale" in instruction.attributes:
        cost.dcn_bytes += times * instruction.shapes[0].size
        return
    kind = instruction.opcode.removesuffix("-start")
    if kind not in COLLECTIVES:
        return
    channel = re.search(r"channel_id=(\d+)", instruction.attributes)
    if channel is not None and channel[1] in seen:
        return
    if channel is not None:
        seen.add(channel[1])
    if kind == "all-reduce" and (outer.called("calls") or "").startswith("all-reduce-scatter"):
        kind = "reduce-scatter"
    size = sum(shape.size for name in instruction.operands if name in inside for shape in inside[name].shapes)
    n = group_size(instruction.attributes, devices)
    factor = {"all-gather": n - 1, "all-reduce": 2 * (n - 1) / n, "collective-permute": 1.0}.get(kind, (n - 1) / n)
    sent, source = times * size * factor, (kind, instruction.source or outer.source or instruction.name)
    cost.collectives[kind] = cost.collectives.get(kind, 0.0) + sent
    cost.sent_by[source] = cost.sent_by.get(source, 0.0) + sent


def group_size(attributes: str, devices: int) -> int:
    """Chips that take part together in a collective, from any of the three ways replica groups are written; all ``devices`` when empty."""
    if match := re.search(r"replica_groups=\[(?:\d+,)*(\d+)\]<=", attributes):
        return int(match[1])
    if match := re.search(r"replica_groups=mesh\[([^\]]*)\]\s*\{([^}]*)\}", attributes):
        sizes = dict(re.findall(r"'([^']+)'=(\d+)", match[1]))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'([^']+)'", match[2]))
    if match := re.search(r"replica_groups=\{\{([0-9,]+)\}", attributes):
        return match[1].count(",") + 1
    return devices


def _hbm(shapes: tuple[Shape, ...]) -> int:
    return sum(shape.size for shape in shapes if shape.space == 0)


def _traffic(module: Module, instruction: Instruction, computation: Computation) -> float:
    """Bytes read from and written to HBM by one execution of an instruction outside fusions."""
    opcode = instruction.opcode
    if opcode in _FREE or opcode.endswith("-done") or "AllocateBuffer" in instruction.attributes:
        return 0.0
    operands = [computation[name] for name in instruction.operands if name in computation]
    if opcode == "custom-call" and (declared := _declared(instruction, "bytes_accessed")) is not None:
        return declared
    if opcode.endswith("-start") and opcode.removesuffix("-start") not in COLLECTIVES:
        arrays = [shape for shape in instruction.shapes if shape.dims]
        moved = arrays[0] if opcode == "copy-start" or not arrays[1:] else min(arrays, key=lambda shape: shape.size)
        return float(moved.size * sum(shape.space == 0 for shape in (arrays[0], arrays[-1]))) if arrays else 0.0
    if opcode == "fusion":
        return float(_fusion_traffic(module, instruction, operands))
    if opcode in _SLICERS:
        return 2.0 * _hbm(instruction.shapes)
    if opcode in ("dynamic-update-slice", "scatter"):
        return 2.0 * _hbm(operands[-1 if opcode == "scatter" else 1].shapes)
    return float(_hbm(instruction.shapes) + sum(_hbm(operand.shapes) for operand in operands))


def _fusion_traffic(module: Module, fusion: Instruction, operands: list[Instruction]) -> int:
    inside = module.computations.get(fusion.called("calls") or "", {})
    parameters = {int(i.argument): i.name for i in inside.values() if i.opcode == "parameter"}
    total = 0
    for at, operand in enumerate(operands):
        whole = _hbm(operand.shapes)
        part = _read(module, inside, parameters[at]) if whole and at in parameters else None
        total += whole if part is None else min(whole, part)
    root = next((i for i in inside.values() if i.root), None)
    outputs = [root] if root is None or root.opcode != "tuple" else [inside[name] for name in root.operands]
    if len(outputs) != len(fusion.shapes):
        return total + _hbm(fusion.shapes)
    return total + sum(_written(inside, output, shape) for output, shape in zip(outputs, fusion.shapes, strict=True))


def _read(module: Module, computation: Computation, name: str) -> int | None:
    """Bytes of parameter ``name`` that the fused computation reads when all its uses take slices; None: all of it."""
    total = 0
    for user in computation.values():
        if name not in user.operands:
            continue
        if user.opcode == "bitcast":
            part = None if user.root else _read(module, computation, user.name)
        elif user.opcode in _SLICERS and user.operands[0] == name:
            part = sum(shape.size for shape in user.shapes)
        elif user.opcode == "dynamic-update-slice" and user.operands[0] == name:
            part = 0  # updated in place
        elif user.opcode == "fusion":
            inside = module.computations.get(user.called("calls") or "", {})
            at = user.operands.index(name)
            inner = next((i.name for i in inside.values() if i.opcode == "parameter" and i.argument == str(at)), None)
            if inner is not None and _only_bitcast(inside, inner):  # what is read of it is read of the fusion's result
                part = None if user.root else _read(module, computation, user.name)
            else:
                part = None if inner is None else _read(module, inside, inner)
        else:
            part = None
        if part is None:
            return None
        total += part
    return total


def _only_bitcast(computation: Computation, name: str) -> bool:
    """Whether the computation returns ``name`` under another shape and does nothing else with it."""
    found = next((i for i in computation.values() if i.root), None)
    while found is not None and found.opcode == "bitcast":
        if found.operands[0] == name:
            return True
        found = computation.get(found.operands[0])
    return False


def _written(computation: Computation, output: Instruction | None, shape: Shape) -> int:
    while output is not None and output.opcode == "bitcast" and output.operands[0] in computation:
        output = computation[output.operands[0]]
    if output is not None and output.opcode == "dynamic-update-slice" and shape.space == 0:
        return sum(s.size for s in computation[output.operands[1]].shapes)
    return _hbm((shape,))


def _keep_buffers(found: dict[tuple[str, str], Buffer], instruction: Instruction, *, entry: bool) -> None:
    opcode = instruction.opcode
    if opcode in _FREE and not (entry and opcode == "parameter"):
        return
    for shape in instruction.shapes:
        if shape.space == 0 and shape.size:
            text = f"{shape.dtype}[{','.join(map(str, shape.dims))}]"
            source = instruction.source or opcode
            found.setdefault((text, source), Buffer(shape.size, text, f"argument {source}" if opcode == "parameter" else source))
