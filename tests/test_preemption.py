"""Being told to stop: at a safe point, at once where nothing is lost, and in any case in time."""

import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import pytest

from crl_jax.preemption import FileNotice, Preempted, Preemption, unless_stopped
from crl_jax.processes import FailureNotice, Processes

WAIT_S = 20.0


def told(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


def stopper(**options) -> Preemption:
    return Preemption(**{"grace_s": WAIT_S, "say": lambda text: None, **options})


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_signal_is_heard_at_the_next_safe_point_and_has_its_exit_code(number: signal.Signals, code: int) -> None:
    before = signal.getsignal(number)
    with stopper() as stop:
        stop.check()
        told(number)
        done = sum(range(1000))  # what is under way is ended
        assert (done, stop.asked) == (499500, True)
        with pytest.raises(Preempted, match=f"stopped by {number.name}") as stopped:
            stop.check()
    assert stopped.value.exit_code == code
    assert "checkpoint of step 3 is saved in runs/x: add --resume" in str(stopped.value.after(3, pathlib.Path("runs/x")))
    assert stopped.value.after(3, pathlib.Path("runs/x")).exit_code == code
    assert "holds no finished step" in str(stopped.value.after(0, pathlib.Path("runs/x")))
    assert signal.getsignal(number) is before


def test_work_that_may_be_abandoned_is_left_in_the_middle_of_a_wait() -> None:
    began = time.monotonic()
    with stopper() as stop:
        threading.Timer(0.05, told, [signal.SIGTERM]).start()
        with pytest.raises(Preempted), stop.abandonable():
            threading.Event().wait(WAIT_S)
    assert time.monotonic() - began < WAIT_S / 2


def test_once_told_nothing_that_may_be_abandoned_begins() -> None:
    with stopper() as stop:
        told(signal.SIGTERM)
        with pytest.raises(Preempted), stop.abandonable():
            pytest.fail("it began")
        sum(range(10))
        with pytest.raises(Preempted):
            stop.check()


def test_a_second_signal_ends_the_process_at_once() -> None:
    ended: list[int] = []
    with stopper(end=ended.append) as stop:
        told(signal.SIGINT)
        told(signal.SIGTERM)  # of the same event: who started the run passes a Ctrl-C on like this
        assert ended == []
        told(signal.SIGINT)
        assert ended == [130]
        assert stop.asked


def test_without_a_safe_point_the_process_ends_when_the_grace_is_over() -> None:
    ended, said = threading.Event(), list[str]()
    codes: list[int] = []

    def end(code: int) -> None:
        codes.append(code)
        ended.set()

    with stopper(grace_s=0.05, say=said.append, end=end):
        told(signal.SIGTERM)
        assert ended.wait(WAIT_S)
    assert codes == [75]
    assert "run.preempt_grace_s=0.05" in said[-1]


def test_a_process_that_another_ones_failure_leaves_without_a_safe_point_is_no_preemption() -> None:
    ended, codes = threading.Event(), list[int]()

    def end(code: int) -> None:
        codes.append(code)
        ended.set()

    with stopper(grace_s=0.05, end=end, notices=[lambda: FailureNotice("process 1 failed: out of memory")], every_s=0.01):
        assert ended.wait(WAIT_S)
    assert codes == [1]


def test_the_grace_period_ends_also_when_the_others_cannot_be_told() -> None:
    ended = threading.Event()
    with stopper(grace_s=0.05, end=lambda code: ended.set(), told=lambda reason: time.sleep(WAIT_S)):
        told(signal.SIGTERM)
        assert ended.wait(WAIT_S / 2)


class _ToldAfterItAnswered(Processes):
    """Two processes, neither of which was told to stop; then the signal comes."""

    def __init__(self) -> None:
        super().__init__(0, 1, None)

    def any(self, flag: bool, what: str) -> bool:
        assert not flag
        told(signal.SIGTERM)
        return False


def test_a_process_that_is_told_after_it_answered_goes_on_with_the_others_to_the_next_safe_point() -> None:
    with stopper() as stop:
        assert unless_stopped(stop, _ToldAfterItAnswered(), lambda: "a batch") == "a batch"
        assert stop.asked
        with pytest.raises(Preempted):
            unless_stopped(stop, Processes.alone(), lambda: pytest.fail("it began"))


def test_a_notice_of_the_machine_is_as_sigterm_and_one_of_an_earlier_time_is_none(tmp_path: pathlib.Path) -> None:
    notice = tmp_path / "notice"
    notice.write_text("from before the restart")
    os.utime(notice, ns=(1, 1))
    with stopper(notices=[FileNotice(notice)], every_s=0.01) as stop:
        time.sleep(0.1)
        stop.check()
        threading.Timer(0.05, notice.write_text, ["terminating"]).start()
        with pytest.raises(Preempted, match=r"the file .*notice") as stopped, stop.abandonable():
            threading.Event().wait(WAIT_S)
    assert stopped.value.exit_code == 75


def test_outside_the_main_thread_a_notice_is_heard_at_the_safe_point(tmp_path: pathlib.Path) -> None:
    found: list[BaseException] = []

    def work() -> None:
        with stopper(notices=[lambda: "maintenance"], every_s=0.01) as stop:
            end = time.monotonic() + WAIT_S
            try:
                while time.monotonic() < end:
                    stop.check()
                    time.sleep(0.01)
            except Preempted as error:
                found.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(WAIT_S)
    assert [str(error) for error in found] == ["stopped by maintenance; continue with --resume"]


HUNG = """
import sys, time
from crl_jax.watchdog import Watchdog
def a_step_that_hangs():
    time.sleep(60)
with Watchdog(0.5) as dog:
    dog.begin(0)
    time.sleep(1.0)  # the first step compiles
    for step in (1, 2):
        dog.begin(step)
        time.sleep(0.2)
    print("quick steps pass", flush=True)
    dog.begin(3)
    a_step_that_hangs()
"""


def test_T08_a_hung_step_ends_the_process_with_all_stacks() -> None:
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", HUNG], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stdout == "quick steps pass\n"
    assert "step 3 takes longer than run.step_timeout_s=0.5" in done.stderr
    assert "a_step_that_hangs" in done.stderr
    assert time.monotonic() - began < 50


def test_T08_without_a_limit_nothing_is_watched() -> None:
    program = "from crl_jax.watchdog import Watchdog\nimport time\nwith Watchdog(0) as dog:\n    [dog.begin(n) for n in range(3)]\n"
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0


def test_the_signal_that_follows_a_notice_is_the_same_event() -> None:
    """A machine, or another process of the job, gives notice; then whoever stops all processes sends this one its signal too."""
    ended: list[int] = []
    noticed = threading.Event()
    with stopper(
        notices=[lambda: "process 0 was told to stop: SIGTERM" if noticed.is_set() else ""], every_s=0.01, end=ended.append
    ) as stop:
        noticed.set()
        end = time.monotonic() + WAIT_S
        while not stop.asked and time.monotonic() < end:
            time.sleep(0.01)
        told(signal.SIGTERM)
        assert (stop.asked, ended) == (True, [])
        told(signal.SIGTERM)
        assert ended == [75]


class Told:
    """Two processes of a job, this one and one that was or was not told to stop."""

    def __init__(self, *, other: bool) -> None:
        self.other, self.asked = other, list[bool]()

    def any(self, flag: bool, what: str) -> bool:
        self.asked.append(flag)
        return flag or self.other

    def stop_notice(self) -> str:
        return "process 1 was told to stop: SIGTERM" if self.other else ""


def test_a_job_stops_together_at_the_safe_point_that_all_have_reached() -> None:
    with stopper() as stop:
        free = Told(other=False)
        assert unless_stopped(stop, free, lambda: "played") == "played"  # type: ignore[arg-type]
        assert free.asked == [False]
        with pytest.raises(Preempted, match=r"stopped by process 1 was told to stop: SIGTERM") as stopped:
            unless_stopped(stop, Told(other=True), lambda: "played")  # type: ignore[arg-type]
    assert stopped.value.exit_code == 75


def test_a_process_that_is_told_gives_up_its_work_and_says_so_to_the_others() -> None:
    job = Told(other=False)
    with stopper() as stop:
        threading.Timer(0.05, told, [signal.SIGTERM]).start()
        with pytest.raises(Preempted, match="stopped by SIGTERM"):
            unless_stopped(stop, job, lambda: threading.Event().wait(WAIT_S))  # type: ignore[arg-type]
    assert job.asked == [True]
