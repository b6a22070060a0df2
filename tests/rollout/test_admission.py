"""Which batches are under way: bounded, in order, and nothing that was started is thrown away."""

import concurrent.futures

import pytest

from crl_jax.rollout.admission import Admission


class Batches:
    """Starts batches that end when the test says so; ``started`` are (step, learner's step when it was started)."""

    def __init__(self, *, first: int = 0, end: int = 1000, ahead: int = 1) -> None:
        self.started: list[tuple[int, int]] = []
        self.futures: dict[int, concurrent.futures.Future[str]] = {}
        self.learner = first
        self.admission = Admission[str](self.start, lambda future, step: future.result(0), first=first, end=end, ahead=ahead)

    def start(self, step: int) -> concurrent.futures.Future[str]:
        self.started.append((step, self.learner))
        self.futures[step] = concurrent.futures.Future()
        self.futures[step].set_result(f"batch {step}")
        return self.futures[step]

    def take(self) -> str:
        taken = self.admission.take(self.learner)
        self.learner += 1
        return taken


@pytest.mark.parametrize("ahead", [0, 1, 4])
def test_A02_a_resumed_run_starts_no_more_than_the_limit(ahead: int) -> None:
    """Version 100, nothing under way: (K + 1) batches, as in a run from the start; not the 100 that its counters have not seen."""
    batches = Batches(first=100, ahead=ahead)
    assert batches.take() == "batch 100"
    assert batches.started == [(100 + k, 100) for k in range(ahead + 1)]
    assert batches.admission.under_way == ahead
    for _ in range(20):
        batches.take()
    assert max(step - version for step, version in batches.started) == ahead, "versions between its start and its update"
    assert batches.admission.under_way == ahead


def test_A06_what_is_ready_early_is_kept_and_taken_in_order() -> None:
    """Ready at once are 4 batches where one is needed: 3 stay, and each is taken once, in its turn."""
    batches = Batches(ahead=3, end=8)
    assert batches.take() == "batch 0"
    assert batches.admission.under_way == 3
    assert [batches.take() for _ in range(7)] == [f"batch {n}" for n in range(1, 8)]
    assert (batches.admission.under_way, [step for step, _ in batches.started]) == (0, list(range(8))), "none twice, none after the end"


def test_a_slow_batch_is_waited_for_and_not_passed_over() -> None:
    batches = Batches(ahead=2)
    batches.take()
    batches.futures[1] = slow = concurrent.futures.Future()
    batches.admission._running[1] = slow
    with pytest.raises(TimeoutError):
        batches.take()
    assert batches.admission.under_way == 3, "the later ones wait their turn; the wait itself has the run's deadline and ends it"
    slow.set_result("batch 1, late")
    assert batches.admission.take(1) == "batch 1, late", "a wait that was given up loses nothing"


def test_what_is_given_up_is_cancelled() -> None:
    batches = Batches(ahead=2)
    batches.take()
    running = [concurrent.futures.Future() for _ in range(2)]
    batches.admission._running = dict(enumerate(running, start=1))
    batches.admission.give_up()
    assert all(future.cancelled() for future in running)
    assert batches.admission.under_way == 0


def test_a_batch_is_under_way_until_it_is_handed_over() -> None:
    seen: list[int] = []
    batches = Batches(ahead=2)
    batches.admission._wait = lambda future, step: seen.append(batches.admission.under_way) or future.result(0)
    for _ in range(3):
        batches.take()
    assert seen == [3, 3, 3], "at most ahead + 1, also while one is waited for"


def test_an_error_of_a_later_batch_is_raised_in_its_turn() -> None:
    batches = Batches(ahead=1)
    failed = concurrent.futures.Future[str]()
    failed.set_exception(ValueError("broken"))
    batches.take()
    batches.admission._running[1] = failed
    with pytest.raises(ValueError, match="broken"):
        batches.take()
