"""The conformance suite: whether an environment keeps the promises of ``envs.api``.

Owns: ``check``, which examines one environment in processes of its own, and the findings.
Promises: an environment that hangs, crashes its process or leaves processes behind is a finding, not the end of the caller; every finding
names the rule and says what was seen, and where the environment raised, the line.
Does not: judge whether a game is right or winnable (see the players and their benchmark).

The rules are in ``envs.conformance.rules`` (one episode), ``.behaviour`` (replies and lifecycle) and ``.leaks`` (many episodes).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from envs.api import EnvUnavailable

EPISODES = 20
_END_S = 15.0  # for the examining process to end after it was told to


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """A promise that was broken. ``rule`` is one word; ``message`` says what was seen."""

    rule: str
    message: str


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """What was found. ``episodes``: random ones that were played to their end; ``seconds``: of all processes together, wall."""

    name: str
    findings: tuple[Finding, ...]
    episodes: int
    seconds: float

    @property
    def passed(self) -> bool:
        """True when nothing was found."""
        return not self.findings


def check(
    name: str,
    options: Mapping[str, Any] | None = None,
    *,
    episodes: int = EPISODES,
    source: str = "envs.registry",
    timeout_s: float = 30.0,
    make_timeout_s: float = 900.0,
) -> Report:
    """Examine the environment ``name`` with ``episodes`` random episodes.

    ``source`` is a module with ``make``, ``spec`` and ``tasks`` as ``envs.registry`` has them. A single call may take ``timeout_s``; the
    first ``make`` may take ``make_timeout_s``, because families build their data then. Raises KeyError for an unknown name, TypeError or
    ValueError for options that cannot be, ``EnvUnavailable`` when the environment cannot be made here.
    """
    started = time.monotonic()
    plan = {"source": source, "name": name, "options": dict(options or {}), "episodes": episodes}
    first = _Examiner(plan | {"phase": "all"}, hash_seed=1)
    findings = first.run(timeout_s, make_timeout_s)
    if first.digests:
        second = _Examiner(plan | {"phase": "digests"}, hash_seed=2)
        findings += [f for f in second.run(timeout_s, make_timeout_s) if f not in findings]
        differ = [case for case, digest in first.digests.items() if second.digests.get(case, digest) != digest]
        if differ:
            findings.append(
                Finding("reproduce", f"another process with another PYTHONHASHSEED plays another episode of {', '.join(differ)}")
            )
    return Report(name, tuple(findings), first.episodes, time.monotonic() - started)


class _Examiner:
    """A process that examines, and what it tells."""

    def __init__(self, plan: Mapping[str, Any], hash_seed: int):
        self._plan, self._hash_seed = plan, hash_seed
        self.digests: dict[str, str] = {}
        self.episodes = 0

    def run(self, timeout_s: float, make_timeout_s: float) -> list[Finding]:
        """The findings. Raises what ``check`` raises."""
        findings: list[Finding] = []
        at, done = "its start", False
        with self._process() as (process, told):
            told.limit_s = make_timeout_s
            for line in told.lines():
                match line:
                    case {"at": at}:
                        told.limit_s = make_timeout_s if at == "make" else timeout_s
                    case {"rule": rule, "message": message}:
                        findings.append(Finding(rule, message))
                    case {"digest": digest, "case": case}:
                        self.digests[case] = digest
                    case {"episodes": number}:
                        self.episodes = number
                    case {"raise": kind, "message": message}:
                        raise {"KeyError": KeyError, "TypeError": TypeError, "ValueError": ValueError}.get(kind, EnvUnavailable)(message)
                    case {"done": True}:
                        done = True
                    case _:
                        pass
            if told.late:
                findings.append(Finding("hang", f"{at}: no answer within {told.limit_s:g} s"))
            elif not done:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_END_S)
                findings.append(Finding("crash", f"{at}: the process ended (exit code {process.poll()})"))
        return findings

    @contextlib.contextmanager
    def _process(self) -> Iterator[tuple[subprocess.Popen[bytes], _Told]]:
        folder = tempfile.mkdtemp(prefix="crl-check-")
        ours, theirs = os.pipe()
        home = str(Path(__file__).resolve().parents[1])
        paths = [home, *(os.path.abspath(path) for path in sys.path)]
        command = f"import sys; sys.path.insert(0, {home!r}); from envs.conformance.process import main; main(sys.argv[1:])"
        settings = {**os.environ, "PYTHONHASHSEED": str(self._hash_seed), "TMPDIR": folder}
        try:
            process = subprocess.Popen(
                [sys.executable, "-c", command, str(theirs), str(os.getpid()), folder, json.dumps(self._plan), *paths],
                pass_fds=[theirs],
                stdin=subprocess.DEVNULL,
                env=settings,
            )
        except BaseException:
            os.close(ours)
            raise
        finally:
            os.close(theirs)
        try:
            yield process, _Told(ours)
        finally:
            process.terminate()  # its guard kills it and all it started
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            os.close(ours)
            shutil.rmtree(folder, ignore_errors=True)


class _Told:
    """Lines of JSON from a pipe, none of which may be late."""

    def __init__(self, fd: int):
        self._fd, self.late = fd, False
        self.limit_s = 0.0

    def lines(self) -> Iterator[dict[str, Any]]:
        """Until the pipe ends or ``limit_s`` seconds pass without a line."""
        rest = b""
        while select.select([self._fd], [], [], self.limit_s)[0]:
            read = os.read(self._fd, 1 << 16)
            if not read:
                return
            *whole, rest = (rest + read).split(b"\n")
            yield from map(json.loads, whole)
        self.late = True
