"""Packed rows of every family: their logits are those of each sequence alone, and what `transformers` computed for it (tests/golden).

Rows hold padding before, between and after sequences, sequences of one row that have nothing to do with each other, and branches that
share a beginning. Gemma 3 has a window of 5 here, so its local layers forget most of a sequence of 24 tokens, across the fork as well.
"""

import dataclasses
import functools
import pathlib

import jax
import numpy as np
import pytest

from crl_jax.models.forward import Execution
from crl_jax.models.hf_config import read_hf_config
from crl_jax.models.load import load_params
from crl_jax.models.presets import GEMMA3_270M
from crl_jax.models.transformer import hidden_states, param_shapes, unembed

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
LENGTH, FORK, WIDTH = 24, 10, 62


@functools.cache
def runner(config, **how):
    """Compiled logits of rows; one program per shape."""

    def run(params, tokens, positions, segments=None, prefixes=None):
        hidden, _ = hidden_states(config, params, tokens, positions, segments=segments, prefixes=prefixes, how=Execution(**how))
        return unembed(config, params, hidden)

    return jax.jit(run)


class Row:
    """One row of WIDTH tokens that is filled by hand; everything that is not written is padding with token 63."""

    def __init__(self):
        self.tokens, self.positions = np.full((1, WIDTH), 63, np.int32), np.full((1, WIDTH), -1, np.int32)
        self.segments, self.prefixes = self.positions.copy(), self.positions.copy()

    def put(self, at, tokens, *, segment, prefix=None, first=0):
        """``tokens`` from slot ``at``, the first of them at position ``first`` of its sequence; returns the slots."""
        where = slice(at, at + len(tokens))
        self.tokens[0, where], self.positions[0, where] = tokens, first + np.arange(len(tokens))
        self.segments[0, where], self.prefixes[0, where] = segment, segment if prefix is None else prefix
        return where

    def arrays(self, *, shared):
        return (self.tokens, self.positions, self.segments, *([self.prefixes] if shared else []))


def alone(config, params, tokens):
    """Logits of one sequence in a row of its own, with nothing before it and padding after it."""
    row = Row()
    row.put(0, tokens, segment=0)
    return np.asarray(runner(config)(params, row.tokens, row.positions))[0, : len(tokens)]


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3", "gemma3"])
def golden(request):
    folder = GOLDEN / request.param
    config, expected = read_hf_config(folder), np.load(folder / "expected.npz")
    return config, load_params(str(folder), config, seed=0), expected["tokens"], expected["logits"]


def test_two_sequences_of_a_row_do_not_see_each_other_or_the_padding(golden):
    config, params, tokens, logits = golden
    row = Row()
    places = [row.put(3, tokens[0], segment=0), row.put(3 + LENGTH + 2, tokens[1], segment=1)]
    got = np.asarray(runner(config)(params, *row.arrays(shared=False)))[0]
    assert np.isfinite(got).all()
    for place, sequence, expected in zip(places, tokens, logits, strict=True):
        np.testing.assert_allclose(got[place], alone(config, params, sequence), atol=1e-5)
        np.testing.assert_allclose(got[place], expected, atol=1e-4)


def test_branches_that_share_a_beginning_are_whole_sequences(golden):
    """[beginning | branch | other branch | foreign sequence]: the first branch goes on as the golden sequence does."""
    config, params, tokens, logits = golden
    trunk, branches = tokens[0][:FORK], [tokens[0][FORK:], tokens[1][FORK:]]
    row, places, at = Row(), [], FORK
    shared = row.put(0, trunk, segment=0)
    for i, branch in enumerate(branches):
        places.append(row.put(at, branch, segment=1 + i, prefix=0, first=FORK))
        at += len(branch)
    foreign = row.put(at, tokens[1], segment=3)
    got = np.asarray(runner(config)(params, *row.arrays(shared=True)))[0]
    for place, branch in zip(places, branches, strict=True):
        whole = alone(config, params, np.concatenate([trunk, branch]))
        np.testing.assert_allclose(np.concatenate([got[shared], got[place]]), whole, atol=1e-5)
    np.testing.assert_allclose(np.concatenate([got[shared], got[places[0]]]), logits[0], atol=1e-4)
    np.testing.assert_allclose(got[foreign], logits[1], atol=1e-4)
    assert np.abs(got[places[0]] - got[places[1]]).max() > 0.1, "the branches differ, or the test sees nothing"


MIXED = dataclasses.replace(
    GEMMA3_270M, vocab_size=64, d_model=16, n_layers=3, n_heads=2, head_dim=8, d_ff=24, max_positions=64, window=4, local_layers=(0, 2)
)


@pytest.fixture(scope="module")
def mixed():
    rng = np.random.default_rng(1)  # random norms too; NumPy's numbers need no compiled program
    return jax.tree.map(lambda leaf: rng.normal(0, 0.3, leaf.shape).astype(np.float32), param_shapes(MIXED))


def test_a_mix_of_local_and_global_layers_packs(mixed):
    """A local, a global and a local layer."""
    tokens = np.random.default_rng(0).integers(0, 64, 2 * LENGTH)
    row = Row()
    row.put(0, tokens[:FORK], segment=0)
    branch = row.put(FORK, tokens[FORK:LENGTH], segment=1, prefix=0, first=FORK)
    other = row.put(LENGTH, tokens[LENGTH:], segment=2)
    got = np.asarray(runner(MIXED)(mixed, *row.arrays(shared=True)))[0]
    np.testing.assert_allclose(got[branch], alone(MIXED, mixed, tokens[:LENGTH])[FORK:], atol=1e-5)
    np.testing.assert_allclose(got[other], alone(MIXED, mixed, tokens[LENGTH:]), atol=1e-5)


def test_scanning_layers_of_two_kinds_is_refused_with_the_way_out(mixed):
    tokens, positions = np.arange(8)[None], np.arange(8)[None]

    def states(config, read=None, **how):
        def run(params):
            return hidden_states(config, params, tokens, positions, read=read, how=Execution(**how))[0]

        return run

    with pytest.raises(ValueError, match="mixes local and global attention: set scan_layers=false"):
        jax.eval_shape(states(MIXED, scan_layers=True), mixed)
    jax.eval_shape(states(dataclasses.replace(MIXED, local_layers=(0, 1, 2)), scan_layers=True), mixed)  # all local: one kind
    # where positions are picked the last layer is not part of the scan, so it may be of another kind
    last, read = dataclasses.replace(MIXED, local_layers=(0, 1)), np.array([[7]])
    scanned, plain = jax.jit(states(last, read, scan_layers=True))(mixed), jax.jit(states(last))(mixed)
    np.testing.assert_allclose(scanned, plain[:, 7:], atol=1e-5)
