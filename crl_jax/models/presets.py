"""Named model shapes.

Owns: the numbers of the models the project ships or tests with. Promises: ``preset(name)`` is a valid ``ModelConfig``. Does not: hold
weights.
"""

from __future__ import annotations

import dataclasses

from crl_jax.models.config import ModelConfig

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

PRESETS = {config.name: config for config in (TINY, MICRO, SMOLLM2_135M)}


def preset(name: str, *, vocab_size: int | None = None) -> ModelConfig:
    """The preset called ``name``, with its vocabulary size replaced when one is given. Raises ValueError naming the known presets."""
    if name not in PRESETS:
        raise ValueError(f"unknown model preset `{name}`: use one of {sorted(PRESETS)}")
    config = PRESETS[name]
    return config if vocab_size is None else dataclasses.replace(config, vocab_size=vocab_size)
