"""The phase clock adds up; the profiler window opens and closes once."""

import pathlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crl_jax.telemetry.capture import Capture
from crl_jax.telemetry.profiler import ProfilerWindow, parse_window
from crl_jax.telemetry.spans import Spans


class Clock:
    """A clock that only moves when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_nested_phases_are_exclusive_and_add_up() -> None:
    clock = Clock()
    spans = Spans(clock)
    clock.now += 1
    with spans("learn"):
        clock.now += 2
        with spans("publish"):
            clock.now += 4
        clock.now += 8
    clock.now += 16
    assert spans.take() == {"learn": 10.0, "publish": 4.0, "other": 17.0}
    assert spans.take() == {"other": 0.0}


def test_a_beginning_that_no_block_can_hold_gets_its_name_afterwards() -> None:
    clock = Clock()
    spans = Spans(clock)
    clock.now += 3
    spans.so_far("start")
    clock.now += 1
    assert spans.take() == {"start": 3.0, "other": 1.0}


def test_an_exception_closes_its_phase() -> None:
    clock = Clock()
    spans = Spans(clock)

    def fail() -> None:
        with spans("rollout"):
            clock.now += 1
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    clock.now += 2
    assert spans.take() == {"rollout": 1.0, "other": 2.0}


@settings(max_examples=50, deadline=None)
@given(st.recursive(st.integers(0, 9), lambda inner: st.lists(st.tuples(st.sampled_from("abc"), inner), max_size=3), max_leaves=8))
def test_any_nesting_adds_up_to_wall_time(tree: object) -> None:
    clock = Clock()
    spans = Spans(clock)

    def walk(node: object) -> None:
        if isinstance(node, int):
            clock.now += node
        elif isinstance(node, list):
            for name, inner in node:
                with spans(name):
                    clock.now += 1
                    walk(inner)

    walk(tree)
    assert sum(spans.take().values()) == clock.now - 100.0


def test_the_remainder_has_a_reserved_name() -> None:
    with pytest.raises(ValueError, match="remainder"), Spans(Clock())("other"):
        pass


def traced(window: tuple[int, int] | None, steps: range) -> list[str]:
    calls: list[str] = []
    current = 0
    capture = Capture(pathlib.Path("x"), start=lambda _: calls.append(f"start {current}"), stop=lambda: calls.append(f"stop {current}"))
    with ProfilerWindow(capture, window, say=lambda _: None) as profiler:
        for step in steps:
            current = step
            profiler.before(step)
    return calls


def test_the_window_is_half_open_and_closes_at_the_end_of_the_run() -> None:
    assert traced((3, 5), range(8)) == ["start 3", "stop 5"]
    assert traced((3, 50), range(8)) == ["start 3", "stop 7"]
    assert traced((3, 5), range(4, 8)) == ["start 4", "stop 5"], "resumed inside the window"
    assert traced(None, range(8)) == []


@pytest.mark.parametrize("bad", ["", "3", "3:3", "5:3", "a:b", "-1:3", "3:"])
def test_bad_windows_are_refused(bad: str) -> None:
    with pytest.raises(ValueError, match="FIRST:END"):
        parse_window(bad)
    assert parse_window("3:5") == (3, 5)
