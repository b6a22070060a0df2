"""A signal has the next steps, or seconds, traced; whatever goes wrong with that, the run goes on."""

import os
import pathlib
import signal
import threading
import time

import pytest

from crl_jax.telemetry.capture import Capture
from crl_jax.telemetry.profiler import SIGNAL, ProfilerWindow


class Toy:
    """A run that notes what became of its traces."""

    def __init__(self, window: tuple[int, int] | None = None, *, broken: str = "", **options: float) -> None:
        self.step, self.calls, self.said, self.broken = 0, list[str](), list[str](), broken
        self.capture = Capture(pathlib.Path("x"), start=lambda _: self.note("start"), stop=lambda: self.note("stop"))
        self.profiler = ProfilerWindow(self.capture, window, say=self.said.append, **({"signal_steps": 2} | options))

    def note(self, what: str) -> None:
        self.calls.append(f"{what} {self.step}")
        if what == self.broken:
            raise RuntimeError("no room")

    def run(self, *signals: int, steps: int = 8) -> "Toy":
        """``signals``: the steps in the middle of which one comes."""
        with self.profiler:
            for self.step in range(steps):
                self.profiler.before(self.step)
                for _ in range(signals.count(self.step)):
                    os.kill(os.getpid(), SIGNAL)
        return self


def test_the_steps_after_a_signal_are_traced() -> None:
    toy = Toy().run(1)
    assert toy.calls == ["start 2", "stop 4"]
    assert "next 2 steps" in toy.said[0]
    assert toy.profiler.counts() == {"captures": 1, "failed": 0, "ignored": 0}
    assert Toy().run(1, 5).calls == ["start 2", "stop 4", "start 6", "stop 7"], "the end of the run ends the second"


def test_signals_during_a_trace_or_before_one_that_is_asked_for_are_ignored_with_a_word() -> None:
    toy = Toy().run(1, 1, 2)
    assert toy.calls == ["start 2", "stop 4"]
    assert [text for text in toy.said if "ignored" in text] == ["SIGUSR1 ignored: a profiler trace is being taken already"] * 2
    assert toy.profiler.counts()["ignored"] == 2
    assert Toy((3, 6)).run(4).calls == ["start 3", "stop 6"], "in a window that was asked for beforehand too"


def test_a_window_that_opens_during_a_trace_gets_what_is_left_of_it() -> None:
    assert Toy((3, 6)).run(1).calls == ["start 2", "stop 4", "start 4", "stop 6"]


def test_a_signal_in_the_last_step_is_answered() -> None:
    toy = Toy().run(7)
    assert toy.calls == []
    assert "ended before" in toy.said[-1]


@pytest.mark.parametrize(("broken", "calls"), [("start", ["start 2", "start 6"]), ("stop", ["start 2", "stop 4", "start 6", "stop 7"])])
def test_a_trace_that_fails_is_a_warning_and_counted(broken: str, calls: list[str]) -> None:
    toy = Toy(broken=broken)
    with pytest.warns(RuntimeWarning, match="no room; the run goes on without it"):
        toy.run(1, 5)
    assert toy.calls == calls
    assert toy.profiler.counts() == {"captures": 0, "failed": 2, "ignored": 0}


def test_a_window_that_cannot_be_traced_is_tried_once() -> None:
    toy = Toy((2, 6), broken="start")
    with pytest.warns(RuntimeWarning, match="could not begin"):
        toy.run()
    assert toy.calls == ["start 2"]


def test_seconds_begin_at_once_and_end_by_themselves_or_with_the_run() -> None:
    toy = Toy(signal_s=0.05)
    with toy.profiler:
        os.kill(os.getpid(), SIGNAL)
        end = time.monotonic() + 10
        while len(toy.calls) < 2 and time.monotonic() < end:
            time.sleep(0.01)
        assert toy.calls == ["start 0", "stop 0"]
    toy = Toy(signal_s=1000.0).run(1)
    assert [call.split()[0] for call in toy.calls] == ["start", "stop"], "the run did not wait for it"
    assert toy.profiler.counts()["captures"] == 1


def test_the_handler_is_there_only_inside_and_only_in_the_main_thread() -> None:
    before = signal.getsignal(SIGNAL)
    with Toy().profiler:
        assert signal.getsignal(SIGNAL) != before
    assert signal.getsignal(SIGNAL) == before
    with Toy(signal_steps=0).profiler:
        assert signal.getsignal(SIGNAL) == before, "switched off"
    seen: list[bool] = []

    def elsewhere() -> None:
        with Toy().profiler:
            seen.append(signal.getsignal(SIGNAL) == before)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join(10)
    assert seen == [True]


def test_the_handler_is_gone_after_an_error() -> None:
    before = signal.getsignal(SIGNAL)
    toy = Toy((0, 9))

    def fail() -> None:
        with toy.profiler:
            toy.profiler.before(0)
            raise ValueError("x")

    with pytest.raises(ValueError, match="x"):
        fail()
    assert toy.calls == ["start 0", "stop 0"]
    assert signal.getsignal(SIGNAL) == before
