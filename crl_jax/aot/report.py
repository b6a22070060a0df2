"""``crl aot``: every program of a recipe compiled for a slice, a verdict per program and one for what shares a chip's memory.

Owns: the order of work, the printed report and the result object. Promises: all programs are compiled even when one does not fit; exit
code 0 only if everything fits. Does not: run anything on a TPU, or need one.
"""

from __future__ import annotations

import dataclasses
import math
import os
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import jax

from crl_jax.aot.compile import Verdict, compile_program, describe, largest, to_details
from crl_jax.aot.recipe import Program, recipe_programs
from crl_jax.aot.topology import GIB, Topology, parse_topology
from crl_jax.config import Config, ConfigError
from crl_jax.telemetry.result import Result, emit, git_commit

# What libtpu would otherwise ask the cloud's metadata server for, with a warning each or a wait; and its lock, meant for chips that only
# one process may use: this process uses none and need not wait for another.
QUIET = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


@dataclasses.dataclass(frozen=True)
class Together:
    """What one role keeps in a chip's memory between calls, and its hungriest program on top. Bytes per chip."""

    role: str
    kept: dict[str, int]
    working: int
    program: str
    limit: int

    @property
    def total(self) -> int:
        """Kept and working memory."""
        return sum(self.kept.values()) + self.working

    @property
    def fits(self) -> bool:
        """Learner, sampler and any one of their programs have room at the same time."""
        return self.total <= self.limit


def together(verdicts: Sequence[Verdict]) -> list[Together]:
    """One per role that keeps something: learner state, serving weights and cache live on the same chips, programs run one at a time."""
    found: list[Together] = []
    for role in dict.fromkeys(v.program.role for v in verdicts if v.program.keeps):
        mine = [v for v in verdicts if v.program.role == role]
        kept = {name: bytes_per_chip(tree) for v in mine for name, tree in v.program.keeps.items()}
        working: dict[str, int] = {}
        for v in mine:
            here = sum(bytes_per_chip(tree) for tree in v.program.keeps.values())
            if v.program.name == "reshard":  # its result lies beside the old serving weights until they are let go
                here = v.memory.arguments
            working[v.program.name] = max(working.get(v.program.name, 0), v.memory.total - here)
        worst = max(working, key=lambda name: working[name])
        found.append(Together(role, kept, max(0, working[worst]), worst, mine[0].chip.hbm_bytes))
    return found


def bytes_per_chip(tree: Any) -> int:
    """Memory of a tree of placed ShapeDtypeStructs on each of its devices."""
    return sum(math.prod(s.sharding.shard_shape(s.shape)) * s.dtype.itemsize for s in jax.tree.leaves(tree))


def summarise(recipe: str, topology: Topology, verdicts: Sequence[Verdict], groups: Sequence[Together], commit: str = "") -> Result:
    """The result object: the largest share of a chip's memory that anything needs; passes when everything fits.

    ``commit``: that of the code that ran, which the source tree may have left since; empty for the one it has now.
    """
    chip = topology.chip
    shares = [v.memory.total / chip.hbm_bytes for v in verdicts] + [t.total / chip.hbm_bytes for t in groups]
    kept = [{"role": t.role, "kept": t.kept, "working": t.working, "program": t.program, "total": t.total, "fits": t.fits} for t in groups]
    return Result(
        name=f"aot_{recipe}_{topology.name}",
        value=round(max(shares), 4),
        unit="largest share of a chip's HBM",
        goal="<= 1 (every program fits)",
        passed=all(v.fits for v in verdicts) and all(t.fits for t in groups),
        command=" ".join(["crl", *sys.argv[1:]]),
        commit=commit or git_commit(),
        details={
            "topology": topology.name,
            "chips": topology.chips,
            "chip": dataclasses.asdict(chip),
            "programs": [to_details(v) for v in verdicts],
            "together": kept,
        },
    )


def choose(programs: Sequence[Program], only: Sequence[str]) -> list[Program]:
    """Those of ``programs`` that a word of ``only`` names (a role, a program, or ``role.program``); all when it is empty.

    Raises ValueError for a word that names none.
    """
    names = [{p.name, p.role, f"{p.role}.{p.name}"} for p in programs]
    if unknown := set(only) - set().union(*names):
        full = list(dict.fromkeys(f"{p.role}.{p.name}" for p in programs))
        raise ValueError(f"--only {','.join(sorted(unknown))} names no program of this recipe: use {', '.join(full)}, or a part of these")
    return [program for program, mine in zip(programs, names, strict=True) if not only or mine & set(only)]


def conclusion(recipe: str, topology: Topology, verdicts: Sequence[Verdict], groups: Sequence[Together], *, partial: bool) -> str:
    """The last words for a reader: what fits, and of what does not how much it needs and its largest buffers.

    ``partial``: not all programs were asked for.
    """
    bad = [v for v in verdicts if not v.fits]
    lines = [f"{len(verdicts) - len(bad)} of {len(verdicts)} programs fit {topology.name}"]
    for verdict in bad:
        name, used, limit = f"{verdict.program.role}.{verdict.program.name}", verdict.memory.total / GIB, topology.chip.hbm_bytes / GIB
        lines.append(f"{name} does not fit: {used:.2f} of {limit:.2f} GiB per chip; largest buffers: {largest(verdict)}")
    for group in groups:
        if not group.fits:
            lines.append(f"{group.role} does not fit: {group.total / GIB:.2f} GiB per chip is kept and worked in (see above)")
    verdict = "does not fit" if len(lines) > 1 else "fits"
    return "\n".join([*lines, f"{recipe}: {verdict}{' as far as asked' if partial else ''}"])


def main(config: Config, recipe: pathlib.Path, topology_name: str, *, only: Sequence[str], json_path: pathlib.Path | None) -> int:
    """Compiles, prints, writes; 0 when everything fits, 1 when not.

    ``only``: program names such as ``step`` or ``actor.step``; empty for all. Raises ConfigError for a bad topology name or mesh, AotError
    when there is no TPU compiler.
    """
    if json_path is not None and json_path.is_dir():
        raise ConfigError(f"--json {json_path} is a folder: name a file in it")  # now, not when all is compiled
    commit = git_commit()
    jax.config.update("jax_platforms", "cpu")  # with libtpu installed JAX would look for a TPU and wait
    for name, value in QUIET.items():
        os.putenv(name, value)  # for the compiler's C++ side only: this process uses no TPU
    try:
        topology = parse_topology(topology_name)
        wanted = choose(list(recipe_programs(config, topology)), only)
        verdicts: list[Verdict] = []
        for program in wanted:
            verdicts.append(compile_program(program, topology.chip))
            print(describe(verdicts[-1]), flush=True)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    groups = [] if only else together(verdicts)
    for group in groups:
        kept = " + ".join(f"{name} {size / GIB:.2f}" for name, size in group.kept.items())
        sizes = f"{kept} + working memory of {group.program} {group.working / GIB:.2f} = {group.total / GIB:.2f} GiB"
        print(f"{group.role} together: {sizes}: {'fits' if group.fits else 'DOES NOT FIT'}", flush=True)
    result = summarise(recipe.stem, topology, verdicts, groups, commit)
    print(conclusion(recipe.stem, topology, verdicts, groups, partial=bool(only)), flush=True)
    emit(result, json_path)
    return 0 if result.passed else 1
