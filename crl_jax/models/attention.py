"""Attention over whole (packed) sequences in training: one interface, one implementation per platform.

Owns: which key a query sees, the implementations, and the choice between them. Promises: every implementation gives the result of
``einsum_attention`` at positions that hold tokens; what comes out at padding is finite and meaningless.
Does not: read or write caches (``layers``).

Keys and queries come as ``[B, T, heads, head_dim]``, queries scaled and rotated, tokens of a sequence in order along T.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

MASKED = -1e30  # finite, so that a row with nothing to attend to (padding) stays finite
QUERY_BLOCK = 128  # queries of one block of ``einsum_attention``; the keys after the block are left out

Kernel = Literal["einsum", "cudnn", "splash"]


class Scope(NamedTuple):
    """What each query of one layer may attend to.

    ``mask`` is the whole rule. The rest is what a kernel needs to build it block by block: the sequence each token belongs to (-1 at
    padding), the sequence it continues (None when no sequence is shared), and the layer's window in tokens (None: no window).
    """

    mask: Bool[Array, "B Q S"]
    segments: Int[Array, "B S"]
    prefixes: Int[Array, "B S"] | None
    window: int | None = None


Attend = Callable[[Array, Array, Array, Scope], Array]


def visible(positions: Int[Array, "B T"], segments: Int[Array, "B T"] | None, prefixes: Int[Array, "B T"] | None) -> Bool[Array, "B T T"]:
    """Mask of whole rows: a query sees the tokens before it and itself, in its own sequence and in the one it continues."""
    mask = (positions[:, None, :] <= positions[:, :, None]) & (positions[:, None, :] >= 0)
    if segments is None:
        return mask
    own = segments[:, None, :] == segments[:, :, None]
    return mask & (own if prefixes is None else own | (segments[:, None, :] == prefixes[:, :, None]))


def einsum_attention(
    q: Float[Array, "B Q H h"], k: Float[Array, "B S K h"], v: Float[Array, "B S K h"], scope: Scope
) -> Float[Array, "B Q H*h"]:
    """Grouped-query attention as plain products, in blocks of queries that leave out the keys after them.

    With as many queries as keys, both in the order of T, a block of queries needs the keys up to its end only: about half the work.
    Queries that were picked from the rows (Q != S) see all keys.
    """
    k, v = k.transpose(0, 2, 3, 1), v.transpose(0, 2, 1, 3)
    length = q.shape[1]
    if length != k.shape[3] or length <= QUERY_BLOCK:
        return attend(q, k, v, scope.mask)
    size = max(QUERY_BLOCK, -(-length // 8))  # at most 8 blocks: each is a part of the program
    blocks = [(start, min(start + size, length)) for start in range(0, length, size)]
    parts = [attend(q[:, a:b], k[..., :b], v[:, :, :b], scope.mask[:, a:b, :b]) for a, b in blocks]
    return jnp.concatenate(parts, axis=1)


def attend(
    q: Float[Array, "B T H h"], k: Float[Array, "B K h S"], v: Float[Array, "B K S h"], mask: Bool[Array, "B T S"]
) -> Float[Array, "B T H*h"]:
    """Grouped-query attention; ``q`` is already scaled and H = K * group.

    The group and the query axis are merged, so both products are plain batched matrix products over (B, K).
    """
    kv, t = k.shape[1], q.shape[1]
    grouped = group_queries(q, kv)
    scores = jnp.einsum("bkmh,bkhs->bkms", grouped, k, preferred_element_type=jnp.float32)
    scores = jnp.where(mask[:, None, None], scores.reshape(q.shape[0], kv, -1, *mask.shape[1:]), MASKED)
    weights = jax.nn.softmax(scores, axis=-1).reshape(*grouped.shape[:3], -1).astype(v.dtype)
    return ungroup(jnp.einsum("bkms,bksh->bkmh", weights, v), t)


def group_queries(q: Float[Array, "B T H h"], kv_heads: int) -> Float[Array, "B K M h"]:
    """Queries by the key/value head they share; M = group * T."""
    b, t, heads, h = q.shape
    group = heads // kv_heads
    return q.reshape(b, t, kv_heads, group, h).transpose(0, 2, 3, 1, 4).reshape(b, kv_heads, group * t, h)


def ungroup(out: Float[Array, "B K M h"], t: int) -> Float[Array, "B t H*h"]:
    """What was found for grouped queries (``group_queries``), heads side by side."""
    b, kv, m, h = out.shape
    return out.reshape(b, kv, m // t, t, h).transpose(0, 3, 1, 2, 4).reshape(b, t, kv * (m // t) * h)


def cudnn_attention(
    q: Float[Array, "B Q H h"], k: Float[Array, "B S K h"], v: Float[Array, "B S K h"], scope: Scope
) -> Float[Array, "B Q H*h"]:
    """cuDNN's fused kernel through ``jax.nn.dot_product_attention``; half precision only. Raises ValueError for other types."""
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        raise ValueError(f"cuDNN attention needs bfloat16 or float16, not {q.dtype}: set compute_dtype=bfloat16 or use the einsum kernel")
    out = jax.nn.dot_product_attention(q, k, v, mask=scope.mask[:, None], scale=1.0, implementation="cudnn")
    return out.reshape(*q.shape[:2], -1)


def splash_attention(
    q: Float[Array, "B T H h"],
    k: Float[Array, "B T K h"],
    v: Float[Array, "B T K h"],
    scope: Scope,
    *,
    mesh: Mesh | None = None,
    rows: tuple[str, ...] = (),
    heads: str | None = None,
    block: int = 512,
    interpret: bool = False,
) -> Float[Array, "B T H*h"]:
    """The Pallas splash kernel of TPUs: no T x T array in memory, blocks that are masked as a whole are skipped.

    The kernel is not partitioned by the compiler: with ``mesh`` it runs under ``shard_map`` with the batch split over the axes ``rows``
    and heads over the axis ``heads``. ``interpret`` runs it step by step on any platform, for tests. Needs whole rows in order of
    position. Raises ValueError for picked queries and for shared prefixes, which the kernel cannot express.
    """
    if q.shape[1] != k.shape[1]:
        raise ValueError(f"splash attention needs whole rows, got {q.shape[1]} queries for {k.shape[1]} keys: read all positions")
    if scope.prefixes is not None:
        raise ValueError("splash attention cannot share prefixes between sequences: use packing `sequences` or the einsum kernel")
    run = functools.partial(_splash, window=scope.window, block=block, interpret=interpret)
    if mesh is not None:
        spec = PartitionSpec(rows or None, None, heads)
        run = jax.shard_map(run, mesh=mesh, in_specs=(spec, spec, spec, PartitionSpec(rows or None)), out_specs=spec, check_vma=False)
    return run(q, k, v, scope.segments)


def _splash(q: Array, k: Array, v: Array, segments: Array, *, window: int | None, block: int, interpret: bool) -> Array:
    """One device's part. Sequences are padded to whole blocks and heads to the width of a vector register."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    b, t, heads, h = q.shape
    size = min(block, -(-t // 128) * 128)
    padded = -(-t // size) * size
    wide = -(-h // 128) * 128

    def prepare(x: Array) -> Array:
        return jnp.pad(x, ((0, 0), (0, padded - t), (0, 0), (0, wide - h))).transpose(0, 2, 1, 3)

    ids = jnp.pad(segments, ((0, 0), (0, padded - t)), constant_values=-1)
    shape = (padded, padded)
    one = splash.CausalMask(shape) if window is None else splash.LocalMask(shape, (window - 1, 0), offset=0)
    sizes = splash.BlockSizes(
        block_q=size, block_kv=size, block_kv_compute=size, block_q_dkv=size, block_kv_dkv=size, block_kv_dkv_compute=size,
        block_q_dq=size, block_kv_dq=size,
    )  # fmt: skip
    kernel = splash.make_splash_mha(
        splash.MultiHeadMask([one] * heads), block_sizes=sizes, head_shards=1, q_seq_shards=1, interpret=interpret
    )
    out: Any = jax.vmap(kernel)(prepare(q), prepare(k), prepare(v), splash.SegmentIds(ids, ids))
    return out.transpose(0, 2, 1, 3)[:, :t, :, :h].reshape(b, t, heads * h).astype(v.dtype)


def attention_for(kernel: Kernel, mesh: Mesh | None = None) -> Attend:
    """The implementation called ``kernel``, on the project's mesh axes (rows over data and fsdp, heads over tensor)."""
    if kernel == "einsum":
        return einsum_attention
    if kernel == "cudnn":
        return cudnn_attention
    if mesh is None or mesh.size == 1:
        return splash_attention
    return functools.partial(splash_attention, mesh=mesh, rows=("data", "fsdp"), heads="tensor")


def check_kernel(kernel: Kernel, platform: str) -> None:
    """Raises ValueError when ``kernel`` is not made for the devices of ``platform`` (``jax.Device.platform``)."""
    home = {"splash": ("tpu",), "cudnn": ("gpu", "cuda")}.get(kernel, (platform,))
    if platform not in home:
        raise ValueError(f"the {kernel} kernel runs on {home[0].upper()}s only, these devices are of platform {platform}: use auto")


def best_kernel(platform: str, dtype: np.dtype, *, shared_prefixes: bool) -> Kernel:
    """The fastest kernel of a platform (``jax.Device.platform``) that can do the job."""
    if platform == "tpu" and not shared_prefixes:
        return "splash"
    if platform in ("gpu", "cuda") and dtype in (jnp.bfloat16, jnp.float16):
        return "cudnn"
    return "einsum"
