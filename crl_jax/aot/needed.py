"""Arithmetic a model needs, whatever the program does: the numerator of MFU.

Owns: the count. Promises: 2 FLOPs per multiply-add of matrix products; causal attention counts each (query, earlier key) pair once;
backward is twice forward; recomputation, the optimiser and element-wise work are not counted. Does not: look at compiled programs.
"""

from __future__ import annotations

from crl_jax.models.config import ModelConfig


def layer_weights(config: ModelConfig) -> int:
    """Matrix entries that every token passes, without embedding and head."""
    heads = (2 * config.n_heads + 2 * config.n_kv_heads) * config.head_dim
    return config.n_layers * config.d_model * (heads + 3 * config.d_ff)


def attention_flops(config: ModelConfig, pairs: float) -> float:
    """Both products of attention for ``pairs`` (query, key) pairs per layer and head."""
    return 4.0 * config.n_layers * config.n_heads * config.head_dim * pairs


def forward_flops(config: ModelConfig, *, tokens: int, pairs: float, logits: int) -> float:
    """One forward pass over ``tokens`` tokens of which ``logits`` are unembedded."""
    return 2.0 * layer_weights(config) * tokens + attention_flops(config, pairs) + 2.0 * config.d_model * config.vocab_size * logits


def train_flops(config: ModelConfig, *, rows: int, length: int, trained: int) -> float:
    """Forward and backward of ``rows`` sequences of ``length`` tokens, ``trained`` of each unembedded."""
    pairs = rows * length * (length + 1) / 2
    return 3.0 * forward_flops(config, tokens=rows * length, pairs=pairs, logits=rows * trained)
