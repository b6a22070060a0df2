"""A tracker that cannot hold a run up.

Owns: the thread in which another tracker records. Promises: every call returns within ``wait_s`` or raises a TimeoutError that names the
tracker; an error of the tracker is raised by the call it belongs to; after a missed deadline nothing waits again, `close` included. Does
not: record in the background: a call returns when the tracker has recorded.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Mapping

from crl_jax.experience.thread import DaemonThread
from crl_jax.telemetry.tracker import Scalar, Tracker


class Bounded:
    """A `Tracker` around another; ``name`` is what errors call it."""

    def __init__(self, tracker: Tracker, name: str, wait_s: float) -> None:
        self._tracker, self._name, self._wait_s = tracker, name, wait_s
        self._thread = DaemonThread(f"crl-tracker-{name}")
        self._stuck = self._closed = False

    def log(self, step: int, metrics: Mapping[str, Scalar]) -> None:
        """As ``Tracker.log``. Raises TimeoutError."""
        self._do(lambda: self._tracker.log(step, metrics))

    def text(self, step: int, tag: str, text: str) -> None:
        """As ``Tracker.text``. Raises TimeoutError."""
        self._do(lambda: self._tracker.text(step, tag, text))

    def rewind(self, steps: int) -> None:
        """As ``Tracker.rewind``. Raises TimeoutError."""
        self._do(lambda: self._tracker.rewind(steps))

    def close(self) -> None:
        """Closes the tracker, unless it missed a deadline; ends the thread."""
        if self._closed:
            return
        self._closed = True
        try:
            if not self._stuck:
                self._do(self._tracker.close)
        finally:
            self._thread.shutdown()

    def _do(self, call: Callable[[], None]) -> None:
        recorded = self._thread.submit(call)
        try:
            recorded.result(0.0 if self._stuck else self._wait_s)
        except concurrent.futures.TimeoutError:
            if recorded.done():  # the tracker's own
                raise
            self._stuck = True
            recorded.cancel()
            late = f"the tracker {self._name} did not record within {self._wait_s:g} s"
            raise TimeoutError(f"{late}: is that disk full or stuck? Use another one (run.dir), or raise run.collect_timeout_s") from None
