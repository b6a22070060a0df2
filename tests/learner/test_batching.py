"""Padding, bucketing and the supervised stream."""

import itertools
import json

import numpy as np
import pytest
from toy_model import BUCKETS, sample, samples

from crl_jax.checkpoint import store
from crl_jax.learner.batching import to_batch
from crl_jax.learner.pipeline import supervised_batches
from crl_jax.records import Completion, Finish, Provenance, TokenLog, TrainSample


def test_columns_by_hand() -> None:
    log = TokenLog.empty().append_context([5, 6], Provenance.PROMPT)
    log = log.append_completion(Completion((7, 8), (-0.5, -0.25), (3, 3), (1, 2), Finish.STOP))
    log = log.append_context([9], Provenance.OBSERVATION).append_completion(Completion((4,), (-1.0,), (4,), (0,), Finish.STOP))
    batch = to_batch([TrainSample(log, 0.5)], row_buckets=(2,), length_buckets=(4, 8), token_buckets=(2, 4))
    assert batch.tokens.tolist() == [[5, 6, 7, 8, 9, 4, 0, 0], [0] * 8]
    assert batch.positions.tolist() == [[0, 1, 2, 3, 4, 5, -1, -1], [-1] * 8]
    assert batch.token_index.tolist() == [[2, 3, 5, 0], [0] * 4]
    assert batch.mask.tolist() == [[True, True, True, False], [False] * 4]
    assert batch.behaviour_logps.tolist() == [[-0.5, -0.25, -1.0, 0.0], [0.0] * 4]
    assert batch.advantages.tolist() == [[0.5, 0.5, 0.5, 0.0], [0.0] * 4]
    assert batch.states.tolist() == [[1, 2, 0, 0], [0] * 4]


def test_L09_rows_that_fill_the_bucket_are_masked() -> None:
    batch = to_batch(samples(5), **BUCKETS)
    assert batch.tokens.shape == (8, 12)
    assert not np.asarray(batch.mask)[5:].any()
    assert (np.asarray(batch.positions)[5:] == -1).all()


def test_smallest_fitting_bucket_in_any_order() -> None:
    batch = to_batch(samples(3), row_buckets=(16, 4, 8), length_buckets=(64, 16), token_buckets=(32, 8))
    assert (*batch.tokens.shape, batch.mask.shape[1]) == (4, 16, 8)


def test_what_does_not_fit_is_an_error_that_names_the_fix() -> None:
    rng = np.random.default_rng(0)
    long = [*samples(2), sample(rng, 20, 1, 1.0)]
    with pytest.raises(ValueError, match=r"sample 2 has 24 tokens, more than the largest bucket 12: raise max_length"):
        to_batch(long, **BUCKETS)
    with pytest.raises(ValueError, match=r"sample 0 has 8 trained tokens.*max_new_tokens"):
        to_batch([sample(rng, 2, 7, 1.0)], **BUCKETS)
    with pytest.raises(ValueError, match="batch has 9 rows"):
        to_batch(samples(9), **BUCKETS)
    with pytest.raises(ValueError, match="no samples"):
        to_batch([], **BUCKETS)


def test_a_token_without_predecessor_cannot_be_trained() -> None:
    log = TokenLog.empty().append_completion(Completion((1,), (-1.0,), (0,), (0,), Finish.STOP))
    with pytest.raises(ValueError, match="start logs with a prompt"):
        to_batch([TrainSample(log, 1.0)], **BUCKETS)


def numbered(count: int) -> list[TrainSample]:
    """Samples whose first token is their number."""
    done = Completion((0,), (-1.0,), (0,), (0,), Finish.STOP)
    return [TrainSample(TokenLog.empty().append_context([i], Provenance.PROMPT).append_completion(done), 1.0) for i in range(count)]


def stream(seed: int = 0, count: int = 10, **kw):
    return supervised_batches(numbered(count), batch_size=4, seed=seed, length_buckets=(2,), token_buckets=(1,), **kw)


def ids(batch) -> list[int]:
    rows = np.asarray(batch.mask).any(axis=1)
    return [int(t) for t in np.asarray(batch.tokens)[rows, 0]]


def test_D06_tail_is_kept_and_masked() -> None:
    batches = list(itertools.islice(stream(), 3))
    assert [len(ids(b)) for b in batches] == [4, 4, 2]
    assert all(b.tokens.shape == (4, 2) for b in batches)
    assert sorted(itertools.chain.from_iterable(ids(b) for b in batches)) == list(range(10))


def test_D04_epochs_differ_and_repeat_with_the_seed() -> None:
    def epochs(seed: int) -> list[list[int]]:
        got = [ids(b) for b in itertools.islice(stream(seed), 6)]
        return [list(itertools.chain.from_iterable(part)) for part in (got[:3], got[3:])]

    first, second = epochs(0)
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second
    assert epochs(0) == [first, second]
    assert epochs(7) != [first, second]


def test_D04_resume_continues_in_the_middle_of_an_epoch() -> None:
    whole = [ids(b) for b in itertools.islice(stream(), 8)]
    before = stream()
    for _ in range(4):
        next(before)
    state = before.get_state()
    after = stream()
    after.set_state(state)
    assert [ids(b) for b in itertools.islice(after, 4)] == whole[4:]


@pytest.mark.parametrize("threads", [0, 2])
def test_K10_two_resumes_continue_the_live_position(threads: int) -> None:
    """State is read from the live iterator at each save: 3 batches, resume, 3, resume, 3 are batches 0..8."""
    whole = [ids(b) for b in itertools.islice(stream(), 9)]
    seen, state = [], None
    for _ in range(3):
        part = stream(threads=threads)
        if state is not None:
            part.set_state(state)
        seen += [ids(next(part)) for _ in range(3)]
        state = json.loads(json.dumps(part.get_state()))  # as a checkpoint would hold it
    assert seen == whole


def test_K15_a_position_saved_at_the_end_of_an_epoch_is_the_start_of_the_next() -> None:
    epoch = [ids(b) for b in itertools.islice(stream(), 9)]
    before = stream()
    for _ in range(3):  # 10 samples in batches of 4: exactly one epoch
        next(before)
    after = stream()
    after.set_state(before.get_state())
    second = [ids(next(after)) for _ in range(3)]
    assert sorted(itertools.chain.from_iterable(second)) == list(range(10))
    assert second == epoch[3:6]


def test_K15_the_last_position_of_the_second_epoch_is_the_first_of_the_third(tmp_path) -> None:
    """9 batches per epoch, saved at the end of epoch 1 (counted from 0): one more epoch is 9 batches, steps 18 to 26."""
    whole = [ids(b) for b in itertools.islice(stream(count=36), 27)]
    before = stream(count=36, threads=2)
    for _ in range(18):
        next(before)
    store.save(tmp_path, 18, {}, {"position": before.get_state()})
    after = stream(count=36, threads=2)
    after.set_state(store.read_records(tmp_path, 18)["position"])
    third = [ids(next(after)) for _ in range(9)]
    assert third == whole[18:]
    assert sorted(itertools.chain.from_iterable(third)) == list(range(36))


def test_K10_the_position_comes_back_from_a_checkpoint_while_threads_read_ahead(tmp_path) -> None:
    """The threads are batches ahead of the learner; what is saved is what the learner has taken, and a resume may use other threads."""
    whole, seen = [ids(b) for b in itertools.islice(stream(), 9)], []
    for part, threads in enumerate((2, 0, 3)):
        now = stream(threads=threads)
        if part:
            now.set_state(store.read_records(tmp_path, 3 * part)["position"])
        seen += [ids(next(now)) for _ in range(3)]
        store.save(tmp_path, 3 * (part + 1), {}, {"position": now.get_state()})
    assert seen == whole


def test_D05_batches_do_not_depend_on_the_number_of_threads_to_the_last_field() -> None:
    """The random fields (a prompt and its log-probs) come from (seed, index), so every array of every batch is the same."""
    rng = np.random.default_rng(5)
    data = [sample(rng, 2 + i % 3, 1 + i % 4, float(rng.normal())) for i in range(10)]
    sizes = {"length_buckets": (12,), "token_buckets": (6,)}
    streams = [supervised_batches(data, batch_size=4, seed=1, threads=n, **sizes) for n in (0, 1, 2)]
    for _ in range(4):
        first, *others = (next(s) for s in streams)
        for other in others:
            for a, b in zip(first[:7], other[:7], strict=True):
                np.testing.assert_array_equal(a, b)


def test_D05_order_does_not_depend_on_the_number_of_threads() -> None:
    by_threads = [[ids(b) for b in itertools.islice(stream(threads=n), 7)] for n in (0, 1, 2)]
    assert by_threads[0] == by_threads[1] == by_threads[2]


def test_P02_processes_read_each_sample_once_and_make_equal_shapes() -> None:
    parts = [list(itertools.islice(stream(process=(i, 2)), 3)) for i in (0, 1)]
    assert {b.tokens.shape for part in parts for b in part} == {(2, 2)}
    assert sorted(i for part in parts for b in part for i in ids(b)) == list(range(10))
    with pytest.raises(ValueError, match="do not divide over 3 processes"):
        next(stream(process=(0, 3)))


def test_empty_data_is_refused() -> None:
    with pytest.raises(ValueError, match="no samples"):
        stream(count=0)
