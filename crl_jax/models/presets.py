"""Named model shapes.

Owns: the numbers of the models the project ships, tests with or has recipes for. Promises: ``preset(name)`` is a valid
``ModelConfig``. Does not: hold weights.
"""

from __future__ import annotations

import dataclasses
import functools

from crl_jax.models.config import ModelConfig, RopeScaling

TINY = ModelConfig(name="tiny", vocab_size=64, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, d_ff=64, max_positions=256)

# About 0.8 M parameters plus 128 per vocabulary entry, whose number is the tokenizer's: preset("micro", vocab_size=tokenizer.vocab_size).
MICRO = ModelConfig(
    name="micro", vocab_size=1024, d_model=128, n_layers=4, n_heads=4, n_kv_heads=2, head_dim=32, d_ff=384, max_positions=1024
)

SMOLLM2_135M = ModelConfig(
    name="smollm2-135m",
    vocab_size=49152,
    d_model=576,
    n_layers=30,
    n_heads=9,
    n_kv_heads=3,
    head_dim=64,
    d_ff=1536,
    rope_theta=100_000.0,
    norm_eps=1e-5,
    max_positions=8192,
)

_QWEN2_5 = functools.partial(ModelConfig, qkv_bias=True, rope_theta=1e6, norm_eps=1e-6, max_positions=32768)
_QWEN3 = functools.partial(
    ModelConfig, vocab_size=151936, n_kv_heads=8, head_dim=128, qk_norm=True, rope_theta=1e6, norm_eps=1e-6, max_positions=40960
)

QWEN2_5_0_5B = _QWEN2_5(name="qwen2.5-0.5b", vocab_size=151936, d_model=896, n_layers=24, n_heads=14, n_kv_heads=2, head_dim=64, d_ff=4864)

# The paper's actor (Qwen2.5-7B-Instruct) and, below, its extractor (Qwen3-4B-Thinking-2507).
QWEN2_5_7B = _QWEN2_5(
    name="qwen2.5-7b",
    vocab_size=152064,
    d_model=3584,
    n_layers=28,
    n_heads=28,
    n_kv_heads=4,
    head_dim=128,
    d_ff=18944,
    tie_embeddings=False,
)

QWEN3_0_6B = _QWEN3(name="qwen3-0.6b", d_model=1024, n_layers=28, n_heads=16, d_ff=3072)

QWEN3_4B = _QWEN3(name="qwen3-4b", d_model=2560, n_layers=36, n_heads=32, d_ff=9728)

QWEN3_4B_THINKING_2507 = dataclasses.replace(QWEN3_4B, name="qwen3-4b-thinking-2507", rope_theta=5e6, max_positions=262144)

LLAMA3_2_1B = ModelConfig(
    name="llama3.2-1b",
    vocab_size=128256,
    d_model=2048,
    n_layers=16,
    n_heads=32,
    n_kv_heads=8,
    head_dim=64,
    d_ff=8192,
    rope_theta=500_000.0,
    rope_scaling=RopeScaling("llama3", factor=32.0),
    max_positions=131072,
)

GEMMA3_270M = ModelConfig(
    name="gemma3-270m",
    vocab_size=262144,
    d_model=640,
    n_layers=18,
    n_heads=4,
    n_kv_heads=1,
    head_dim=256,
    d_ff=2048,
    rope_theta=1e6,
    norm_eps=1e-6,
    max_positions=32768,
    qk_norm=True,
    window=512,
    local_layers=tuple(layer for layer in range(18) if (layer + 1) % 6),
    local_rope_theta=10_000.0,
    post_norms=True,
    norm_offset=1.0,
    embed_scale=640**0.5,
    query_scale=256**-0.5,
    activation="gelu_tanh",
)

PRESETS = {
    config.name: config
    for config in (
        TINY,
        MICRO,
        SMOLLM2_135M,
        QWEN2_5_0_5B,
        QWEN2_5_7B,
        QWEN3_0_6B,
        QWEN3_4B,
        QWEN3_4B_THINKING_2507,
        LLAMA3_2_1B,
        GEMMA3_270M,
    )
}


def preset(name: str, *, vocab_size: int | None = None) -> ModelConfig:
    """The preset called ``name``, with its vocabulary size replaced when one is given. Raises ValueError naming the known presets."""
    if name not in PRESETS:
        raise ValueError(f"unknown model preset `{name}`: use one of {sorted(PRESETS)}")
    config = PRESETS[name]
    return config if vocab_size is None else dataclasses.replace(config, vocab_size=vocab_size)
