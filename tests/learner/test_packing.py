"""Packed batches: the arrays, the same loss and gradient as unpacked ones, and how many programs they need."""

import jax
import numpy as np
import pytest
from toy_model import VOCAB, sample

from crl_jax.learner import objective
from crl_jax.learner.batching import to_batch
from crl_jax.learner.optimizer import make_optimizer
from crl_jax.learner.packing import pack_batch
from crl_jax.learner.state import init_state
from crl_jax.learner.step import make_train_step
from crl_jax.losses.aggregate import aggregate
from crl_jax.models import transformer
from crl_jax.models.config import ModelConfig
from crl_jax.records import Completion, Finish, Provenance, TokenLog, TrainSample
from crl_jax.role import Buckets

CONFIG = ModelConfig(
    name="t", vocab_size=VOCAB, d_model=16, n_layers=2, n_heads=2, n_kv_heads=1, head_dim=8, d_ff=32, window=4, local_layers=(0,)
)  # a local and a global layer: the window reaches over the end of a shared beginning
OPTIMIZER = make_optimizer(0.01, eps=1e-3)
SIZES = {"length_buckets": (24,), "sequence_buckets": (4,), "token_buckets": (6,)}


def branch(prompt: list[int], reply: list[int], advantage: float = 1.0) -> TrainSample:
    done = Completion(tuple(reply), (-1.0,) * len(reply), (0,) * len(reply), (0,) * len(reply), Finish.STOP)
    return TrainSample(TokenLog.empty().append_context(prompt, Provenance.PROMPT).append_completion(done), advantage)


def group(seed: int = 0) -> list[TrainSample]:
    """Two families of three with a prompt each, of several turns and lengths, and one sample of its own."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(2):
        prompt = [int(t) for t in rng.integers(0, VOCAB, 4)]
        for n in (1, 3, 5):
            log = branch(prompt, [int(t) for t in rng.integers(0, VOCAB, n)]).log
            log = log.append_context([int(t) for t in rng.integers(0, VOCAB, 2)], Provenance.OBSERVATION)
            log = log.append_completion(Completion((1,), (-2.0,), (0,), (0,), Finish.STOP))
            rows.append(TrainSample(log, float(rng.normal())))
    return [*rows, sample(rng, 3, 2, 0.5)]


def test_columns_by_hand() -> None:
    samples = [branch([5, 6], [7, 8], 0.5), branch([5, 6], [9], -1.0), branch([4], [3], 2.0)]
    b = pack_batch(samples, row_buckets=(1,), length_buckets=(8,), sequence_buckets=(3,), token_buckets=(2,), share_prefixes=True)
    assert b.tokens.tolist() == [[5, 6, 7, 8, 9, 4, 3, 0]]
    assert b.positions.tolist() == [[0, 1, 2, 3, 2, 0, 1, -1]]
    assert b.segments.tolist() == [[0, 0, 1, 1, 2, 3, 3, -1]]
    assert b.prefixes.tolist() == [[0, 0, 0, 0, 0, 3, 3, -1]]
    assert b.mask.tolist() == [[True, True], [True, False], [True, False]]
    assert [b.token_index[b.mask].tolist(), b.source_index[b.mask].tolist()] == [[2, 3, 4, 6], [1, 2, 1, 5]]
    assert b.advantages[b.mask].tolist() == [0.5, 0.5, -1.0, 2.0]


def test_L29_every_sampled_token_is_trained_exactly_once() -> None:
    """Of two branches that share a prompt and three sampled tokens, the fork holds them as context, packed or not."""
    trunk = branch([1, 2], [3, 4, 5]).log
    ends = [Completion((6, i), (-1.0,) * 2, (0,) * 2, (0,) * 2, Finish.STOP) for i in (7, 8)]
    first, second = (trunk.append_completion(end) for end in ends)
    # the second branch was forked from the first: its copy of the trunk is context
    fork = TokenLog.empty().append_context([1, 2, 3, 4, 5], Provenance.PROMPT).append_completion(ends[1])
    assert len(second) == len(fork)
    for share in (False, True):
        b = pack_batch([TrainSample(first, 1.0), TrainSample(fork, 1.0)], row_buckets=(1,), **SIZES, share_prefixes=share)
        assert int(b.mask.sum()) == 7
        places = list(zip(np.nonzero(b.mask)[0] // 4, b.token_index[b.mask], strict=True))
        assert len(set(places)) == 7


def test_a_family_too_long_for_a_row_is_cut_and_keeps_every_sample() -> None:
    rows = [branch([1] * 6, [i] * 4) for i in range(5)]
    b = pack_batch(rows, row_buckets=(2, 4), length_buckets=(16,), sequence_buckets=(2, 4), token_buckets=(4,), share_prefixes=True)
    assert b.tokens.shape == (4, 16)  # 6 + 2 * 4 tokens in each of three rows, the last alone
    row = np.arange(b.mask.shape[0])[:, None] // (b.mask.shape[0] // 4)
    assert sorted(b.tokens[row, b.token_index][b.mask].tolist()) == sorted([0, 1, 2, 3, 4] * 4)


def test_L09_rows_and_sequences_that_fill_a_packed_bucket_are_masked() -> None:
    """Three sequences of two tokens with loss 1 in a bucket of four rows of two sequences: the mean stays 1, and no row is a copy."""
    rows = [branch([1, 2], [3, 4]) for _ in range(3)]
    b = pack_batch(rows, row_buckets=(4,), length_buckets=(8,), sequence_buckets=(2,), token_buckets=(4,))
    assert b.mask.any(axis=1).tolist() == [True, True, True] + [False] * 5
    assert (b.positions[2:] == -1).all()
    assert int(b.mask.sum()) == 6
    for mode in ("token_mean", "seq_mean_token_mean"):
        assert aggregate(np.ones(b.mask.shape, np.float32), b.mask, mode).mean() == 1.0


def test_what_does_not_fit_is_an_error_that_names_the_fix() -> None:
    with pytest.raises(ValueError, match="raise the row length"):
        pack_batch([branch([1] * 30, [2])], row_buckets=(1,), **SIZES)
    with pytest.raises(ValueError, match="do not fit 1 rows"):
        pack_batch([branch([1] * 20, [2]), branch([2] * 20, [2])], row_buckets=(1,), **SIZES)
    with pytest.raises(ValueError, match="no samples"):
        pack_batch([], row_buckets=(1,), **SIZES)


@pytest.fixture(scope="module")
def reference():
    return run(objective.actor(ratio="sequence"), to_batch(group(), row_buckets=(8,), length_buckets=(16,), token_buckets=(6,)))


def run(what, batch, microbatches: int = 1):
    step = make_train_step(CONFIG, OPTIMIZER, what, temperature=0.7, allowed=None, microbatches=microbatches, logit_chunk=3)
    return step(init_state(transformer.init(CONFIG, jax.random.key(0)), OPTIMIZER), batch)


@pytest.mark.parametrize(("share", "microbatches"), [(False, 2), (True, 1)])
def test_packed_equals_unpacked(reference, share: bool, microbatches: int) -> None:
    """Loss, gradient norm, every metric and the update, for a loss that averages within each sequence."""
    batch = pack_batch(group(), row_buckets=(4,), **SIZES, share_prefixes=share)
    assert (batch.positions >= 0).sum() == sum(len(s.log) for s in group()) - (16 if share else 0)
    state, sums = run(objective.actor(ratio="sequence"), batch, microbatches)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-5), (state, sums), reference)


class Nothing:
    """A model whose states are its one parameter, so that a program compiles in no time."""

    @staticmethod
    def hidden_states(config, params, tokens, positions, *, segments, prefixes, read, how):
        return params["x"][jax.numpy.take_along_axis(tokens, read, axis=1)][..., None], None

    @staticmethod
    def unembed(config, params, hidden):
        return hidden * jax.numpy.arange(VOCAB, dtype=jax.numpy.float32)


@pytest.mark.parametrize("packing", ["padded", "prefixes"])
def test_at_most_one_program_per_bucket(packing) -> None:
    buckets = Buckets.of(rows=8, max_length=32, max_tokens=32, packing=packing)
    step = make_train_step(None, OPTIMIZER, objective.actor(), temperature=1.0, allowed=None, model=Nothing())
    state, shapes = init_state({"x": jax.numpy.ones(VOCAB)}, OPTIMIZER), set()
    rng = np.random.default_rng(0)
    for i in range(24):
        rows = [sample(rng, int(rng.integers(2, 20)), int(rng.integers(1, 7)), 1.0) for _ in range(1 + i % 8)]
        batch = buckets.batch(rows)
        shapes.add(tuple(None if leaf is None else leaf.shape for leaf in batch))
        state, _ = step(state, batch)
    compiled = step._cache_size()  # type: ignore[attr-defined]
    assert 1 < compiled == len(shapes)
    assert compiled <= len(buckets.rows) * len(buckets.lengths) * len(buckets.tokens) * max(1, len(buckets.sequences))
