"""The result object that ends every measuring command.

Owns: ``Result`` and the facts about the machine that make a number comparable.
Promises: ``emit`` prints one JSON line as the last line of output and, if asked, writes the same object to a file.
Does not: measure anything.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import math
import os
import pathlib
import platform
import subprocess
import sys
from typing import Any


@dataclasses.dataclass(frozen=True)
class Result:
    """One measured value. ``goal`` is in words (``">= 0.8"``, or empty); ``passed`` is None when there is no goal."""

    name: str
    value: float | None
    unit: str
    goal: str = ""
    passed: bool | None = None
    command: str = dataclasses.field(default_factory=lambda: command_line())
    commit: str = dataclasses.field(default_factory=lambda: git_commit())
    machine: dict[str, Any] = dataclasses.field(default_factory=lambda: machine_facts())
    details: dict[str, Any] = dataclasses.field(default_factory=dict[str, Any])

    def to_json(self) -> dict[str, Any]:
        """As a plain object; ``passed`` is called ``pass``, numbers that are not finite become null."""
        row = dataclasses.asdict(self)
        row["pass"] = row.pop("passed")
        return _finite(row)


def emit(result: Result, path: pathlib.Path | None = None) -> None:
    """Writes ``result`` to ``path`` (if given) and prints it as one line, last."""
    row = result.to_json()
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(row, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(row), flush=True)


def command_line() -> str:
    """The command of this process as a reader types it: ``crl ...``, or ``python`` and the script's path inside the source tree."""
    program, root = pathlib.Path(sys.argv[0]), pathlib.Path(__file__).resolve().parents[2]
    if program.name in ("crl", "cli.py"):
        return " ".join(["crl", *sys.argv[1:]])
    inside = program.resolve().is_relative_to(root)
    return " ".join(["python", str(program.resolve().relative_to(root)) if inside else program.name, *sys.argv[1:]])


def git_commit(folder: pathlib.Path | None = None) -> str:
    """Short commit of the source tree, with ``+`` when it has uncommitted changes (apart from results, which commands write); empty outside
    a git repository."""
    where = folder or pathlib.Path(__file__).resolve().parent
    try:
        commit = _git(where, "rev-parse", "--short", "HEAD")
        return commit + ("+" if _git(where, "status", "--porcelain", "--", ":/", ":(top,exclude)docs/results") else "")
    except (OSError, subprocess.SubprocessError):
        return ""


def machine_facts() -> dict[str, Any]:
    """CPU model, cores, memory (GiB), operating system, Python and JAX versions. Starts no JAX backend."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": _memory_gib(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "jax": _version("jax"),
    }


def _git(folder: pathlib.Path, *args: str) -> str:
    done = subprocess.run(["git", "-C", str(folder), *args], capture_output=True, text=True, timeout=10, check=True)
    return done.stdout.strip()


def _cpu_model() -> str:
    info = pathlib.Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _memory_gib() -> float | None:
    if "SC_PHYS_PAGES" not in os.sysconf_names:
        return None
    return round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
