"""Being told to stop: signals, and notices that a machine is about to go.

Owns: what SIGTERM, SIGINT and a notice do while a run trains. Promises: the first of them ends the run at its next safe point (``check``,
or at once inside ``abandonable``), a second one ends the process at once; when no safe point is reached within the grace period the process
ends anyway; exit code 75 (EX_TEMPFAIL: try again) for SIGTERM and notices, 130 for SIGINT, 1 for a process that could not leave in order
after another of its job failed; handlers are there only inside the block. Does not: save anything. Outside the main thread signals cannot
be handled; notices work there too, at ``check``.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, TypeVar

from crl_jax.config.schema import RunConfig
from crl_jax.errors import UserError
from crl_jax.processes import FailureNotice, Processes

T = TypeVar("T")
Notice = Callable[[], str]
"""Asked about once a second, in a thread: empty, or why the run has to end."""

CODES = {signal.SIGTERM: 75, signal.SIGINT: 130}
_PEER_FAILED = 1  # when another process failed and this one came to no safe point: no preemption, which launchers would not count
_ONE_EVENT_S = 2.0  # a terminal's SIGINT and the SIGTERM of who started the run come together


class Preempted(UserError):
    """The run was told to stop. ``exit_code`` is what the process ends with."""

    def __init__(self, number: signal.Signals, reason: str, told: str = "") -> None:
        super().__init__(told or f"stopped by {reason}; continue with --resume")
        self.number, self.reason, self.exit_code = number, reason, CODES[number]

    def after(self, step: int, folder: pathlib.Path) -> Preempted:
        """The same, with what became of the run in ``folder``: it goes on after ``step`` finished steps."""
        kept = f"its checkpoint of step {step} is saved in {folder}" if step else f"{folder} holds no finished step"
        return Preempted(self.number, self.reason, f"stopped by {self.reason}; {kept}: add --resume to the same command to go on")


class FileNotice:
    """A `Notice`: a file that appears, or is written anew, after this was made. One that is there already is of an earlier time."""

    def __init__(self, path: pathlib.Path) -> None:
        self._path = path
        self._before = self._stamp()

    def __call__(self) -> str:
        stamp = self._stamp()
        return f"a notice (the file {self._path})" if stamp is not None and stamp != self._before else ""

    def _stamp(self) -> int | None:
        try:
            return self._path.stat().st_mtime_ns
        except OSError:
            return None


class Preemption:
    """``with Preemption(...) as stop:`` around a run; everything but the notices and the grace period happens in its thread.

    ``told`` is called with the reason, in a thread, when the run is told to stop; ``say`` tells a person what is going on, ``end`` ends the
    process without ceremony.
    """

    def __init__(
        self,
        *,
        grace_s: float,
        notices: Sequence[Notice] = (),
        every_s: float = 1.0,
        told: Callable[[str], None] | None = None,
        say: Callable[[str], None] | None = None,
        end: Callable[[int], Any] = os._exit,
    ) -> None:
        self._grace_s, self._notices, self._every_s = grace_s, notices, every_s
        self._say, self._end, self._pass_on = say or _tell, end, told
        self._told: tuple[signal.Signals, str] | None = None
        self._noticed = ""
        self._one_more = False  # a signal that may come for what a notice has said already
        self._since = 0.0  # when it was told
        self._may_leave = False
        self.saved = False  # set by who saves
        self._over = threading.Event()
        self._before: dict[signal.Signals, Any] = {}

    @staticmethod
    def of(run: RunConfig, processes: Processes | None = None) -> Preemption:
        """As the configuration says. A process of a job that is told to stop tells the others."""
        notices: list[Notice] = [FileNotice(pathlib.Path(run.preempt_file).expanduser())] if run.preempt_file else []
        if processes is None or processes.count == 1:
            return Preemption(grace_s=run.preempt_grace_s, notices=notices)
        return Preemption(grace_s=run.preempt_grace_s, notices=[*notices, processes.stop_notice], told=processes.ask_to_stop)

    def __enter__(self) -> Preemption:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._on_signal) for number in CODES}
        if self._notices:
            threading.Thread(target=self._watch, name="crl-notices", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    @property
    def asked(self) -> bool:
        """Whether the run has been told to stop."""
        return self._told is not None

    @property
    def left_s(self) -> float:
        """What is left of the grace period: all of it before the run was told to stop."""
        return self._grace_s if self._told is None else max(0.0, self._grace_s - (time.monotonic() - self._since))

    def check(self) -> None:
        """A safe point. Raises Preempted when the run has been told to stop."""
        if self._told is not None:
            raise Preempted(*self._told)

    def agree(self, processes: Processes) -> None:
        """`check` of a whole job: raises Preempted in all of its processes when any was told to stop."""
        if not processes.any(self.asked, "whether to stop"):
            return  # told since it answered: with the others, at the next safe point
        if self._told is None:
            self._stop(signal.SIGTERM, processes.stop_notice() or "another process of the job")
        self.check()

    def abandonable(self) -> _Abandonable:
        """``with stop.abandonable():`` around work that may be given up at any moment; Preempted is raised in the middle of it."""
        return _Abandonable(self)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        del frame
        found = signal.Signals(number)
        if self._told is not None and self._one_more:  # a machine gives notice and then the signal; all processes of a job get theirs
            self._one_more = False
            return
        if self._told is not None:
            twice = found is self._told[0] or time.monotonic() - self._since > _ONE_EVENT_S
            if twice:
                self._end(CODES[found])
            return
        self._stop(found, self._noticed or found.name)
        if self._may_leave:
            self._may_leave = False
            self.check()

    def _stop(self, number: signal.Signals, reason: str) -> None:
        self._told, self._since = (number, reason), time.monotonic()
        self._say(f"stopping ({reason}): the run saves at its next safe point, at most {self._grace_s:g} s from now; again: at once")
        threading.Thread(target=self._count_down, name="crl-grace", daemon=True).start()
        if self._pass_on is not None:  # in a thread of its own: whatever becomes of it, the grace period ends
            threading.Thread(target=self._pass_on, args=(reason,), name="crl-told", daemon=True).start()

    def _count_down(self) -> None:
        if not self._over.wait(self._grace_s):
            what = "saved, but not closed" if self.saved else "no safe point, so ended without saving"
            self._say(f"{what} within run.preempt_grace_s={self._grace_s:g}; complete checkpoints are whole: add --resume to go on")
            assert self._told is not None
            self._end(_PEER_FAILED if isinstance(self._told[1], FailureNotice) else CODES[self._told[0]])

    def _watch(self) -> None:
        while not self._over.wait(self._every_s):
            self._noticed = next(filter(None, (notice() for notice in self._notices)), "")
            if self._told is not None or not self._noticed:
                continue
            self._one_more = True
            if self._before:  # as if it were the signal, so that it interrupts a wait of the main thread
                os.kill(os.getpid(), signal.SIGTERM)
            else:
                self._stop(signal.SIGTERM, self._noticed)
            return


def unless_stopped(stop: Preemption, processes: Processes, work: Callable[[], T]) -> T:
    """``work()``, given up when this process or another of its job is told to stop: Preempted is then raised in all of them."""
    done: list[T] = []
    with contextlib.suppress(Preempted), stop.abandonable():
        done.append(work())
    stop.agree(processes)
    return done[0]


class _Abandonable:
    def __init__(self, stop: Preemption) -> None:
        self._stop = stop

    def __enter__(self) -> None:
        self._stop._may_leave = True
        try:
            self._stop.check()
        except Preempted:
            self._stop._may_leave = False
            raise

    def __exit__(self, *_: object) -> None:
        self._stop._may_leave = False


def _tell(text: str) -> None:
    os.write(2, f"crl: {text}\n".encode())  # a handler may run in the middle of a write to ``sys.stderr``, which takes no other then
