"""When a profiler trace is taken: in a window of steps that was asked for beforehand, or when a signal comes.

Owns: the window, and what SIGUSR1 does while a run trains. Promises: a trace that runs when the run ends is ended and written; a signal
while one runs, or is about to, is ignored with a word; the signal's handler only takes note, is there only inside the block and only in the
main thread. Does not: take the trace (``capture``) or name what is in it (``scopes``).
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from crl_jax.config.schema import TelemetryConfig
from crl_jax.scopes import step_scope
from crl_jax.telemetry.capture import Capture

SIGNAL = signal.SIGUSR1
_END_S = 60.0  # for a trace that another thread is writing when the run ends


def parse_window(text: str) -> tuple[int, int]:
    """``"3:5"`` -> (3, 5): the half-open range of steps to trace. Raises ValueError with an example."""
    first, colon, end = text.partition(":")
    if not colon or not first.isdigit() or not end.isdigit() or int(first) >= int(end):
        raise ValueError(f"profile window {text!r}: write FIRST:END with FIRST < END, e.g. 3:5 for steps 3 and 4")
    return int(first), int(end)


class ProfilerWindow:
    """``with`` it around a run, ``before(step)`` at the top of each step. ``window`` None: no steps were asked for beforehand.

    After a signal the next ``signal_steps`` steps are traced, or with ``signal_s`` above 0 the next so many seconds, beginning at once.
    With both 0 the signal is not handled. ``say`` tells a person what is going on.
    """

    def __init__(
        self,
        capture: Capture,
        window: tuple[int, int] | None = None,
        *,
        signal_steps: int = 0,
        signal_s: float = 0.0,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self._capture, self._window, self._say = capture, window, say or _tell
        self._signal_steps, self._signal_s = signal_steps, signal_s
        self._until: int | None = None  # the step before which the running trace ends
        self._asked = False  # by a signal, not begun
        self._ignored = 0
        self._over = threading.Event()
        self._timed: threading.Thread | None = None
        self._step: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        self._before: Any = None
        self._handling = False

    @staticmethod
    def of(folder: pathlib.Path, telemetry: TelemetryConfig, *, quiet: bool = False) -> ProfilerWindow:
        """As the configuration says, with traces in ``folder``; with ``quiet`` there are none, and no signal is handled."""
        capture = Capture(folder, python=telemetry.profile_python)
        if quiet:
            return ProfilerWindow(capture)
        steps, seconds = telemetry.profile_signal_steps, telemetry.profile_signal_s
        return ProfilerWindow(capture, telemetry.profile_steps, signal_steps=steps, signal_s=seconds)

    def __enter__(self) -> ProfilerWindow:
        wanted = self._signal_steps > 0 or self._signal_s > 0
        if wanted and threading.current_thread() is threading.main_thread():
            self._before = signal.signal(SIGNAL, self._on_signal)
            self._handling = True
        return self

    def __exit__(self, *_: object) -> None:
        if self._handling:
            self._handling = False
            signal.signal(SIGNAL, signal.SIG_DFL if self._before is None else self._before)
        self.close()

    def before(self, step: int) -> None:
        """Begins or ends a trace as ``step`` is about to begin. A resume into the middle of the window traces the rest of it."""
        self._step.__exit__(None, None, None)
        self._step = contextlib.nullcontext()
        if self._until is not None and step >= self._until:
            self._end()
        if self._until is None:
            if self._window is not None and self._window[0] <= step < self._window[1]:
                self._begin(self._window[1])
                if not self._capture.running:
                    self._window = None  # it cannot be taken: one warning is enough
            elif self._asked:
                self._begin(step + self._signal_steps)
                self._asked = False
        if self._capture.running:
            self._step = step_scope("train", step)
            self._step.__enter__()

    def close(self) -> None:
        """Ends the trace if one is running. Safe to call twice."""
        self._step.__exit__(None, None, None)
        self._step = contextlib.nullcontext()
        self._over.set()
        if self._timed is not None:
            self._timed.join(_END_S)
        if self._until is not None:
            self._end()
        if self._asked:
            self._asked = False
            self._say("the run ended before the step that was to be profiled")

    def counts(self) -> dict[str, int]:
        """Traces of this process: written, failed, and signals that were ignored."""
        return {"captures": self._capture.taken, "failed": self._capture.failed, "ignored": self._ignored}

    def _begin(self, until: int) -> None:
        if self._capture.begin():
            self._until = until

    def _end(self) -> None:
        self._until = None
        if self._capture.end():
            self._say(f"a profiler trace is in {self._capture.newest or self._capture.folder} (TensorBoard's Profile page shows it)")

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        if self._asked or self._capture.running or (self._timed is not None and self._timed.is_alive()):
            self._ignored += 1
            self._say(f"{SIGNAL.name} ignored: a profiler trace is being taken already")
        elif self._signal_s > 0:
            self._say(f"profiling {self._signal_s:g} s from now ({SIGNAL.name}), into {self._capture.folder}")
            self._timed = threading.Thread(target=self._for_seconds, name="crl-profile", daemon=True)
            self._timed.start()
        else:
            self._asked = True
            self._say(f"profiling the next {self._signal_steps} steps ({SIGNAL.name}), into {self._capture.folder}")

    def _for_seconds(self) -> None:
        if self._capture.begin():
            self._over.wait(self._signal_s)
            self._end()


def _tell(text: str) -> None:
    os.write(2, f"crl: {text}\n".encode())  # a handler may run in the middle of a write to ``sys.stderr``, which takes no other then
