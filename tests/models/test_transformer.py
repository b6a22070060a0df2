"""Padding, causality, the cache, parameters and configurations of the transformer."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from crl_jax.models.params import flatten, unflatten
from crl_jax.models.presets import MICRO, PRESETS, SMOLLM2_135M, TINY, preset
from crl_jax.models.transformer import count_params, hidden_states, init, init_cache, unembed

RNG = np.random.default_rng(0)


@pytest.fixture(scope="module")
def params():
    return jax.jit(init, static_argnums=0)(TINY, jax.random.key(0))


@jax.jit
def full(params, tokens, positions):
    return unembed(TINY, params, hidden_states(TINY, params, tokens, positions)[0])


@jax.jit
def step(params, tokens, positions, cache, slots=None):
    hidden, cache = hidden_states(TINY, params, tokens, positions, cache=cache, slots=slots)
    return unembed(TINY, params, hidden), cache


def test_L32_logprobs_do_not_depend_on_padding(params):
    tokens = RNG.integers(0, 64, 9)
    rows, positions = np.zeros((4, 14), np.int32), np.full((4, 14), -1, np.int32)
    for row, left in ((0, 0), (1, 5)):  # 5 pads on the right, 5 on the left
        rows[row, left : left + 9], positions[row, left : left + 9] = tokens, np.arange(9)
    rows[2], positions[2] = 63, np.arange(14)  # a batch mate; row 3 is padding only
    padded = jax.nn.log_softmax(full(params, rows, positions))
    alone = jax.nn.log_softmax(full(params, tokens[None], np.arange(9)[None]))
    np.testing.assert_allclose(padded[0, :9], alone[0], atol=1e-5)
    np.testing.assert_allclose(padded[1, 5:], alone[0], atol=1e-5)
    assert np.isfinite(padded).all()


def test_a_token_sees_only_the_past(params):
    tokens = RNG.integers(0, 64, (1, 14))
    changed = tokens.copy()
    changed[0, 8:] = (changed[0, 8:] + 1) % 64
    positions = np.arange(14)[None]
    before, after = full(params, tokens, positions), full(params, changed, positions)
    np.testing.assert_array_equal(before[0, :8], after[0, :8])
    assert np.abs(before[0, 8:] - after[0, 8:]).max(axis=-1).min() > 1e-3


def test_padding_has_no_gradient(params):
    tokens = jnp.asarray(RNG.integers(1, 64, (2, 6))).at[1, 3:].set(0)
    positions = jnp.asarray([[0, 1, 2, 3, 4, 5], [0, 1, 2, -1, -1, -1]])

    @jax.jit
    def table_gradient(params):
        def loss(params):
            hidden, _ = hidden_states(TINY, params, tokens, positions)
            return jnp.sum(jnp.where((positions >= 0)[..., None], hidden, 0) ** 3)

        return jax.grad(loss)(params)["embed"]["table"]

    gradient = table_gradient(params)
    assert np.isfinite(gradient).all()
    np.testing.assert_array_equal(gradient[0], 0)


def feed(params, cache, rows, sequences, widths, slots=None):
    """Feed sequences in chunks of the given widths, each row its own length; the logits of every token."""
    logits = [[] for _ in sequences]
    done = 0
    for width in widths:
        tokens, positions = np.zeros((rows, width), np.int32), np.full((rows, width), -1, np.int32)
        for i, sequence in enumerate(sequences):
            part = sequence[done : done + width]
            tokens[i, : len(part)], positions[i, : len(part)] = part, done + np.arange(len(part))
        out, cache = step(params, tokens, positions, cache, slots)
        for i, sequence in enumerate(sequences):
            logits[i].extend(np.asarray(out[i, : len(sequence[done : done + width])]))
        done += width
    return [np.stack(rows) for rows in logits], cache


def test_chunked_prefill_and_decode_equal_the_uncached_pass(params):
    sequences = [RNG.integers(0, 64, n) for n in (14, 9, 3)]
    cached, _ = feed(params, init_cache(TINY, 3, 16), 3, sequences, (4, 4, 1, 1, 4))
    for sequence, got in zip(sequences, cached, strict=True):
        expected = full(params, np.pad(sequence, (0, 14 - len(sequence)))[None], np.arange(14)[None])[0, : len(sequence)]
        np.testing.assert_allclose(got, expected, atol=1e-4)


def test_slots_write_their_rows_and_leave_the_others(params):
    sequences = [RNG.integers(0, 64, 6), RNG.integers(0, 64, 4)]
    start = jax.tree.map(lambda a: a + 7.0, init_cache(TINY, 5, 16))  # stale content of earlier occupants
    cached, cache = feed(params, start, 3, sequences, (4, 4), slots=jnp.asarray([3, 1, 3]))  # the third row is padding only
    for sequence, got in zip(sequences, cached, strict=True):
        np.testing.assert_allclose(
            got, full(params, np.pad(sequence, (0, 14 - len(sequence)))[None], np.arange(14)[None])[0, : len(sequence)], atol=1e-4
        )
    by_position = [(*(jnp.swapaxes(k, 2, 3) for (k,) in c.k), *(v for (v,) in c.v)) for c in (start, cache)]
    for before, after in zip(*by_position, strict=True):
        np.testing.assert_array_equal(after[jnp.asarray([0, 2, 4])], before[jnp.asarray([0, 2, 4])])
        np.testing.assert_array_equal(after[3, :, 6:], before[3, :, 6:])
        np.testing.assert_array_equal(after[1, :, 4:], before[1, :, 4:])
        assert np.abs(after[1, :, :4] - before[1, :, :4]).min() > 0


def test_cache_errors_carry_the_fix(params):
    one = jnp.zeros((1, 1), jnp.int32)
    with pytest.raises(ValueError, match="pass `slots`"):
        hidden_states(TINY, params, one, one, cache=init_cache(TINY, 2, 4))
    with pytest.raises(ValueError, match="init_cache"):
        hidden_states(TINY, params, one, one, slots=jnp.zeros(1, jnp.int32))


def test_bfloat16_parameters_give_bfloat16_states_and_float32_logits(params):
    half = jax.tree.map(lambda a: a.astype(jnp.bfloat16), params)
    tokens, positions = np.arange(6)[None], np.arange(6)[None]

    @jax.jit
    def run(params, cache):
        hidden, cache = hidden_states(TINY, params, tokens, positions, cache=cache)
        return hidden, cache, unembed(TINY, params, hidden)

    hidden, cache, logits = run(half, init_cache(TINY, 1, 16, jnp.bfloat16))
    assert hidden.dtype == jnp.bfloat16
    assert cache.k[0][0].dtype == jnp.bfloat16
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, full(params, tokens, positions), atol=0.05)


def test_R15_a_missing_or_foreign_parameter_is_an_error(params):
    one = jnp.zeros((1, 1), jnp.int32)
    flat = flatten(params)
    without = unflatten({k: v for k, v in flat.items() if k != "layers.1.mlp.up"})
    with pytest.raises(ValueError, match=r"missing: layers\.1\.mlp\.up"):
        hidden_states(TINY, without, one, one)
    with pytest.raises(ValueError, match=r"unexpected: head\.kernel"):
        hidden_states(TINY, unflatten({**flat, "head.kernel": jnp.zeros((32, 64))}), one, one)
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.up: \(64, 32\) instead of \(32, 64\)"):
        hidden_states(TINY, unflatten({**flat, "layers.0.mlp.up": flat["layers.0.mlp.up"].T}), one, one)


def test_presets():
    assert count_params(SMOLLM2_135M) == 134_515_008
    assert 0.8e6 < count_params(MICRO) < 1.1e6
    assert preset("micro", vocab_size=77).vocab_size == 77
    assert {"tiny", "micro", "smollm2-135m", "qwen2.5-7b", "qwen3-4b"} <= set(PRESETS)
    with pytest.raises(ValueError, match="tiny"):
        preset("large")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"n_kv_heads": 3}, r"use one of \[1, 2, 4\]"),
        ({"head_dim": 7}, "use 8"),
        ({"n_layers": 0}, "at least 1"),
        ({"norm_eps": 0.0}, "positive"),
    ],
)
def test_an_impossible_config_says_what_to_change(change, words):
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(TINY, **change)
