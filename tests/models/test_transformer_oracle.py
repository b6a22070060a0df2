"""The forward pass against a float64 NumPy oracle written token by token, head by head, for the three families of shapes."""

import dataclasses

import jax
import numpy as np
import pytest

from crl_jax.models.presets import TINY
from crl_jax.models.transformer import hidden_states, init, unembed

CONFIGS = {
    "llama": TINY,
    "qwen2": dataclasses.replace(TINY, name="qwen2-like", qkv_bias=True, tie_embeddings=False, rope_theta=1e6),
    "qwen3": dataclasses.replace(TINY, name="qwen3-like", qk_norm=True, n_kv_heads=1, head_dim=16, norm_eps=1e-6),
}


def oracle(config, params, tokens):
    """Logits [T, V] of one sequence."""
    params = jax.tree.map(lambda a: np.asarray(a, np.float64), params)

    def norm(x, p):
        return np.array([row / np.sqrt((row * row).mean() + config.norm_eps) for row in x]) * p["scale"]

    def turn(vector, position):  # the pair (i, i + half) is one complex number
        half = len(vector) // 2
        z = vector[:half] + 1j * vector[half:]
        z = z * np.exp(1j * position / config.rope_theta ** (np.arange(half) / half))
        return np.concatenate([z.real, z.imag])

    x = np.array([params["embed"]["table"][t] for t in tokens])
    for i in range(config.n_layers):
        p = params["layers"][str(i)]
        h, a = norm(x, p["attn_norm"]), p["attn"]
        projected = {}
        for part in "qkv":
            y = h @ a[part] + (a[f"{part}_bias"] if config.qkv_bias else 0)
            y = y.reshape(len(tokens), -1, config.head_dim)
            if config.qk_norm and part != "v":
                y = np.array([norm(row, a[f"{part}_norm"]) for row in y])
            projected[part] = y
        out = np.zeros((len(tokens), config.n_heads, config.head_dim))
        for t in range(len(tokens)):
            for head in range(config.n_heads):
                kv = head * config.n_kv_heads // config.n_heads
                q = turn(projected["q"][t, head], t)
                scores = np.array([q @ turn(projected["k"][s, kv], s) for s in range(t + 1)]) / np.sqrt(config.head_dim)
                weights = np.exp(scores - scores.max())
                out[t, head] = weights / weights.sum() @ projected["v"][: t + 1, kv]
        x = x + out.reshape(len(tokens), -1) @ a["o"]
        h, m = norm(x, p["mlp_norm"]), p["mlp"]
        gate = h @ m["gate"]
        x = x + (gate / (1 + np.exp(-gate)) * (h @ m["up"])) @ m["down"]
    x = norm(x, params["final_norm"])
    return x @ (params["embed"]["table"].T if config.tie_embeddings else params["head"]["kernel"])


@pytest.mark.parametrize("family", CONFIGS)
def test_logits_match_the_oracle(family):
    config = CONFIGS[family]
    params = jax.jit(init, static_argnums=0)(config, jax.random.key(0))
    # Biases and scales start at 0 and 1, where a forgotten one would not show.
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    params = tree.unflatten([leaf + 0.1 * jax.random.normal(key, leaf.shape) for leaf, key in zip(leaves, keys, strict=True)])
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, 12)

    @jax.jit
    def logits(params, tokens, positions):
        return unembed(config, params, hidden_states(config, params, tokens, positions)[0])

    got = logits(params, tokens[None], np.arange(12)[None])[0]
    assert got.dtype == np.float32
    expected = oracle(config, params, tokens)
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(got, expected, atol=1e-4, rtol=1e-4)
