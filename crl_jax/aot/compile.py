"""Compiles one program for its slice and reads the verdict.

Owns: memory per chip against the limit, and the numbers of ``cost`` and ``roofline`` joined into one record. Promises: running out of
memory is a verdict ("does not fit"), any other refusal of the compiler is an ``AotError`` that names the program. Does not: print.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import re
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax

from crl_jax.aot.cost import Buffer, Cost, count
from crl_jax.aot.hlo import parse_module
from crl_jax.aot.recipe import Program
from crl_jax.aot.roofline import Roofline, intensity, mfu_bound, roofline
from crl_jax.aot.topology import GIB, AotError, Chip


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of HBM per chip. ``results`` are those outside donated arguments. After running out only ``total`` is known."""

    total: int
    arguments: int = 0
    results: int = 0
    temporaries: int = 0
    code: int = 0


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What is known about one program on one chip; ``cost`` and ``times`` are None when it did not compile for lack of memory."""

    program: Program
    chip: Chip
    memory: Memory
    compile_s: float
    cost: Cost | None = None
    times: Roofline | None = None
    note: str = ""
    asked_for: tuple[Buffer, ...] = ()  # the largest buffers of a program that did not compile

    @property
    def fits(self) -> bool:
        """Compiled, and within the chip's memory."""
        return self.cost is not None and self.memory.total <= self.chip.hbm_bytes

    @property
    def mfu(self) -> float:
        """Upper bound of the utilisation, from the roofline time."""
        seconds = 0.0 if self.times is None else self.times.roofline_s
        return mfu_bound(self.chip, model_flops=self.program.model_flops, chips=self.program.chips, seconds=seconds)


def compile_program(
    program: Program, chip: Chip, *, clock: Callable[[], float] = time.monotonic, keep_text: Callable[[str], Any] | None = None
) -> Verdict:
    """Lower and compile; ``keep_text`` receives the compiled program as text."""
    began = clock()
    lowered = program.lower()
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        message = str(error)
        if "RESOURCE_EXHAUSTED" not in message or "memory space vmem" in message:  # vector memory is a matter of the kernel's blocks
            raise AotError(f"{program.role}.{program.name}: the TPU compiler refuses it: {message[:600]}") from error
        note, took = message.splitlines()[0][:300], clock() - began
        buffers = exhausted_buffers(message) or buffers_at_failure(lowered, devices=program.chips)
        return Verdict(program, chip, Memory(exhausted_bytes(message)), took, note=note, asked_for=buffers)
    text = compiled.as_text()
    if keep_text is not None:
        keep_text(text)
    cost = count(parse_module(text), devices=program.chips, unknown_trips=program.loop_trips)
    # a kernel whose products are not counted does at least its part of what the program needs
    flops = max(cost.flops, program.model_flops / program.chips) if cost.opaque_kernels else cost.flops
    times = roofline(chip, flops=flops, hbm_bytes=cost.hbm_bytes, ici_bytes=cost.ici_bytes, dcn_bytes=cost.dcn_bytes)
    return Verdict(program, chip, memory_of(compiled.memory_analysis()), clock() - began, cost, times)


def memory_of(stats: Any) -> Memory:
    """From the compiler's statistics; donated arguments count once."""
    results = max(0, stats.output_size_in_bytes - stats.alias_size_in_bytes)
    parts = (stats.argument_size_in_bytes, results, stats.temp_size_in_bytes, stats.generated_code_size_in_bytes)
    return Memory(sum(parts), *parts)


def exhausted_bytes(message: str) -> int:
    """The memory a refused program asked for, from the compiler's message; 0 when it does not say."""
    match = re.search(r"required for HLO temporaries \(([\d.]+)([KMGT])", message) or re.search(r"Used ([\d.]+)([KMGT])", message)
    return _bytes(match[1], match[2]) if match else 0


def exhausted_buffers(message: str, most: int = 8) -> tuple[Buffer, ...]:
    """The largest allocations that the compiler's message lists; the same shape from the same operation once."""
    found: dict[tuple[str, str], Buffer] = {}
    for size, unit, rest in re.findall(r"\n\s*\d+\. Size: ([\d.]+)([KMGT]?)B?\n(.*?)(?=\n\s*\d+\. Size:|\Z)", message, re.DOTALL):
        shape = re.search(r"Shape: ([a-z0-9]+\[[0-9,]*\])", rest)
        source = re.search(r'op_name="([^"]*)"', rest) or re.search(r"Allocation type: (.*)", rest)
        key = (shape[1] if shape else "?", source[1] if source else "")
        found.setdefault(key, Buffer(_bytes(size, unit), *key))
    return tuple(sorted(found.values(), key=lambda b: -b.size)[:most])


def buffers_at_failure(lowered: Any, *, devices: int) -> tuple[Buffer, ...]:
    """The largest buffers of a program that is refused without a list of them: compiled once more, for the compiler to leave the module at
    which it gave up; empty when it leaves none.
    """
    with tempfile.TemporaryDirectory() as folder:
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # the refusal that is known already
            lowered.compile(compiler_options={"xla_dump_to": folder, "xla_dump_hlo_as_text": True})
        left = sorted(pathlib.Path(folder).glob("*oom_intermediate_module.txt"))
        return tuple(count(parse_module(left[-1].read_text(encoding="utf-8")), devices=devices).buffers) if left else ()


def _bytes(number: str, unit: str) -> int:
    return int(float(number) * 1024 ** (" KMGT".index(unit or " ")))


def to_details(verdict: Verdict) -> dict[str, Any]:
    """The record of one program for the report file; sizes in bytes per chip, times in seconds."""
    program, memory = verdict.program, verdict.memory
    found: dict[str, Any] = {
        "program": f"{program.role}.{program.name}",
        "shapes": program.shapes,
        "chips": program.chips,
        "fits": verdict.fits,
        "hbm": dataclasses.asdict(memory) | {"limit": verdict.chip.hbm_bytes},
        "compile_s": round(verdict.compile_s, 1),
    }
    if verdict.cost is None or verdict.times is None:
        return found | {"note": verdict.note, "largest_buffers": [dataclasses.asdict(buffer) for buffer in verdict.asked_for]}
    cost, times = verdict.cost, verdict.times
    return found | {
        "flops": cost.flops,
        "model_flops": program.model_flops,
        "hbm_bytes": cost.hbm_bytes,
        "ici_bytes": cost.ici_bytes,
        "ici_bytes_by_kind": cost.collectives,
        "largest_senders": [
            {"bytes": sent, "kind": kind, "source": source}
            for (kind, source), sent in sorted(cost.sent_by.items(), key=lambda item: -item[1])[:6]
        ],
        "dcn_bytes": cost.dcn_bytes,
        "arithmetic_intensity": intensity(cost.flops, cost.hbm_bytes),
        "roofline_s": times.roofline_s,
        "no_overlap_s": times.serial_s,
        "bound": times.bound,
        "times_s": dataclasses.asdict(times),
        "mfu_bound": verdict.mfu if program.model_flops else None,
        "largest_buffers": [dataclasses.asdict(buffer) for buffer in cost.buffers],
        "loops_of_unknown_length": cost.unknown_loops,
        "kernels_without_cost": cost.opaque_kernels,
    }


def describe(verdict: Verdict) -> str:
    """One program in a few lines of text."""
    program, memory, chip = verdict.program, verdict.memory, verdict.chip
    head = f"{program.role}.{program.name}: {program.shapes}, {program.chips} chip{'s' * (program.chips > 1)}"
    word = "fits" if verdict.fits else "DOES NOT FIT"
    used = f"  HBM {memory.total / GIB:.2f} of {chip.hbm_bytes / GIB:.2f} GiB per chip"
    if verdict.cost is None or verdict.times is None:
        return f"{head}\n{used}: {word}\n  largest: {largest(verdict)}\n  {verdict.note}"
    cost, times = verdict.cost, verdict.times
    parts = " + ".join(f"{n} {getattr(memory, n) / GIB:.2f}" for n in ("arguments", "results", "temporaries", "code"))
    lines = [
        head,
        f"{used} ({parts}): {word}",
        f"  per chip {cost.flops / 1e12:.4g} TFLOP, HBM {cost.hbm_bytes / 1e9:.4g} GB, interconnect {cost.ici_bytes / 1e9:.4g} GB"
        + (f", between slices {cost.dcn_bytes / 1e9:.4g} GB" if cost.dcn_bytes else "")
        + f"; {intensity(cost.flops, cost.hbm_bytes):.1f} FLOP/byte",
        f"  roofline {times.roofline_s:.4g} s ({times.bound}-bound; without overlap {times.serial_s:.4g} s)"
        + (f", MFU at most {100 * verdict.mfu:.1f} %" if program.model_flops else ""),
        f"  largest: {largest(verdict)}",
    ]
    if cost.unknown_loops:
        trips = f"{len(cost.unknown_loops)} loop(s) of unknown length counted {program.loop_trips} time(s)"
        lines.append(f"  {trips}, e.g. {_short(cost.unknown_loops[0])}")
    if cost.opaque_kernels:
        kernels = f"{len(cost.opaque_kernels)} kernel(s), e.g. {_short(cost.opaque_kernels[0])}"
        lines.append(f"  arithmetic not counted: {kernels}; the time assumes at least what is needed")
    return "\n".join(lines)


def largest(verdict: Verdict, most: int = 4) -> str:
    """The largest buffers in words."""
    buffers = verdict.asked_for if verdict.cost is None else verdict.cost.buffers
    words = [f"{b.shape} {b.size / GIB:.2f} GiB ({_short(b.source)})" for b in buffers[:most]]
    return "; ".join(words) or "not named by the compiler"


def _short(source: str) -> str:
    """The end of an operation's path, which is what tells operations apart."""
    return source if len(source) <= 60 else f"...{source[-57:]}"
