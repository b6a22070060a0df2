"""A limit on the time of one step.

Owns: the alarm. Promises: a step that takes longer than the limit ends the process within a second, with exit code 1 and the stacks of all
threads, also when it hangs in code that never returns to Python; the first step of a process, which compiles, has no limit. Does not:
limit single waits (those have deadlines of their own), or save.
"""

from __future__ import annotations

import faulthandler
import sys
import threading
from typing import TextIO

_AFTER_S = 0.2  # the words first, then the stacks


class Watchdog:
    """``begin`` each step, in a ``with`` block. One at a time in a process. ``timeout_s`` 0 switches it off; stacks go to ``out``, which
    must be a real file."""

    def __init__(self, timeout_s: float, *, out: TextIO | None = None) -> None:
        self._timeout_s = timeout_s
        self._out = out or sys.__stderr__ or sys.stderr
        self._begun = 0
        self._words: threading.Timer | None = None

    def __enter__(self) -> Watchdog:
        return self

    def __exit__(self, *_: object) -> None:
        self.rest()

    def begin(self, step: int) -> None:
        """``step`` begins; the one before has ended."""
        self.rest()
        self._begun += 1
        if self._timeout_s <= 0 or self._begun == 1:
            return
        self._words = threading.Timer(self._timeout_s, self._speak, [step])
        self._words.daemon = True
        self._words.start()
        faulthandler.dump_traceback_later(self._timeout_s + _AFTER_S, exit=True, file=self._out)

    def rest(self) -> None:
        """No limit until the next step."""
        if self._words is not None:
            self._words.cancel()
            self._words = None
            faulthandler.cancel_dump_traceback_later()

    def _speak(self, step: int) -> None:
        limit = f"step {step} takes longer than run.step_timeout_s={self._timeout_s:g}"
        self._out.write(f"crl: {limit}: the run ends. The stacks of all threads follow; what was saved goes on with --resume\n")
        self._out.flush()
