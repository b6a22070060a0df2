"""Small decisions of several processes: threads over one store that behaves like that of JAX's distributed service."""

import concurrent.futures
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from crl_jax import processes
from crl_jax.errors import UserError
from crl_jax.processes import PeerFailed, Processes, Topology

WAIT_S = 20.0


class Shared:
    """The store: a key is set once, a get waits, both fail like the service does."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.changed = threading.Condition()
        self.most = 0
        self.lost = ""  # the error of every call, once the service is gone

    def key_value_set(self, key: str, value: str, /) -> None:
        with self.changed:
            self._check()
            if key in self.values:
                raise RuntimeError(f"ALREADY_EXISTS: {key}")
            self.values[key] = value
            self.most = max(self.most, len(self.values))
            self.changed.notify_all()

    def blocking_key_value_get(self, key: str, timeout_in_ms: int, /) -> str:
        with self.changed:
            self._check()
            if not self.changed.wait_for(lambda: key in self.values, timeout_in_ms / 1000):
                raise RuntimeError(f"DEADLINE_EXCEEDED: {key}")
            return self.values[key]

    def key_value_delete(self, key: str, /) -> None:
        with self.changed:
            del self.values[key]

    def key_value_dir_get(self, key: str, /) -> list[tuple[str, str]]:
        with self.changed:
            self._check()
            return sorted((name, value) for name, value in self.values.items() if name.startswith(f"{key}/"))

    def _check(self) -> None:
        if self.lost:
            raise RuntimeError(self.lost)


def together(*works: Callable[[Processes], Any], store: Shared | None = None, deadline_s: float = WAIT_S) -> list[Any]:
    """What each process's work returns, or the exception that ended it."""
    shared = store or Shared()

    def run(index: int, work: Callable[[Processes], Any]) -> Any:
        with Processes(index, len(works), shared, deadline_s=deadline_s) as one:
            return work(one)

    with concurrent.futures.ThreadPoolExecutor(len(works)) as pool:
        running = [pool.submit(run, index, work) for index, work in enumerate(works)]
        return [future.exception(WAIT_S * 2) or future.result() for future in running]


def test_every_process_gets_the_same_answers_in_order() -> None:
    def work(one: Processes) -> list[Any]:
        time.sleep(0.02 * (2 - one.index))
        return [one.gather({"me": one.index}, "who"), one.any(one.index == 1, "flag"), one.any(False, "flag"), one.meet("here")]

    assert together(work, work, work) == [[[{"me": 0}, {"me": 1}, {"me": 2}], True, False, None]] * 3


def test_one_process_answers_itself_without_a_store() -> None:
    with Processes.alone() as one:
        assert (one.first, one.gather(3, "x"), one.any(True, "x"), one.of_first(lambda: "made", "x")) == (True, [3], True, "made")
        assert (one.bytes_of_first(b"data", "x"), list(one.share(3)), one.stop_notice(), one.wait_s) == (b"data", [0, 1, 2], "", 0.0)
        one.meet("x")
        one.fail(ValueError("x"))
        one.ask_to_stop("x")


def test_only_the_first_process_makes_what_all_get() -> None:
    made: list[int] = []

    def work(one: Processes) -> Any:
        return one.of_first(lambda: made.append(one.index) or {"step": 7}, "the step")

    assert together(work, work, work) == [{"step": 7}] * 3
    assert made == [0]


def test_bytes_travel_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "PIECE", 50)
    data, store = bytes(range(256)), Shared()
    found = together(*(lambda one: one.bytes_of_first(data if one.first else b"", "evidence") for _ in range(2)), store=store)
    assert found == [data, data]
    assert together(*(lambda one: one.bytes_of_first(b"", "nothing") for _ in range(2))) == [b"", b""]


@pytest.mark.parametrize(("items", "count"), [(8, 2), (7, 3), (2, 4), (0, 2)])
def test_items_are_shared_out_in_order_as_evenly_as_can_be(items: int, count: int) -> None:
    shares = [Processes(index, count, None).share(items) for index in range(count)]
    assert [i for share in shares for i in share] == list(range(items))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_another_thread_asks_on_a_channel_of_its_own_and_twice_on_the_same() -> None:
    def ask(one: Processes) -> list[Any]:
        one.meet("the trainer's question")
        return [one.channel("beside").gather(one.index, "first"), one.channel("beside").gather(one.index + 10, "second")]

    assert together(ask, ask) == [[[0, 1], [10, 11]]] * 2


def test_different_questions_name_both() -> None:
    first, second = together(lambda one: one.meet("step 3"), lambda one: one.meet("step 4"))
    assert isinstance(first, PeerFailed)
    assert isinstance(second, PeerFailed)
    assert "process 1 is at 'step 4', this one at 'step 3'" in str(first)
    assert "process 0 is at 'step 3', this one at 'step 4'" in str(second)


class Frozen(Shared):
    """A store whose waits pass at once, on a clock of its own."""

    now = 0.0

    def blocking_key_value_get(self, key: str, timeout_in_ms: int, /) -> str:
        if key not in self.values:
            self.now += timeout_in_ms / 1000
        return super().blocking_key_value_get(key, 0)


def test_a_process_that_never_comes_is_a_timeout_that_names_it() -> None:
    store = Frozen()
    one = Processes(0, 2, store, deadline_s=30.0, clock=lambda: store.now)
    with pytest.raises(TimeoutError, match="process 1 did not come to the end of step 3 within 30 s"):
        one.meet("the end of step 3")
    assert store.now == pytest.approx(30.0, abs=1.1)
    with pytest.raises(TimeoutError, match="within 2 s"):
        one.meet("something short", deadline_s=2.0)


def test_A08_those_who_wait_hear_within_seconds_what_failed_first() -> None:
    """Process 2 fails; 0 and 1 wait for it. Whoever hears of it late hears the first words, not that another process heard them."""
    ended: dict[int, float] = {}

    def waits(one: Processes) -> None:
        try:
            one.meet("the end")
        finally:
            ended[one.index] = time.monotonic()

    def fails(one: Processes) -> None:
        time.sleep(0.1)
        ended[one.index] = time.monotonic()
        raise ValueError("the disk is on fire")

    found = together(waits, waits, fails)
    assert [str(error) for error in found] == ["process 2 failed: ValueError: the disk is on fire"] * 2 + ["the disk is on fire"]
    assert max(ended.values()) - ended[2] < 2 * processes.POLL_S


def test_A08_an_error_of_what_only_the_first_does_ends_the_others_even_when_it_is_kept_there() -> None:
    def work(one: Processes) -> str:
        def broken() -> None:
            raise OSError("no space left")

        try:
            one.of_first(broken, "the folder")
        except OSError as error:
            time.sleep(3)  # stops its parts first
            return str(error)
        return "not reached"

    first, second = together(work, work)
    assert first == "no space left"
    assert isinstance(second, PeerFailed)
    assert str(second) == "process 0 failed: OSError: no space left"


def test_what_is_told_to_one_is_seen_by_the_others_and_only_by_them() -> None:
    store = Shared()
    three = [Processes(index, 3, store) for index in range(3)]
    assert [one.stop_notice() for one in three] == ["", "", ""]
    three[1].ask_to_stop("SIGTERM")
    three[1].ask_to_stop("SIGTERM")  # said before
    three[0].ask_to_stop(three[0].stop_notice())
    assert [one.stop_notice() for one in three][::2] == ["process 1 was told to stop: SIGTERM"] * 2
    three[2].fail(ValueError("x" * 1000))
    notice = three[0].stop_notice()
    assert notice.startswith("process 2 failed: ValueError: xxx")
    assert len(notice) < 600


def test_when_the_service_is_gone_nobody_waits_and_the_first_error_stays() -> None:
    store = Shared()
    one = Processes(0, 2, store)
    store.lost = "UNAVAILABLE: connection refused"
    assert one.stop_notice() == ""
    with pytest.raises(RuntimeError, match="what it was"), one:
        raise RuntimeError("what it was")
    store.lost = ""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        asking = pool.submit(one.meet, "step 2")
        time.sleep(0.05)
        store.lost = "UNAVAILABLE: connection refused"
        error = asking.exception(WAIT_S)
    assert isinstance(error, PeerFailed)
    assert "lost each other at step 2: UNAVAILABLE" in str(error)


def test_questions_of_the_past_leave_the_store() -> None:
    store = Shared()
    together(*(lambda one: [one.meet(f"step {n}") for n in range(50)] for _ in range(3)), store=store)
    assert len(store.values) == 2 * 3
    assert store.most <= 4 * 3


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"processes": 0}, "--processes 0: a job has 1 or more"),
        ({"coordinator": "h:1", "processes": 2, "process_id": 2}, "--process-id 2 of --processes 2: ids are 0 to 1"),
        ({"process_id": -1}, "--process-id -1 of --processes 1: ids are 0 to 0"),
        ({"processes": 2}, "needs --coordinator HOST:PORT"),
        ({"coordinator": "host", "processes": 2}, "--coordinator host: give HOST:PORT"),
        ({"coordinator": ":8476", "processes": 2}, "--coordinator :8476: give HOST:PORT"),
        ({"coordinator": "h:port", "processes": 2}, "--coordinator h:port: give HOST:PORT"),
        ({"coordinator": "h:99999", "processes": 2}, "--coordinator h:99999: give HOST:PORT"),
    ],
)
def test_a_topology_that_cannot_be_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as refused:
        Topology(**given)
    assert refused.value.exit_code == 2  # so that a launcher does not start it again
    assert Topology("h:1", 1, 2).process_id == 1


def test_a_port_in_use_is_said_to_be_that(monkeypatch: pytest.MonkeyPatch) -> None:
    def initialize(*_: Any, **__: Any) -> None:
        raise RuntimeError("UNKNOWN: Failed to start RPC server")

    monkeypatch.setattr("jax.distributed.initialize", initialize)
    with pytest.raises(UserError, match="process 0 cannot listen on port 8476"):
        processes.join(Topology("h:8476", 0, 2))
