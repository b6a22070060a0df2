"""Matrices stored transposed for decoding: the same numbers, in any number of rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from crl_jax.models import transformer
from crl_jax.models.matmul import matmul
from crl_jax.models.transposed import FEW_ROWS, Transposed, transposed

CONFIG = transformer.ModelConfig("tiny", 40, 16, 2, 4, 2, 8, 32, tie_embeddings=True)


@pytest.mark.parametrize("rows", [1, 5, FEW_ROWS, FEW_ROWS + 1])
def test_products_are_those_of_the_plain_matrix(rows):
    rng = np.random.default_rng(rows)
    x, kernel = rng.normal(size=(rows, 12)).astype(np.float32), rng.normal(size=(12, 7)).astype(np.float32)
    out = jax.jit(matmul)(x, Transposed(jnp.asarray(kernel.T)))
    np.testing.assert_allclose(out, x @ kernel, atol=1e-5)


def test_a_transposed_model_gives_the_logits_of_the_plain_one_cached_and_uncached():
    params = transformer.init(CONFIG, jax.random.key(0))
    tokens, positions = np.arange(6)[None] + 3, np.arange(6)[None]

    def logits(params, cached):
        cache = transformer.init_cache(CONFIG, 1, 8) if cached else None
        return transformer.unembed(
            CONFIG, params, transformer.hidden_states(CONFIG, params, tokens, positions, cache=cache)[0][0], decoding=cached
        )

    plain = jax.jit(logits, static_argnums=1)(params, False)
    for cached in (False, True):
        np.testing.assert_allclose(jax.jit(logits, static_argnums=1)(transposed(params), cached), plain, atol=1e-5)


def test_only_matrices_of_the_layers_are_transposed_and_cannot_be_indexed():
    flat = transformer.init(CONFIG, jax.random.key(0))
    stored = transposed(flat)
    kinds = {type(leaf) for leaf in jax.tree.leaves(stored, is_leaf=lambda leaf: isinstance(leaf, Transposed))}
    assert stored["embed"]["table"] is flat["embed"]["table"]
    assert len(kinds) == 2
    assert stored["layers"]["0"]["mlp"]["gate"].shape == flat["layers"]["0"]["mlp"]["gate"].shape
    with pytest.raises(TypeError, match="only be multiplied"):
        stored["layers"]["0"]["mlp"]["gate"][0]
