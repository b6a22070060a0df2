"""Names in a profiler trace: what each thread does, and for which role.

Owns: how a name gets into a trace. Promises: while no trace is taken a name costs a few microseconds and changes nothing; a process that
has not imported JAX, which cannot be traced, does not import it for this. Does not: take traces (``telemetry.profiler``).

The names: ``rollout``, ``prefill/ROLE``, ``decode/ROLE``, ``actor_step``, ``extractor_step``, ``publish/ROLE``, ``embed``, ``search``,
``merge``, and ``phase/PHASE`` for what the learner's thread does or waits for. Inside the compiled programs ``prefill``, ``decode``,
``actor_step`` and ``extractor_step`` are scopes of ``jax.named_scope``, which only label operations.
"""

from __future__ import annotations

import contextlib
import pathlib
import sys
import threading
from typing import Any

_NOTHING = contextlib.nullcontext()


def scope(name: str, role: str = "") -> contextlib.AbstractContextManager[Any]:
    """``with scope("decode", "actor"):`` shows what this thread does inside as ``decode/actor``. Nothing inside may wait on an event loop:
    see ``long_scope``."""
    annotation = _annotation()
    return _NOTHING if annotation is None else annotation(f"{name}/{role}" if role else name)


def step_scope(name: str, step: int) -> contextlib.AbstractContextManager[Any]:
    """The same for a whole training step, by which the trace's tables are grouped."""
    annotation = _annotation("StepTraceAnnotation")
    return _NOTHING if annotation is None else annotation(name, step_num=step)


class long_scope:
    """The same for work that waits for others in between, as a coroutine does: in a trace it has a line of its own, where nothing else
    overlaps it. The line is a thread that does nothing but hold the name, and is there only while a trace is taken (the profiler may show
    it under the name of a thread that has ended).
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._over: threading.Event | None = None

    def __enter__(self) -> None:
        annotation = _annotation()
        if annotation is not None and annotation.is_enabled():
            self._over = threading.Event()
            threading.Thread(target=self._hold, args=(annotation, self._over), name=f"trace-{self._name}", daemon=True).start()

    def __exit__(self, *_: object) -> None:
        if self._over is not None:
            self._over.set()

    def _hold(self, annotation: Any, over: threading.Event) -> None:
        name_line(threading.current_thread())
        with annotation(self._name):
            over.wait()  # set when the work ends, however it ends: the deadline is that of the work


def name_line(thread: threading.Thread) -> None:
    """Tells the system the name of a thread, from where a trace takes the name of its line (Python does so itself from 3.14 on)."""
    with contextlib.suppress(OSError):  # it has just ended, or this system does not do it
        pathlib.Path(f"/proc/self/task/{thread.native_id}/comm").write_text(thread.name[:15], encoding="utf-8")


def _annotation(kind: str = "TraceAnnotation") -> Any:
    """JAX's class, or None where JAX is not loaded (or not yet, in another thread)."""
    return getattr(sys.modules.get("jax.profiler"), kind, None)
