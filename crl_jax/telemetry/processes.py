"""When the processes of a run were at work: one JSON object per event, in a file of its own that is only ever added to.

Owns: ``processes.jsonl``. Promises: it keeps what ``metrics.jsonl`` drops, the steps that a resumed run took again; each line is flushed,
so a killed process's last step is there. Does not: summarise (``wall_time``).

Every row has ``event`` and ``at_s``, seconds since 1970 of the machine's clock:

- ``begin``: a process began then (it opens the file a little later);
- ``resume`` with ``step``: it goes on after so many finished steps;
- ``step`` with ``step`` and ``step_s``: it finished that step, the seconds since the step before (or since its beginning) included;
- ``end``: it ended in order.
"""

from __future__ import annotations

import datetime
import json
import os
import pathlib
from collections.abc import Callable, Mapping

from crl_jax.telemetry.tracker import Scalar, displayed, end_torn_line

PROCESSES = "processes.jsonl"


class ProcessLog:
    """A ``Tracker`` that notes only when things happened. ``now`` is the machine's clock, ``age_s`` the age of this process."""

    def __init__(self, path: pathlib.Path, *, now: Callable[[], float] | None = None, age_s: Callable[[], float] | None = None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        end_torn_line(path)
        self._now = now or (lambda: datetime.datetime.now(datetime.UTC).timestamp())
        self._file = path.open("a", encoding="utf-8")
        self._write("begin", self._now() - (age_s or process_age_s)())

    def log(self, step: int, metrics: Mapping[str, Scalar]) -> None:
        """Notes a finished step: a row of metrics that has ``step_s``."""
        if "step_s" in metrics:
            self._write("step", self._now(), step=step, step_s=round(displayed({"s": metrics["step_s"]})["s"], 3))

    def text(self, step: int, tag: str, text: str) -> None:
        """Nothing."""

    def rewind(self, steps: int) -> None:
        """Notes where the process goes on."""
        self._write("resume", self._now(), step=steps)

    def close(self) -> None:
        """Notes the end."""
        if not self._file.closed:
            self._write("end", self._now())
            self._file.close()

    def _write(self, event: str, at_s: float, **more: float) -> None:
        self._file.write(json.dumps({"event": event, "at_s": round(at_s, 3), **more}) + "\n")
        self._file.flush()


def process_age_s() -> float:
    """Seconds since this process began; 0 where the system does not tell."""
    try:
        began = int(pathlib.Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19])
        return float(pathlib.Path("/proc/uptime").read_text(encoding="utf-8").split()[0]) - began / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return 0.0
