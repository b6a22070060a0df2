"""The layers of the transformer, as flax NNX modules.

Owns: RMSNorm, rotary embedding, grouped-query attention (with and without a cache), the gated MLP, the block and the whole network.
Promises: norms, rotary angles and softmax are computed in float32 whatever the parameters' type; query heads are grouped per key/value
head, which is never repeated in memory; a position of -1 is neither attended to nor written to a cache. Does not: know tokenizers, losses
or devices. ``transformer`` is the functional face.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from crl_jax.models.cache import KVCache, attend_cached, reach, write
from crl_jax.models.config import ModelConfig, RopeScaling
from crl_jax.models.matmul import matmul

ACTIVATIONS = {"silu": jax.nn.silu, "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True)}


Place = Callable[[Array], Array]
"""Puts an array where it is to be on a mesh, and its gradient too."""


class Rotary(NamedTuple):
    """Cosine and sine of the rotary angles, float32 ``[B, T, 1, head_dim/2]``."""

    cos: Float[Array, "B T 1 half"]
    sin: Float[Array, "B T 1 half"]


class View(NamedTuple):
    """What one layer makes of the positions: how it rotates, which keys each query sees, and its window in tokens (None: no window)."""

    angles: Rotary
    mask: Bool[Array, "B T S"]
    window: int | None = None


def views(config: ModelConfig, positions: Int[Array, "B T"], keys: Int[Array, "#B S"], mask: Bool[Array, "B T S"]) -> list[View]:
    """The view of each layer, given the positions of queries and keys and which keys a layer without a window sees.

    Layers of one kind share one view, so a model without local layers computes the angles once.
    """
    c = config
    everything = View(rotary(positions, c.head_dim, c.rope_theta, c.rope_scaling), mask)
    if not c.local_layers:
        return [everything] * c.n_layers
    angles = everything.angles if c.local_rope_theta is None else rotary(positions, c.head_dim, c.local_rope_theta)
    near = View(angles, mask & (keys[:, None, :] > positions[:, :, None] - c.window), c.window)
    return [near if layer in c.local_layers else everything for layer in range(c.n_layers)]


def rotary(positions: Int[Array, "B T"], head_dim: int, theta: float, scaling: RopeScaling | None = None) -> Rotary:
    """Angles ``position * theta^(-2i/head_dim)`` (RoFormer, arXiv:2104.09864), the frequencies stretched by ``scaling``."""
    frequency = theta ** (-jnp.arange(head_dim // 2, dtype=jnp.float32) * 2 / head_dim)
    if scaling is not None:
        frequency = stretch(frequency, scaling)
    angle = positions[..., None, None].astype(jnp.float32) * frequency
    # A barrier: every layer's rotation would be fused with its own copy of the sines.
    return Rotary(*jax.lax.optimization_barrier((jnp.cos(angle), jnp.sin(angle))))


def stretch(frequency: Float[Array, " half"], scaling: RopeScaling) -> Float[Array, " half"]:
    """Rotary frequencies (radians per token) after ``scaling``; see ``RopeScaling`` for the rule."""
    slow = frequency / scaling.factor
    if scaling.kind == "linear":
        return slow
    turns = scaling.original_positions * frequency / (2 * jnp.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = jnp.clip((turns - low) / (high - low), 0.0, 1.0)
    return kept * frequency + (1 - kept) * slow


def rotate(x: Float[Array, "B T H h"], angles: Rotary) -> Float[Array, "B T H h"]:
    """Rotate the pairs (i, i + head_dim/2), the rotate-half convention; float32."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * angles.cos - second * angles.sin, second * angles.cos + first * angles.sin], axis=-1)


class RMSNorm(nnx.Module):
    """x / sqrt(mean(x^2) + eps) * (scale + offset), in float32, returned in the type of x (arXiv:1910.07467). The factor starts at 1."""

    def __init__(self, width: int, eps: float, offset: float = 0.0):
        self.scale = nnx.Param(jnp.full(width, 1.0 - offset, jnp.float32))
        self.eps, self.offset = eps, offset

    def __call__(self, x: Float[Array, "*d D"]) -> Float[Array, "*d D"]:
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.eps)
        scale = self.scale[...].astype(jnp.float32)
        return (wide * (scale + self.offset if self.offset else scale)).astype(x.dtype)


def _matrix(rngs: nnx.Rngs, fan_in: int, fan_out: int, gain: float = 1.0) -> nnx.Param:
    return nnx.Param(jax.random.normal(rngs.params(), (fan_in, fan_out)) * (gain * fan_in**-0.5))


class Attention(nnx.Module):
    """Grouped-query attention with rotary positions; kernels are [in, out] with heads contiguous in the out axis."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, residual_gain: float):
        self.config = config
        q_width, kv_width = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
        self.q = _matrix(rngs, config.d_model, q_width)
        self.k = _matrix(rngs, config.d_model, kv_width)
        self.v = _matrix(rngs, config.d_model, kv_width)
        self.o = _matrix(rngs, q_width, config.d_model, residual_gain)
        if config.qkv_bias:
            self.q_bias, self.k_bias, self.v_bias = (nnx.Param(jnp.zeros(n)) for n in (q_width, kv_width, kv_width))
        if config.qk_norm:
            self.q_norm, self.k_norm = (RMSNorm(config.head_dim, config.norm_eps, config.norm_offset) for _ in "qk")

    def project(self, x: Float[Array, "B T D"], angles: Rotary, place: Place = lambda wide: wide) -> tuple[Array, Array, Array]:
        """q (scaled), k, v, each ``[B, T, heads, head_dim]``, q and k rotated."""
        c = self.config
        q, k, v = place(matmul(x, self.q[...])), place(matmul(x, self.k[...])), place(matmul(x, self.v[...]))
        if c.qkv_bias:
            q, k, v = q + self.q_bias[...], k + self.k_bias[...], v + self.v_bias[...]
        q, k, v = (y.reshape(*x.shape[:2], -1, c.head_dim) for y in (q, k, v))
        if c.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, angles) * (c.query_scale or c.head_dim**-0.5), rotate(k, angles)
        return place(q.astype(x.dtype)), place(k.astype(x.dtype)), place(v.astype(x.dtype))


class MLP(nnx.Module):
    """Gated MLP: (activation(x gate) * (x up)) down; SwiGLU with silu (arXiv:2002.05202)."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, residual_gain: float):
        self.activation = config.activation
        self.gate = _matrix(rngs, config.d_model, config.d_ff)
        self.up = _matrix(rngs, config.d_model, config.d_ff)
        self.down = _matrix(rngs, config.d_ff, config.d_model, residual_gain)

    def __call__(self, x: Float[Array, "B T D"], place: Place = lambda wide: wide) -> Float[Array, "B T D"]:
        gate, up = place(matmul(x, self.gate[...])), place(matmul(x, self.up[...]))
        return matmul(place(ACTIVATIONS[self.activation](gate) * up), self.down[...])


class Block(nnx.Module):
    """Pre-norm residual block. Matrices that write to the residual start 1/sqrt(2 n_layers) smaller, so its variance does not grow with
    depth.
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        gain = (2 * config.n_layers) ** -0.5
        norm = functools.partial(RMSNorm, config.d_model, config.norm_eps, config.norm_offset)
        self.attn_norm = norm()
        self.attn = Attention(config, rngs, gain)
        self.mlp_norm = norm()
        self.mlp = MLP(config, rngs, gain)
        self.post_norms = config.post_norms
        if config.post_norms:
            self.attn_post_norm, self.mlp_post_norm = norm(), norm()

    def finish(self, x: Float[Array, "B T D"], attended: Float[Array, "B T D"], place: Place = lambda wide: wide) -> Float[Array, "B T D"]:
        """The residual ``x`` with what attention found added, and then what the MLP makes of it; ``place`` puts its wide arrays."""
        x = x + (self.attn_post_norm(attended) if self.post_norms else attended)
        out = self.mlp(self.mlp_norm(x), place)
        return x + (self.mlp_post_norm(out) if self.post_norms else out)


class Embedding(nnx.Module):
    """Token table ``[V, D]``, initial standard deviation 0.02."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.table = nnx.Param(jax.random.normal(rngs.params(), (config.vocab_size, config.d_model)) * 0.02)


class Head(nnx.Module):
    """Untied output matrix ``[D, V]``."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.kernel = nnx.Param(jax.random.normal(rngs.params(), (config.d_model, config.vocab_size)) * 0.02)


class Transformer(nnx.Module):
    """Embedding, blocks, final norm; the head is applied by ``transformer.unembed`` to the positions that need it."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.config = config
        self.embed = Embedding(config, rngs)
        self.layers = nnx.List([Block(config, rngs) for _ in range(config.n_layers)])
        self.final_norm = RMSNorm(config.d_model, config.norm_eps, config.norm_offset)
        if not config.tie_embeddings:
            self.head = Head(config, rngs)

    def embedded(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """The residual stream before the first block."""
        x = self.embed.table[...][tokens]
        return x if self.config.embed_scale == 1 else x * jnp.asarray(self.config.embed_scale, x.dtype)

    def cached(
        self, tokens: Int[Array, "B T"], positions: Int[Array, "B T"], cache: KVCache, rows: Int[Array, " B"] | None
    ) -> tuple[Float[Array, "B T D"], KVCache]:
        """Final hidden states of new tokens after those in ``cache``, and the cache with them. ``rows`` None: row i is cache row i."""
        slots = jnp.arange(cache.length)
        sees = views(self.config, positions, slots[None], slots <= positions[:, :, None])
        new = reach(cache, positions, rows)
        x = self.embedded(tokens)
        keys, values = [], []
        for layer, (block, (angles, mask, _)) in enumerate(zip(self.layers, sees, strict=True)):
            q, k, v = block.attn.project(block.attn_norm(x), angles)
            all_k, all_v = write(cache, layer, k, v, new)
            keys.append(all_k)
            values.append(all_v)
            x = block.finish(x, matmul(attend_cached(q, all_k, all_v, mask, new, cache.by_token).astype(x.dtype), block.attn.o[...]))
        return self.final_norm(x), KVCache(tuple(keys), tuple(values), cache.by_token)
