"""Drawing one token per row: the hash against JAX's own, the frequencies against the softmax, and the edges of the cumulative sum."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.random import threefry_2x32

from crl_jax.serving.draw import BLOCK, choose, invert, threefry2x32


def test_the_hash_is_threefry():
    words = np.random.default_rng(0).integers(0, 2**32, (4, 6), dtype=np.uint32)
    got = jax.jit(threefry2x32)((words[0], words[1]), (words[2], words[3]))
    for i in range(6):
        expected = threefry_2x32(jnp.asarray(words[:2, i]), jnp.asarray(words[2:, i]))
        assert [int(w[i]) for w in got] == expected.tolist()


@pytest.mark.parametrize("vocab", [5, BLOCK, 3 * BLOCK + 7])
def test_S08_frequencies_follow_the_softmax_over_one_block_and_many(vocab):
    rows = 20_000
    scaled = np.random.default_rng(vocab).normal(size=vocab).astype(np.float32) * 2
    scaled[[1, vocab - 1]] = -np.inf
    inputs = jnp.broadcast_to(scaled, (rows, vocab)), jnp.zeros(rows, bool)
    ids, mass = jax.jit(choose)(*inputs, jnp.arange(rows) // 2, jnp.arange(rows) % 2)
    wide = np.exp(scaled.astype(np.float64))
    expected = wide / wide.sum()
    counts = np.bincount(np.asarray(ids), minlength=vocab)
    assert counts[[1, vocab - 1]].tolist() == [0, 0]
    assert (np.abs(counts - rows * expected) < 5 * np.sqrt(rows * expected) + 5).all()
    np.testing.assert_allclose(mass[:3], np.log(wide.sum()), atol=1e-5)


def test_greedy_rows_take_the_first_of_the_largest_in_any_block():
    scaled = jnp.zeros((3, 2 * BLOCK + 3)).at[0, BLOCK + 2 :].set(1.0).at[1, -1].set(1.0)
    assert jax.jit(choose)(scaled, jnp.ones(3, bool), jnp.arange(3), jnp.arange(3))[0].tolist() == [BLOCK + 2, 2 * BLOCK + 2, 0]


def test_an_entry_of_weight_zero_is_never_passed_to_whatever_the_number():
    weights = jnp.asarray([[0.0, 1.0, 0.0, 3.0, 0.0]] * 4)
    numbers = jnp.asarray([0.0, 0.2499999, 0.25, 1.0])  # 1 stands for a product that rounding makes the whole total
    assert jax.jit(invert)(weights, numbers).tolist() == [1, 1, 3, 3]


@pytest.mark.parametrize("entries", [BLOCK, 384, 1187])
def test_an_entry_of_weight_zero_is_not_chosen_where_rounding_raises_the_sum_at_it(entries):
    rng = np.random.default_rng(entries)
    weights = np.where(rng.random((3000, entries)) < 0.3, rng.exponential(size=(3000, entries)), 0).astype(np.float32)
    reached = np.asarray(jax.jit(lambda w: jnp.cumsum(w, axis=-1))(weights))
    raised = (np.diff(reached, axis=1) > 0) & (weights[:, 1:] == 0)  # none on a platform that adds from left to right
    before = np.take_along_axis(reached, raised.argmax(axis=1)[:, None], axis=1)
    for steps in (-1, 0, 1):  # a number whose share of the total lies between the sum before and the raised one
        numbers = np.clip(np.float32(before / reached[:, -1:]) + np.float32(steps * 2.0**-24), 0, 1 - 2.0**-24)[:, 0]
        chosen = np.asarray(jax.jit(invert)(weights, numbers))
        assert (np.take_along_axis(weights, chosen[:, None], axis=1) > 0).all()
