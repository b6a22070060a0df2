"""Evidence, credit and the order in which generations are trained."""

import pytest
from experience_toys import episode

from crl_jax.experience.buffer import TrainingBuffer, credited
from crl_jax.records import Experience, Generation, GenerationKind, Status


def generation(name):
    return Generation(name, GenerationKind.DISTIL, (1,), (2,), (-0.1,), (0,), 0)


def entry(name, author):
    return Experience(name, "room", "text", author, 0, 0, 0)


def make(**changes):
    return TrainingBuffer(**{"batch_size": 2, "capacity": 4, **changes})


def test_mean_of_rewards_oldest_first():
    buffer = make()
    for name, success in [("b", True), ("a", False), ("b", True), ("c", True), ("b", False)]:
        buffer.credit(name, success=success, step=1)
    batch = buffer.pop_batch(generation)
    assert [(s.generation.id, s.evidence, s.reward) for s in batch] == [("b", 3, pytest.approx(1 / 3)), ("a", 1, -1.0)]
    assert buffer.pop_batch(generation) is None
    assert len(buffer) == 1


def test_parse_failures_enter_at_once_and_noops_do_not():
    buffer = make(parse_failure_reward=-0.5)
    buffer.noop()
    buffer.fail("a", step=0)
    buffer.fail("b", step=0)
    assert [s.reward for s in buffer.pop_batch(generation)] == [-0.5, -0.5]
    assert buffer.counts["noops"] == 1
    assert buffer.counts["parse_failures"] == 2


def test_train_counts_follow_a_generation_that_comes_back():
    buffer = make()
    for _ in range(2):
        buffer.credit("a", success=True, step=3)
        buffer.credit("b", success=True, step=3)
        batch = buffer.pop_batch(generation)
        buffer.record_trained(["a"], step=5)
    assert [(s.train_count, s.last_trained_step) for s in batch] == [(1, 5), (0, -1)]


def test_train_counts_are_forgotten_only_of_generations_that_nothing_can_bring_back():
    buffer = make(capacity=4)
    buffer.record_trained(["waits", "lives", "gone"], step=1)
    assert not buffer.crowded(0)
    buffer.record_trained([f"old{n}" for n in range(6)], step=2)
    assert (buffer.crowded(0), buffer.crowded(1)) == (True, False)
    buffer.credit("waits", success=True, step=3)
    buffer.forget({"lives", "never trained"})
    buffer.credit("lives", success=True, step=3)
    assert [(s.train_count, s.last_trained_step) for s in buffer.pop_batch(generation)] == [(1, 1), (1, 1)]
    assert set(buffer._trained) == {"waits", "lives"}


def test_capacity_and_age_drop_the_oldest_and_count():
    buffer = make(max_age_steps=2)
    for n in range(6):
        buffer.credit(f"g{n}", success=True, step=n)
    assert buffer.counts["dropped_capacity"] == 2
    buffer.expire(6)
    assert buffer.counts["dropped_age"] == 2
    assert [s.generation.id for s in buffer.pop_batch(generation)] == ["g4", "g5"]
    with pytest.raises(ValueError, match="capacity 1"):
        TrainingBuffer(batch_size=2, capacity=1)


def test_json_round_trip():
    buffer = make()
    for name in "abc":
        buffer.credit(name, success=name == "b", step=2)
    buffer.record_trained(["z"], step=1)
    other = make()
    other.restore(buffer.to_json())
    assert other.to_json() == buffer.to_json()
    assert other.pop_batch(generation) == buffer.pop_batch(generation)


def test_credit_goes_by_entry_to_its_own_generation_once_per_episode():
    bank = {e.id: e for e in [entry("x1", "g-distil"), entry("x2", "g-merge"), entry("x3", "g-merge")]}
    assert credited(episode(shown=("x2", "x3")), bank.get) == ("g-merge",)
    assert credited(episode(shown=("x1", "gone"), asks=("", "g-ask")), bank.get) == ("g-distil", "g-ask")
    assert credited(episode(shown=("x1",), status=Status.ENV_ERROR), bank.get) == ()


def test_a_buffer_that_shrank_drops_the_oldest_and_stays_bounded():
    large, small = make(capacity=8), make(capacity=3)
    for n in range(8):
        large.credit(f"g{n}", success=True, step=n)
    small.restore(large.to_json())
    assert len(small) == 3
    small.credit("new", success=True, step=9)
    assert (len(small), small.counts["dropped_capacity"]) == (3, 6)
    assert [s.generation.id for s in small.pop_batch(generation)] == ["g6", "g7"]


def test_a_generation_that_cannot_be_read_takes_no_evidence_with_it():
    buffer = make()
    for name in "ab":
        buffer.credit(name, success=True, step=1)

    def damaged(name):
        raise KeyError(name)

    with pytest.raises(KeyError):
        buffer.pop_batch(damaged)
    assert [s.generation.id for s in buffer.pop_batch(generation)] == ["a", "b"]


@pytest.mark.parametrize(
    "text",
    ["", "[]", "5", "{}", '{"waiting": [["g", 1.0, 0, 0]], "trained": [], "counts": {}}', '{"waiting": [1], "trained": [], "counts": {}}'],
)
def test_a_text_that_is_no_saved_buffer_changes_nothing(text):
    buffer = make()
    buffer.credit("a", success=True, step=1)
    before = buffer.to_json()
    with pytest.raises(ValueError, match="no saved training buffer"):
        buffer.restore(text)
    assert buffer.to_json() == before


def test_what_a_repair_could_not_read_leaves_the_buffer_and_is_counted():
    buffer = TrainingBuffer(batch_size=1, capacity=8)
    for name in ("g1", "g2"):
        buffer.credit(name, success=True, step=1)
    saved = buffer.to_json()
    buffer.restore(saved, {"g2", "g3"})
    assert (len(buffer), buffer.counts["dropped_missing"]) == (1, 1)
    buffer.restore(saved)
    assert buffer.to_json() == saved
