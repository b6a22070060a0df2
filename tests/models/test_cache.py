"""A cache in blocks: the numbers of one block, blocks beyond the furthest query not read, rows copied out and in."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from crl_jax.models import transformer
from crl_jax.models.cache import doubling_blocks, read_row, write_row

PLAIN = transformer.ModelConfig("tiny", 40, 16, 2, 4, 2, 8, 32, tie_embeddings=True)
LOCAL = dataclasses.replace(PLAIN, local_layers=(1,), window=3)
BLOCKS = (4, 4, 8)


@pytest.mark.parametrize(
    ("length", "sizes"),
    [
        (5, (5,)),
        (128, (128,)),
        (255, (255,)),
        (256, (128, 128)),
        (300, (128, 172)),
        (1088, (128, 128, 256, 576)),
        (1500, (128, 128, 256, 512, 476)),
    ],
)
def test_blocks_double_and_make_up_the_length(length, sizes):
    assert doubling_blocks(length) == sizes
    assert sum(sizes) == length


def run(config, blocks, chunks, slots, stale, by_token=False):
    """Hidden states of three rows fed in ``chunks`` (tokens per row), and the cache, which held ``stale`` before."""
    params = transformer.init(PLAIN, jax.random.key(0))
    cache = transformer.init_cache(config, 5, 16, blocks=blocks, by_token=by_token)
    cache = jax.tree.map(lambda leaf: jnp.full_like(leaf, stale), cache)
    tokens = np.random.default_rng(0).integers(0, 40, (3, 16))
    start, found = np.zeros(3, int), [[], [], []]
    step = jax.jit(lambda cache, t, p: transformer.hidden_states(config, params, t, p, cache=cache, slots=slots))
    for lengths in chunks:
        width = max(lengths)
        columns = start[:, None] + np.arange(width)
        inside = np.arange(width) < np.array(lengths)[:, None]
        hidden, cache = step(
            cache, np.where(inside, np.take_along_axis(tokens, np.minimum(columns, 15), 1), 0), np.where(inside, columns, -1)
        )
        for row, n in enumerate(lengths):
            found[row].append(np.asarray(hidden[row, :n]))
        start += lengths
    return [np.concatenate(rows) for rows in found], cache


@pytest.mark.parametrize("config", [PLAIN, LOCAL], ids=["full", "window"])
def test_any_division_gives_the_numbers_of_one_block(config):
    chunks = [(3, 2, 3), (3, 0, 3), (1, 1, 1), (6, 3, 1)]  # over the edges of the blocks; the second row stays behind
    slots = jnp.array([3, 0, 4])
    (got, cache), (expected, whole) = (run(config, b, chunks, slots, stale=7.0) for b in (BLOCKS, None))
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    keys = np.concatenate([np.asarray(k) for k in cache.k[1]], axis=3)
    np.testing.assert_allclose(keys[3, :, :, :13], whole.k[1][0][3, :, :, :13], atol=1e-5)
    assert (keys[1] == 7.0).all()  # a row that nobody named
    assert (keys[0, :, :, 6:] == 7.0).all()


@pytest.mark.parametrize("config", [PLAIN, LOCAL], ids=["full", "window"])
def test_heads_of_a_token_side_by_side_give_the_same_numbers(config):
    chunks, slots = [(3, 2, 3), (3, 0, 3), (1, 1, 1)], jnp.array([3, 0, 4])
    (got, cache), (expected, whole) = (run(config, None, chunks, slots, stale=7.0, by_token=t) for t in (True, False))
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    assert cache.length == 16
    np.testing.assert_allclose(cache.k[1][0].transpose(0, 2, 3, 1), whole.k[1][0], atol=1e-5)
    np.testing.assert_allclose(cache.v[1][0].transpose(0, 2, 1, 3), whole.v[1][0], atol=1e-5)
    row = read_row(cache, jnp.int32(4), 5)
    put = write_row(jax.tree.map(jnp.zeros_like, cache), jnp.int32(0), row)
    np.testing.assert_array_equal(put.k[1][0][0, :5], cache.k[1][0][4, :5])
    assert not np.asarray(put.v[0][0][:, 5:]).any()


def test_blocks_beyond_the_furthest_query_are_not_read():
    # the block that starts at 8 holds NaN, which any reading would spread
    params = transformer.init(PLAIN, jax.random.key(0))
    cache = transformer.init_cache(PLAIN, 3, 16, blocks=BLOCKS)
    cache = dataclasses.replace(
        cache, k=tuple((*ks[:2], ks[2] * np.nan) for ks in cache.k), v=tuple((*vs[:2], vs[2] * np.nan) for vs in cache.v)
    )
    step = jax.jit(lambda cache, t, p: transformer.hidden_states(PLAIN, params, t, p, cache=cache))
    hidden, cache = step(cache, np.ones((3, 5), int), np.broadcast_to(np.arange(5), (3, 5)))
    assert np.isfinite(hidden).all()
    beyond, _ = step(cache, np.ones((3, 5), int), np.broadcast_to(np.arange(5, 10), (3, 5)))
    assert np.isnan(beyond[:, 3:]).all()


@pytest.mark.parametrize("length", [3, 4, 11, 16])
def test_a_row_can_be_copied_out_and_in(length):
    cache = transformer.init_cache(PLAIN, 2, 16, blocks=BLOCKS)
    cache = jax.tree.map(lambda leaf: jax.random.normal(jax.random.key(leaf.size), leaf.shape), cache)
    row = read_row(cache, jnp.int32(1), length)
    assert row.length == length
    put = write_row(jax.tree.map(jnp.zeros_like, cache), jnp.int32(0), row)
    for kind, axis in (("k", 3), ("v", 2)):
        got, expected = (np.concatenate(getattr(c, kind)[1], axis=axis) for c in (put, cache))
        kept = (slice(None),) * (axis - 1) + (slice(0, length),)
        np.testing.assert_array_equal(got[0][kept], expected[1][kept])
        assert np.abs(got).sum() == pytest.approx(np.abs(got[0][kept]).sum(), rel=1e-6)


def test_blocks_that_do_not_make_up_the_length_are_refused():
    with pytest.raises(ValueError, match="doubling_blocks"):
        transformer.init_cache(PLAIN, 2, 16, blocks=(4, 4))
