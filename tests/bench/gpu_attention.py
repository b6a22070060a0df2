"""Ways to attend over packed rows on an NVIDIA GPU: the library's own, and two candidates for it, with a check against the definition.

``library``   what roles use: ``attention.attention_for(best_kernel(...))``. On a GPU that is cuDNN with the mask passed as an additive bias
              [B, 1, T, S]; cuDNN then computes all T x S blocks and, in the backward pass, a gradient of the bias that nobody reads.
``causal``    the same with ``is_causal``: cuDNN skips blocks above the diagonal. Keys of a packed row always lie before their queries, so
              the result is the same; needs whole rows. Public API.
``segments``  cuDNN's packed layout: lengths and offsets of the sequences instead of a mask, so no T x T array and no work between
              sequences. Needs a Hopper card or newer, cannot share prefixes, and JAX has it behind a private module only
              (``jax._src.cudnn.fused_attention_stablehlo``, read at 0.10.2). That module scales the offsets of keys by the number of query
              heads, so keys and values are repeated to as many heads here.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from crl_jax.models.attention import Attend, Scope, attention_for, best_kernel, einsum_attention, visible
from crl_jax.models.config import ModelConfig

TOLERANCE = 0.03  # of the largest entry: bfloat16 rounds at 0.004, and a backward pass does so several times
MOST_SEGMENTS = 8  # sequences of a row, at most


def variants(platform: str) -> dict[str, tuple[Attend, bool]]:
    """Name -> (attention, whether it needs whole rows), for ``jax.Device.platform``."""
    own = attention_for(best_kernel(platform, np.dtype(jnp.bfloat16), shared_prefixes=False))
    return {"library": (own, False), "causal": (causal_attention, True), "segments": (segment_attention, True)}


def causal_attention(q: Any, k: Any, v: Any, scope: Scope) -> Any:
    """cuDNN with the mask as a bias, and the blocks above the diagonal left out."""
    out = jax.nn.dot_product_attention(q, k, v, mask=scope.mask[:, None], scale=1.0, is_causal=True, implementation="cudnn")
    return out.reshape(*q.shape[:2], -1)


def segment_attention(q: Any, k: Any, v: Any, scope: Scope) -> Any:
    """cuDNN's packed layout. Padding must be at the end of a row; there cuDNN writes nothing, neither the output nor gradients, so both are
    selected away."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    if scope.window is not None or scope.prefixes is not None:
        raise ValueError("the packed layout has neither windows nor shared prefixes")
    lengths, starts = layout(scope.segments)
    group, tokens = q.shape[2] // k.shape[2], (scope.segments >= 0)[..., None]
    q, k, v = (jnp.where(tokens[..., None], x, 0) for x in (q, k, v))
    k, v = jnp.repeat(k, group, axis=2), jnp.repeat(v, group, axis=2)
    out = cudnn.dot_product_attention(
        q, k, v, q_seqlen=lengths, kv_seqlen=lengths, q_offsets=starts, kv_offsets=starts, scale=1.0,
        mask_type=cudnn.MaskType.PADDING_CAUSAL,
    )  # fmt: skip
    return jnp.where(tokens, out.reshape(*q.shape[:2], -1), 0)


def layout(segments: Any) -> tuple[Any, Any]:
    """Lengths [B, M] and starts [B, M + 1] of the sequences of each row, -1 where there is none, by their numbers [B, T] (-1: padding)."""
    counts = jnp.sum(segments[:, None, :] == jnp.arange(MOST_SEGMENTS)[None, :, None], axis=-1, dtype=jnp.int32)
    ends = jnp.cumsum(counts, axis=1, dtype=jnp.int32)
    none = counts == 0
    starts = jnp.where(none, -1, ends - counts)
    return jnp.where(none, -1, counts), jnp.pad(starts, ((0, 0), (0, 1)), constant_values=-1)


def agreement(attend: Attend, config: ModelConfig) -> float:
    """The largest error of ``attend`` and of its gradients in bfloat16 against einsum in float32, relative to the largest entry.

    Two rows of 256 tokens with two and three sequences and padding. Raises ValueError above ``TOLERANCE``.
    """
    rng, t = np.random.default_rng(0), 256
    segments = np.full((2, t), -1, np.int32)
    segments[0, :150], segments[0, 150:250] = 0, 1
    segments[1, :10], segments[1, 10:138], segments[1, 138:200] = 0, 1, 2
    positions = np.full((2, t), -1, np.int32)
    for row, segment in ((0, 0), (0, 1), (1, 0), (1, 1), (1, 2)):
        where = np.flatnonzero(segments[row] == segment)
        positions[row, where] = np.arange(len(where))
    scope = Scope(visible(jnp.asarray(positions), jnp.asarray(segments), None), jnp.asarray(segments), None)
    h = config.head_dim
    q, k, v = (jnp.asarray(rng.normal(size=(2, t, n, h)) * s, jnp.bfloat16) for n, s in zip(_heads(config), (h**-0.5, 1, 1), strict=True))
    weights = jnp.asarray(rng.normal(size=(2, t, config.n_heads * h)) * (segments >= 0)[..., None], jnp.float32)

    def results(attend: Attend, *qkv: Any) -> tuple[Any, ...]:
        def loss(*qkv: Any) -> tuple[Any, Any]:
            out = jnp.where((scope.segments >= 0)[..., None], attend(*qkv, scope).astype(jnp.float32), 0)
            return jnp.sum(out * weights), out

        gradients, out = jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(*qkv)
        return (out, *gradients)

    got = jax.jit(lambda *qkv: results(attend, *qkv))(q, k, v)
    exact = jax.jit(lambda *qkv: results(einsum_attention, *qkv))(*(x.astype(jnp.float32) for x in (q, k, v)))
    errors = [float(jnp.max(jnp.abs(a.astype(jnp.float32) - b)) / jnp.max(jnp.abs(b))) for a, b in zip(got, exact, strict=True)]
    if not max(errors) <= TOLERANCE:
        raise ValueError(f"this attention is wrong: relative errors of output, dq, dk and dv {errors}, allowed {TOLERANCE}")
    return max(errors)


def _heads(config: ModelConfig) -> tuple[int, int, int]:
    return config.n_heads, config.n_kv_heads, config.n_kv_heads
