"""Each family against what `transformers` computed (tests/golden, made by make_models.py): alone, padded, through the cache, in bfloat16,
and from weights loaded onto a mesh.
"""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from crl_jax.models.hf_config import read_hf_config
from crl_jax.models.load import load_params
from crl_jax.models.transformer import hidden_states, init_cache, unembed
from crl_jax.sharding.mesh import make_mesh
from crl_jax.sharding.rules import param_shardings

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
FAMILIES = ("llama", "qwen2", "qwen3", "gemma3")
LENGTH, WIDTH, CHUNK = 24, 30, 8


class Golden:
    """A folder, our model of it, and the expected logits."""

    def __init__(self, family):
        self.folder = GOLDEN / family
        self.config = read_hf_config(self.folder)
        self.params = load_params(str(self.folder), self.config, seed=0)
        expected = np.load(self.folder / "expected.npz")
        self.tokens, self.logits = expected["tokens"], expected["logits"]

        def full(params, tokens, positions):
            return unembed(self.config, params, hidden_states(self.config, params, tokens, positions)[0])

        def step(params, tokens, positions, cache):
            hidden, cache = hidden_states(self.config, params, tokens, positions, cache=cache)
            return unembed(self.config, params, hidden), cache

        self.full, self.step = jax.jit(full), jax.jit(step)

    def padded(self, lefts):
        """The two sequences in rows of WIDTH, each behind so much padding."""
        tokens, positions = np.full((2, WIDTH), 63, np.int32), np.full((2, WIDTH), -1, np.int32)
        for row, left in enumerate(lefts):
            tokens[row, left : left + LENGTH], positions[row, left : left + LENGTH] = self.tokens[row], np.arange(LENGTH)
        return tokens, positions


@pytest.fixture(scope="module", params=FAMILIES)
def golden(request):
    return Golden(request.param)


def test_R15_L32_logits_are_those_of_the_reference_with_padding_on_either_side(golden):
    assert np.abs(golden.logits).max() > 1
    for lefts in ((0, 0), (6, 2)):
        tokens, positions = golden.padded(lefts)
        got = np.asarray(golden.full(golden.params, tokens, positions))
        for row, left in enumerate(lefts):
            np.testing.assert_allclose(got[row, left : left + LENGTH], golden.logits[row], atol=1e-4)


def test_cached_logits_are_those_of_the_reference(golden):
    """The second row is behind the first by a chunk, so the cache holds rows of different lengths; windows are exceeded many times."""
    cache, got = init_cache(golden.config, 2, 32), [[], []]
    for start in range(0, LENGTH + CHUNK, CHUNK):
        tokens, positions = np.zeros((2, CHUNK), np.int32), np.full((2, CHUNK), -1, np.int32)
        for row, at in enumerate((start, start - CHUNK)):
            if 0 <= at < LENGTH:
                tokens[row], positions[row] = golden.tokens[row, at : at + CHUNK], at + np.arange(CHUNK)
        logits, cache = golden.step(golden.params, tokens, positions, cache)
        for row in range(2):
            if positions[row, 0] >= 0:
                got[row].append(np.asarray(logits[row]))
    for row in range(2):
        np.testing.assert_allclose(np.concatenate(got[row]), golden.logits[row], atol=1e-4)


def test_bfloat16_logits_stay_within_their_bound(golden):
    """bfloat16 has 8 bits of mantissa; through two layers the logits (up to 4) move by less than 0.1, by 0.02 on average."""
    half = load_params(str(golden.folder), golden.config, seed=0, dtype=jnp.bfloat16)
    assert {leaf.dtype for leaf in jax.tree.leaves(half)} == {jnp.dtype(jnp.bfloat16)}
    tokens, positions = golden.padded((0, 0))
    error = np.abs(np.asarray(golden.full(half, tokens, positions))[:, :LENGTH] - golden.logits)
    assert error.max() < 0.1
    assert error.mean() < 0.02


def test_R15_weights_loaded_onto_a_mesh_are_the_same_in_every_shard(golden):
    mesh = make_mesh(2, 4, 1)
    shardings = param_shardings(golden.config, mesh)
    sharded = load_params(str(golden.folder), golden.config, seed=0, shardings=shardings)
    jax.tree.map(lambda leaf, place: pytest.fail("wrong place") if leaf.sharding != place else None, sharded, shardings)
    jax.tree.map(np.testing.assert_array_equal, sharded, golden.params)
    assert sharded["embed"]["table"].addressable_shards[3].data.shape == (64, 8)
