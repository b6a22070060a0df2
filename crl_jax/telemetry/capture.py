"""One profiler trace at a time, and what lies beside it.

Owns: beginning and ending a trace. Promises: a trace that cannot be taken or written is a warning and counted, never the end of a run;
``end`` may be called when nothing runs; any thread may call. Beside each trace it writes what the devices' memory holds at its end, as
``HOST.memory.pprof``. Does not: decide when (``profiler``).
"""

from __future__ import annotations

import pathlib
import threading
import warnings
from collections.abc import Callable

from crl_jax.scopes import name_line

_REFUSED = (RuntimeError, OSError, ValueError)  # what JAX's profiler raises: one runs already, the folder, the options


class Capture:
    """Traces into ``folder``, where TensorBoard looks for them. ``start``, ``stop`` and ``save_memory`` are JAX's unless given.

    ``python``: every Python call too, which makes traces many times larger and what is traced slower.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        *,
        python: bool = False,
        start: Callable[[str], None] | None = None,
        stop: Callable[[], None] | None = None,
        save_memory: Callable[[pathlib.Path], None] | None = None,
    ) -> None:
        self.folder = folder
        self._start = start or (lambda where: _start_trace(where, python=python))
        self._stop, self._save_memory = stop or _stop_trace, save_memory or _save_memory
        self._turn = threading.Lock()
        self._before: set[pathlib.Path] = set()
        self.running = False
        self.taken = self.failed = 0
        self.newest: pathlib.Path | None = None  # the folder of the last trace that was written

    def begin(self) -> bool:
        """Whether a trace has begun. False when one runs already, or when it could not begin: that is a warning, and counted."""
        with self._turn:
            if self.running:
                return False
            self._before = self._traces()
            for thread in threading.enumerate():
                if thread is not threading.main_thread():  # by its name people find the process
                    name_line(thread)
            try:
                self._start(str(self.folder))
            except _REFUSED as error:
                self._fail("begin", error)
                return False
            self.running = True
            return True

    def end(self) -> bool:
        """Ends the trace and writes it; whether there was one and it could be written."""
        with self._turn:
            if not self.running:
                return False
            self.running = False
            try:
                self._stop()
                for trace in sorted(self._traces() - self._before):
                    self.newest = trace.parent
                    self._save_memory(trace.with_name(trace.name.replace(".xplane.pb", ".memory.pprof")))
            except _REFUSED as error:
                self._fail("be written", error)
                return False
            self.taken += 1
            return True

    def _traces(self) -> set[pathlib.Path]:
        return set(self.folder.glob("plugins/profile/*/*.xplane.pb"))

    def _fail(self, what: str, error: Exception) -> None:
        self.failed += 1
        text = f"a profiler trace could not {what} in {self.folder}: {error}; the run goes on without it"
        warnings.warn(text, RuntimeWarning, stacklevel=3)


def _start_trace(folder: str, *, python: bool) -> None:
    import jax

    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = int(python)
    jax.profiler.start_trace(folder, profiler_options=options)


def _stop_trace() -> None:
    import jax

    jax.profiler.stop_trace()


def _save_memory(path: pathlib.Path) -> None:
    import jax

    jax.profiler.save_device_memory_profile(str(path))
