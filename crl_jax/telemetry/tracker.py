"""Where metrics go: a JSONL file (the run's own record) and TensorBoard, behind one protocol.

Owns: ``Tracker``, its two implementations, the fan-out, and ``read_jsonl``.
Promises: one JSON object per line, flushed at every ``log``; after a kill the reader drops at most one torn last line, and reopening the
file continues on a fresh line. Every combination of trackers, none included, runs. Sums become means here and nowhere earlier.
Does not: buffer across steps or hide errors: a full disk raises.
"""

from __future__ import annotations

import errno
import functools
import json
import math
import os
import pathlib
from collections.abc import Mapping
from typing import Any, Protocol

from crl_jax.errors import UserError
from crl_jax.records import Sum
from crl_jax.telemetry.histogram import Histogram

Scalar = float | int | Sum | Histogram
_TENSORBOARD_QUEUE = 4096  # events; above the metrics of a step, so that a step never waits for room in it


class MetricsError(UserError, ValueError):
    """A metrics file that cannot be summarised; the message says why."""


class Tracker(Protocol):
    """A sink for metrics."""

    def log(self, step: int, metrics: Mapping[str, Scalar]) -> None:
        """Records the numbers of one step. A Sum is recorded as its mean; a Sum of count 0 is left out. A Histogram ``lag`` is
        recorded as ``lag/0``, ``lag/1`` ... (``telemetry.histogram``); one that counted nothing is left out."""
        ...

    def text(self, step: int, tag: str, text: str) -> None:
        """Records a text, e.g. a transcript."""
        ...

    def rewind(self, steps: int) -> None:
        """The run goes on after ``steps`` finished steps: what was recorded after them will be recorded again."""
        ...

    def close(self) -> None:
        """Flushes and releases files; calling it twice is harmless."""
        ...


class JsonlTracker:
    """Appends ``{"step": s, "kind": "metrics" | "text", ...}`` lines to a file."""

    def __init__(self, path: pathlib.Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        end_torn_line(path)
        self._path = path
        self._file = path.open("a", encoding="utf-8")

    def log(self, step: int, metrics: Mapping[str, Scalar]) -> None:
        """One line; numbers that are not finite are written as the strings "nan", "inf", "-inf", so the line stays valid JSON."""
        self._write({"step": step, "kind": "metrics", **{k: _json_number(v) for k, v in displayed(metrics).items()}})

    def text(self, step: int, tag: str, text: str) -> None:
        """One line with ``tag`` and ``text``."""
        self._write({"step": step, "kind": "text", "tag": tag, "text": text})

    def rewind(self, steps: int) -> None:
        """Drops the rows of later steps, and of step 0 if there were none before it (its evaluation comes again). The file is replaced
        whole, or not at all."""
        lines = self._path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
        kept = [line for line in lines if _counts_after(line, steps)]
        if len(kept) == len(lines):
            return
        self.close()
        part = self._path.with_name(self._path.name + ".part")
        with part.open("w", encoding="utf-8") as file:
            file.writelines(kept)
            file.flush()
            os.fsync(file.fileno())
        part.replace(self._path)
        self._file = self._path.open("a", encoding="utf-8")

    def close(self) -> None:
        """Flushes to disk and closes the file."""
        if not self._file.closed:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()

    def _write(self, row: Mapping[str, Any]) -> None:
        try:
            self._file.write(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n")
            self._file.flush()
        except OSError as error:
            raise OSError(error.errno, f"metrics cannot be written: {error.strerror}", str(self._path)) from error


class TensorBoardTracker:
    """Writes TensorBoard event files by tensorboardX (no TensorFlow)."""

    def __init__(self, folder: pathlib.Path) -> None:
        from tensorboardX import SummaryWriter  # late: 1-3 s of import

        self._folder = folder
        self._open = functools.partial(SummaryWriter, str(folder), max_queue=_TENSORBOARD_QUEUE)
        self._writer = self._open()
        self._closed = False

    def log(self, step: int, metrics: Mapping[str, Scalar]) -> None:
        """One scalar per metric; a Histogram also as TensorBoard's own kind, in unit steps."""
        for key, value in displayed(metrics).items():
            self._writer.add_scalar(key, value, step)  # pyright: ignore[reportUnknownMemberType]
        for key, value in metrics.items():
            if isinstance(value, Histogram) and value.counts:
                self._writer.add_histogram_raw(key, global_step=step, **_raw(value))  # pyright: ignore[reportUnknownMemberType]
        self._writer.flush()
        self._check()

    def text(self, step: int, tag: str, text: str) -> None:
        """A text panel; the text is shown verbatim."""
        self._check()
        self._writer.add_text(tag, "    " + text.replace("\n", "\n    "), step)  # pyright: ignore[reportUnknownMemberType]

    def rewind(self, steps: int) -> None:
        """Tells TensorBoard not to show what earlier event files have of later steps."""
        self._writer.close()
        self._writer = self._open(purge_step=steps + 1 if steps else 0)

    def close(self) -> None:
        """Flushes and closes the event file."""
        if not self._closed:
            self._closed = True
            self._check()  # closing waits for the library's thread to take what is queued
            self._writer.close()

    def _check(self) -> None:
        """Raises OSError when the library's thread has ended: of a disk that refuses it says nothing else, and its queue fills up."""
        files: Any = self._writer.file_writer
        worker = getattr(getattr(files, "event_writer", None), "_worker", None)
        if worker is not None and not worker.is_alive():
            raise OSError(errno.EIO, "TensorBoard cannot write its events (stderr says why): is the disk full?", str(self._folder))


class FanOut:
    """Hands everything to each of several trackers, in order."""

    def __init__(self, trackers: tuple[Tracker, ...]) -> None:
        self._trackers = trackers

    def log(self, step: int, metrics: Mapping[str, Scalar]) -> None:
        """As ``Tracker.log``."""
        for tracker in self._trackers:
            tracker.log(step, metrics)

    def text(self, step: int, tag: str, text: str) -> None:
        """As ``Tracker.text``."""
        for tracker in self._trackers:
            tracker.text(step, tag, text)

    def rewind(self, steps: int) -> None:
        """As ``Tracker.rewind``."""
        for tracker in self._trackers:
            tracker.rewind(steps)

    def close(self) -> None:
        """Closes all, the last first."""
        for tracker in reversed(self._trackers):
            tracker.close()


def open_trackers(run_dir: pathlib.Path, *, jsonl: bool = True, tensorboard: bool = True, wait_s: float = 600.0) -> FanOut:
    """The trackers of a run: ``run_dir/metrics.jsonl`` with ``processes.jsonl``, and ``run_dir/tensorboard``, each if asked for. One that
    takes longer than ``wait_s`` for a call raises TimeoutError.
    """
    from crl_jax.telemetry.bounded import Bounded  # these need the protocol of this module
    from crl_jax.telemetry.processes import PROCESSES, ProcessLog

    trackers: list[Tracker] = []
    if jsonl:
        trackers += [Bounded(JsonlTracker(run_dir / "metrics.jsonl"), "metrics.jsonl", wait_s), ProcessLog(run_dir / PROCESSES)]
    if tensorboard:
        trackers.append(Bounded(TensorBoardTracker(run_dir / "tensorboard"), "tensorboard", wait_s))
    return FanOut(tuple(trackers))


def displayed(metrics: Mapping[str, Scalar]) -> dict[str, float]:
    """Metrics as plain floats: means of Sums and the ranges of Histograms, without those nothing was counted in."""
    numbers: dict[str, float] = {}
    for key, value in metrics.items():
        if isinstance(value, Sum):
            if float(value.count) == 0:
                continue
            numbers[key] = value.mean()
        elif isinstance(value, Histogram):
            numbers |= {f"{key}/{name}": float(count) for name, count in value.shown().items()}
        else:
            numbers[key] = float(value)
    return numbers


def read_jsonl(path: pathlib.Path) -> list[dict[str, Any]]:
    """The rows of a metrics file in file order. A torn last line is dropped.

    A step that was run again after a resume appears twice; the later row counts (``report`` uses it). Raises MetricsError for a broken line
    that is not the last one and does not look torn (it is no prefix of an object).
    """
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            if line.startswith("{") and not line.endswith("}"):
                continue  # torn by a kill; a resumed run went on below it
            raise MetricsError(f"{path}:{number} is no metrics line: {line[:60]!r}; remove the line, the rest is kept") from None
        rows.append({k: float(v) if v in ("nan", "inf", "-inf") else v for k, v in row.items()} if isinstance(row, dict) else {})
    return rows


def _raw(histogram: Histogram) -> dict[str, Any]:
    """As TensorBoard stores it: one bucket per whole number, from one below the smallest value to the largest."""
    counts = histogram.counts
    values = range(min(counts) - 1, max(counts) + 1)  # it wants a bucket below what was seen
    return {
        "min": float(min(counts)),
        "max": float(max(counts)),
        "num": float(sum(counts.values())),
        "sum": float(sum(value * n for value, n in counts.items())),
        "sum_squares": float(sum(value * value * n for value, n in counts.items())),
        "bucket_limits": [value + 0.5 for value in values],
        "bucket_counts": [float(counts.get(value, 0)) for value in values],
    }


def _json_number(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


def _counts_after(line: str, steps: int) -> bool:
    """Whether a line is of the first ``steps`` steps. A text has the number of its step from 0, a metric that of the steps done by then."""
    try:
        row = json.loads(line)
        kind, step = row["kind"], int(row["step"])
    except (ValueError, LookupError, TypeError):
        return True  # torn, or not ours: the reader decides
    return step < steps if kind == "text" else step <= steps and steps > 0


def end_torn_line(path: pathlib.Path) -> None:
    """A line that a kill cut off ends here, so that what is added comes on a line of its own."""
    if path.exists() and path.stat().st_size:
        with path.open("rb+") as file:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
