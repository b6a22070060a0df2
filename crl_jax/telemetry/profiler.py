"""A profiler trace of a window of steps, in the TensorBoard log folder.

Owns: when the trace starts and stops. Promises: it is stopped even if the run ends inside the window. Does not: annotate code.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable


def parse_window(text: str) -> tuple[int, int]:
    """``"3:5"`` -> (3, 5): the half-open range of steps to trace. Raises ValueError with an example."""
    first, colon, end = text.partition(":")
    if not colon or not first.isdigit() or not end.isdigit() or int(first) >= int(end):
        raise ValueError(f"profile window {text!r}: write FIRST:END with FIRST < END, e.g. 3:5 for steps 3 and 4")
    return int(first), int(end)


class ProfilerWindow:
    """Call ``before(step)`` at the top of each step and ``close()`` at the end of the run; ``window`` None never traces."""

    def __init__(
        self,
        folder: pathlib.Path,
        window: tuple[int, int] | None,
        start: Callable[[str], None] | None = None,
        stop: Callable[[], None] | None = None,
    ) -> None:
        self._folder, self._window, self._tracing = folder, window, False
        self._start, self._stop = start or _start_trace, stop or _stop_trace

    def before(self, step: int) -> None:
        """Starts or stops the trace as ``step`` enters or leaves the window. A resume into the middle of it traces the rest."""
        if self._window is None:
            return
        inside = self._window[0] <= step < self._window[1]
        if inside and not self._tracing:
            self._start(str(self._folder))
            self._tracing = True
        elif not inside:
            self.close()

    def close(self) -> None:
        """Stops the trace if one is running."""
        if self._tracing:
            self._tracing = False
            self._stop()


def _start_trace(folder: str) -> None:
    import jax

    jax.profiler.start_trace(folder)


def _stop_trace() -> None:
    import jax

    jax.profiler.stop_trace()
