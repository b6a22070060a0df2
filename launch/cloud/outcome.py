"""What it means that a run on several hosts has ended.

Owns: the line a host reports its state in, and the verdict over all hosts. Promises: a host that was told to go (exit code 75 or 143, or a
machine that was taken away) makes the whole end a preemption, whatever its siblings died of; only an end without one is a failure.
Does not: restart anything.
"""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Iterable, Mapping

PREEMPTED_CODES = frozenset({75, 143})  # EX_TEMPFAIL: the trainer saved and left; 128 + SIGTERM: it was ended before it could
_LINE = re.compile(r"crl-worker (\d+) (running|exited|stopped|absent)(?: (\d+))?")


@dataclasses.dataclass(frozen=True)
class HostState:
    """One host's trainer: running, exited with a code, stopped on request, or absent (never started)."""

    state: str
    code: int | None = None


class Verdict(enum.Enum):
    """How a run ended, or that it has not."""

    RUNNING = "running"
    DONE = "done"
    STOPPED = "stopped"
    PREEMPTED = "preempted"
    FAILED = "failed"


def read_states(text: str) -> dict[int, HostState]:
    """The hosts that report in ``text`` (``crl-worker ID STATE [CODE]``, with other text between), by process id."""
    return {int(m[1]): HostState(m[2], int(m[3]) if m[3] else None) for m in _LINE.finditer(text)}


def verdict(hosts: Mapping[int, HostState], *, machine_gone: bool = False) -> Verdict:
    """The verdict over all hosts. While some still run, an end of others is not yet one: the caller waits for them, with a limit, and
    then calls `verdict_of_codes`.
    """
    if machine_gone:
        return Verdict.PREEMPTED
    if any(host.state == "stopped" for host in hosts.values()):
        return Verdict.STOPPED
    if any(host.state == "running" for host in hosts.values()):
        return Verdict.RUNNING
    return verdict_of_codes(host.code for host in hosts.values())


def verdict_of_codes(codes: Iterable[int | None]) -> Verdict:
    """The verdict over exit codes; None (no code known) counts as a failure."""
    found = list(codes)
    if any(code in PREEMPTED_CODES for code in found):
        return Verdict.PREEMPTED
    return Verdict.DONE if found and all(code == 0 for code in found) else Verdict.FAILED


def failure_code(hosts: Mapping[int, HostState]) -> int:
    """The exit code to hand on: that of the first host that failed."""
    return next((host.code for _, host in sorted(hosts.items()) if host.code), 1)
