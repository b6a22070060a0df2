"""A compiled program that several processes run as one.

Owns: the order compile, meet, run. Promises: no process begins such a program before all have compiled it. Those that began would wait
inside it, and what devices wait for each other there is short (30 s on CPUs), while one process may compile minutes longer than another.
Does not: find programs that differ between processes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Meet = Callable[[str], None]
"""``meet(what)`` returns when all processes of the job are there; ``what`` is for errors."""


class Together:
    """``program`` (from ``jax.jit``), always called with arrays of the same shapes and placement. ``meet`` None: there is one process."""

    def __init__(self, program: Any, meet: Meet | None, what: str) -> None:
        self.program, self._meet, self._what = program, meet, what
        self._compiled: Any = None

    def __call__(self, *args: Any) -> Any:
        """What the program returns."""
        if self._meet is None:
            return self.program(*args)
        if self._compiled is None:
            self._compiled = self.program.lower(*args).compile()
            self._meet(self._what)
        return self._compiled(*args)
