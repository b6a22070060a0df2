"""Compiles one program for its slice and reads the verdict.

Owns: memory per chip against the limit, and the numbers of ``cost`` and ``roofline`` joined into one record. Promises: running out of
memory is a verdict ("does not fit"), any other refusal of the compiler is an ``AotError`` that names the program. Does not: print.
"""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable
from typing import Any

import jax

from crl_jax.aot.cost import Cost, count
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
    try:
        compiled = program.lower().compile()
    except jax.errors.JaxRuntimeError as error:
        message = str(error)
        if "RESOURCE_EXHAUSTED" not in message:
            raise AotError(f"{program.role}.{program.name}: the TPU compiler refuses it: {message[:600]}") from error
        return Verdict(program, chip, Memory(exhausted_bytes(message)), clock() - began, note=message.splitlines()[0])
    text = compiled.as_text()
    if keep_text is not None:
        keep_text(text)
    cost = count(parse_module(text), devices=program.chips, unknown_trips=program.loop_trips)
    times = roofline(chip, flops=cost.flops, hbm_bytes=cost.hbm_bytes, ici_bytes=cost.ici_bytes, dcn_bytes=cost.dcn_bytes)
    return Verdict(program, chip, memory_of(compiled.memory_analysis()), clock() - began, cost, times)


def memory_of(stats: Any) -> Memory:
    """From the compiler's statistics; donated arguments count once."""
    results = max(0, stats.output_size_in_bytes - stats.alias_size_in_bytes)
    parts = (stats.argument_size_in_bytes, results, stats.temp_size_in_bytes, stats.generated_code_size_in_bytes)
    return Memory(sum(parts), *parts)


def exhausted_bytes(message: str) -> int:
    """The memory a refused program asked for, from the compiler's message; 0 when it does not say."""
    match = re.search(r"required for HLO temporaries \(([\d.]+)([KMGT])", message) or re.search(r"Used ([\d.]+)([KMGT])", message)
    return int(float(match[1]) * 1024 ** ("KMGT".index(match[2]) + 1)) if match else 0


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
        return found | {"note": verdict.note}
    cost, times = verdict.cost, verdict.times
    return found | {
        "flops": cost.flops,
        "model_flops": program.model_flops,
        "hbm_bytes": cost.hbm_bytes,
        "ici_bytes": cost.ici_bytes,
        "ici_bytes_by_kind": cost.collectives,
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
        return f"{head}\n{used}: {word}\n  {verdict.note}"
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
        "  largest: " + "; ".join(f"{b.shape} {b.size / GIB:.2f} GiB ({_short(b.source)})" for b in cost.buffers[:4]),
    ]
    if cost.unknown_loops:
        trips = f"{len(cost.unknown_loops)} loop(s) of unknown length counted {program.loop_trips} time(s)"
        lines.append(f"  {trips}, e.g. {_short(cost.unknown_loops[0])}")
    if cost.opaque_kernels:
        lines.append(f"  arithmetic not counted: {len(cost.opaque_kernels)} kernel(s), e.g. {_short(cost.opaque_kernels[0])}")
    return "\n".join(lines)


def _short(source: str) -> str:
    """The end of an operation's path, which is what tells operations apart."""
    return source if len(source) <= 60 else f"...{source[-57:]}"
