"""Saving beside training: the step waits for a copy to the host, a thread does the rest.

Owns: the thread, the copies, and their error. Promises: when ``save`` returns the caller may donate or change what it gave; at most one
checkpoint is being written, and a new one waits for it, within a deadline and counted; an error of the thread is raised by the next
``check``, ``save`` or ``wait``; it never keeps a process from ending (what it had not finished has no manifest and does not count). Does
not: decide when to save. Several processes write together, each from a thread of its own.
"""

from __future__ import annotations

import concurrent.futures
import functools
import pathlib
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from crl_jax.checkpoint import retention, store
from crl_jax.checkpoint.arrays import Held, hold, on_host
from crl_jax.checkpoint.retention import Keep
from crl_jax.processes import Processes

Write = Callable[[pathlib.Path, int, Mapping[str, Held], Mapping[str, Any]], Any]


class Saver:
    """Mutable, for one thread. ``wait_s`` is the longest wait for the checkpoint before; ``write`` puts one on disk."""

    def __init__(
        self,
        root: pathlib.Path,
        keep: Keep,
        *,
        processes: Processes | None = None,
        wait_s: float = 600.0,
        write: Write = store.save,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.root, self._processes = root, processes or Processes.alone()
        self._beside = self._processes.channel("checkpoint")
        self._keep, self._wait_s, self._write, self._clock = keep, wait_s, write, clock
        self._running: concurrent.futures.Future[None] | None = None
        self._step = 0
        self._stuck = False
        self.saves = self.waits = 0
        self.wait_s = self.copy_s = self.write_s = 0.0

    def save(self, step: int, arrays: Mapping[str, Any], records: Mapping[str, Any], *, first: Callable[[], object] | None = None) -> None:
        """Copies ``arrays`` and begins to write them with ``records`` as the checkpoint of ``step``; then what is not to be kept goes.
        ``first`` is called beside training too, before anything is written: it returns when what else the checkpoint needs is on disk.

        Raises what the checkpoint before raised, TimeoutError if that is not done in time, CheckpointError if ``step`` exists.
        """
        if self._running is not None and not self._running.done():
            self.waits += 1
        self.wait()
        self._processes.of_first(lambda: store.require_new(self.root, step), f"the checkpoint of step {step}")
        began = self._clock()
        held = {name: hold(tree) for name, tree in arrays.items()}
        if self._processes.count == 1:
            held = {name: on_host(tree) for name, tree in held.items()}
            write: Callable[[], Any] = functools.partial(self._write, self.root, step, held, dict(records))
        else:
            finish = store.begin_together(self.root, step, held, records, self._processes)
            write = functools.partial(finish, self._beside)
        self.copy_s += self._clock() - began
        self.saves += 1
        self._step, self._running = step, concurrent.futures.Future()
        threading.Thread(target=self._run, args=(self._running, write, first), name="crl-checkpoint", daemon=True).start()

    def check(self) -> None:
        """Raises the error of a checkpoint that could not be written."""
        if self._running is not None and self._running.done():
            done, self._running, self._stuck = self._running, None, False
            done.result()

    def wait(self, deadline_s: float | None = None) -> None:
        """Returns when nothing is being written. Raises the error of what was, and TimeoutError."""
        if self._running is None:
            return
        began, limit = self._clock(), self._wait_s if deadline_s is None else deadline_s
        concurrent.futures.wait([self._running], limit)
        self.wait_s += self._clock() - began
        if not self._running.done():
            self._stuck = True
            late = f"the checkpoint of step {self._step} was not written to {self.root} within {limit:g} s"
            raise TimeoutError(f"{late}: is that disk stuck? Save less often (run.save_every), or on a faster disk (run.dir)")
        self.check()

    def end(self, deadline_s: float) -> None:
        """`wait` at the end of a run: what has missed a deadline before had its time and is not waited for again."""
        self.wait(0.0 if self._stuck else deadline_s)

    def stats(self) -> dict[str, float]:
        """Sums since the start: checkpoints begun, those that had to wait, and seconds of waiting, of copying and of writing."""
        return {
            "saves": self.saves,
            "waits": self.waits,
            "wait_s": self.wait_s,
            "copy_s": self.copy_s,
            "write_s": self.write_s,
        }

    def _run(self, done: concurrent.futures.Future[None], write: Callable[[], Any], first: Callable[[], object] | None) -> None:
        began = self._clock()
        try:
            if first is not None:
                first()
            write()
            if self._processes.first:
                retention.prune(self.root, self._keep)
        except BaseException as error:  # handed to the thread that trains, which raises it; other processes wait for this one's part
            self._beside.fail(error)
            done.set_exception(error)
        else:
            done.set_result(None)
        finally:
            self.write_s += self._clock() - began
