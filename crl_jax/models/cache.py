"""The key/value cache of a model, in blocks of positions, and attention that reads only the blocks in use.

Owns: the layout of the cache, writing to it, copying a row out and in, and attention over it. Promises: positions beyond the furthest
query lie in blocks that are not read at all (but for the block that holds it); the result does not depend on how the cache is divided, up
to rounding. Does not: know layers' weights, slots or platforms: who makes a cache chooses its blocks (``transformer.init_cache``).

A decode step reads the whole cache unless told not to, and XLA has no product of dynamic length: slicing the used part out copies it, which
costs more than reading everything (measured on CPU). An array per block needs no copy, and a condition per block skips it. Blocks double in
size, so that at most about twice the positions in use are read, whatever the length, with few conditions to compile.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from crl_jax.models.attention import MASKED, attend, group_queries, ungroup

FIRST_BLOCK = 128  # positions; smaller ones would save less than a condition costs


Layout = Literal["whole", "blocks", "tokens"]
"""``whole``: one block; ``blocks``: ``doubling_blocks``; ``tokens``: one block with a token's heads side by side (``KVCache.by_token``)."""


@functools.partial(jax.tree_util.register_dataclass, data_fields=["k", "v"], meta_fields=["by_token"])
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Keys and values of every layer, one array per layer and block of positions: keys ``[rows, kv_heads, head_dim, length]``, values
    ``[rows, kv_heads, length, head_dim]``, so that both products of attention are plain ones.

    Separate arrays per layer and heads before slots are 2-4 times faster on CPU than one stacked array.

    With ``by_token`` keys and values are ``[rows, length, kv_heads, head_dim]``: a new token is then one piece of memory. The compiler for
    TPUs arranges the cache so inside the decode loop in any case, and copies all of it there and back when it comes arranged otherwise.
    """

    k: tuple[tuple[Float[Array, "rows K h S"], ...], ...]
    v: tuple[tuple[Float[Array, "rows K S h"], ...], ...]
    by_token: bool = False

    @property
    def length(self) -> int:
        """Positions each row can hold."""
        return sum(block.shape[1 if self.by_token else 2] for block in self.v[0])

    @property
    def rows(self) -> int:
        """Sequences it can hold."""
        return self.v[0][0].shape[0]


class Reach(NamedTuple):
    """What new tokens do to a cache: their positions (past the end: not written), the cache row of each row (None: all in order), and how
    many positions the furthest query sees.
    """

    at: Int[Array, "B T"]
    rows: Int[Array, " B"] | None
    used: Int[Array, ""]


def doubling_blocks(length: int) -> tuple[int, ...]:
    """Sizes of the blocks of ``length`` positions: each as large as all before it together; a short rest belongs to the last."""
    sizes, end = [min(FIRST_BLOCK, length)], min(FIRST_BLOCK, length)
    while end < length:
        size = min(end, length - end)
        if size < FIRST_BLOCK or length - end - size < FIRST_BLOCK:
            size = length - end
        if size < FIRST_BLOCK:
            sizes[-1] += size
        else:
            sizes.append(size)
        end += size
    return tuple(sizes)


def reach(cache: KVCache, positions: Int[Array, "B T"], rows: Int[Array, " B"] | None) -> Reach:
    """What tokens at ``positions`` do to ``cache``."""
    # A negative index counts from the end before `drop` looks at it, so padding is sent past the end instead.
    return Reach(jnp.where(positions < 0, cache.length, positions), rows, jnp.max(positions) + 1)


def write(
    cache: KVCache, layer: int, k: Float[Array, "B T K h"], v: Float[Array, "B T K h"], new: Reach
) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    """The layer's blocks of keys and of values with the new ones in them; positions past the end are dropped."""
    rows = (jnp.arange(k.shape[0]) if new.rows is None else new.rows)[:, None]
    if cache.by_token:
        new_k, new_v = (
            old.at[rows, new.at].set(y.astype(old.dtype), mode="drop") for (old,), y in ((cache.k[layer], k), (cache.v[layer], v))
        )
        return (new_k,), (new_v,)
    keys, values = [], []
    for old_k, old_v, (start, end) in _blocks(cache.k[layer], cache.v[layer]):
        inside = (new.at >= start) & (new.at < end)
        index = jnp.where(inside, new.at - start, end - start)
        keys.append(old_k.at[rows, :, :, index].set(k.astype(old_k.dtype), mode="drop"))
        values.append(old_v.at[rows, :, index].set(v.astype(old_v.dtype), mode="drop"))
    return tuple(keys), tuple(values)


def attend_cached(
    q: Float[Array, "B T H h"],
    keys: tuple[Array, ...],
    values: tuple[Array, ...],
    mask: Bool[Array, "B T S"],
    new: Reach,
    by_token: bool = False,
) -> Float[Array, "B T H*h"]:
    """Grouped-query attention over a layer's blocks (``attention.attend``), a block after the other with a running softmax (Milakov and
    Gimelshein, arXiv:1805.02867). Blocks that start beyond what any query sees are skipped.
    """

    def of_rows(block: Array) -> Array:
        return block if new.rows is None else block[new.rows]

    if len(keys) == 1:
        k, v = of_rows(keys[0]), of_rows(values[0])
        return attend(q, k.transpose(0, 2, 3, 1), v.transpose(0, 2, 1, 3), mask) if by_token else attend(q, k, v, mask)
    grouped = group_queries(q, keys[0].shape[1])
    state: _Running | None = None
    for k, v, (start, end) in _blocks(keys, values):

        def add(before: _Running | None, k: Array = k, v: Array = v, part: slice = slice(start, end)) -> _Running:
            return _add_block(grouped, of_rows(k), of_rows(v), mask[:, :, part], before)

        state = add(None) if state is None else jax.lax.cond(new.used > start, add, lambda before: before, state)
    assert state is not None
    return ungroup(state.out / state.mass[..., None], q.shape[1])


def read_row(cache: KVCache, row: Int[Array, ""], length: int) -> KVCache:
    """The first ``length`` positions of one row, as a cache of one row in the same blocks, the last one cut."""

    def take(layer: tuple[Array, ...], axis: int) -> tuple[Array, ...]:
        starts = [0, *itertools.accumulate(block.shape[axis] for block in layer)]
        return tuple(
            jax.lax.slice_in_dim(jax.lax.dynamic_slice_in_dim(x, row, 1, 0), 0, min(length - start, x.shape[axis]), axis=axis)
            for x, start in zip(layer, starts, strict=False)
            if start < length
        )

    of_k, of_v = (1, 1) if cache.by_token else (3, 2)
    return KVCache(tuple(take(layer, of_k) for layer in cache.k), tuple(take(layer, of_v) for layer in cache.v), cache.by_token)


def write_row(cache: KVCache, row: Int[Array, ""], piece: KVCache) -> KVCache:
    """``cache`` with ``piece`` (see ``read_row``) at the beginning of one row."""

    def put(layer: tuple[Array, ...], new: tuple[Array, ...]) -> tuple[Array, ...]:
        written = [jax.lax.dynamic_update_slice(x, y.astype(x.dtype), (row, 0, 0, 0)) for x, y in zip(layer, new, strict=False)]
        return (*written, *layer[len(written) :])

    return KVCache(tuple(map(put, cache.k, piece.k)), tuple(map(put, cache.v, piece.v)), cache.by_token)


class _Running(NamedTuple):
    """Attention over the blocks so far: largest score, sum of the weights relative to it, and the weighted values."""

    top: Float[Array, "B K M"]
    mass: Float[Array, "B K M"]
    out: Float[Array, "B K M h"]


def _add_block(q: Float[Array, "B K M h"], k: Array, v: Array, mask: Bool[Array, "B T S"], before: _Running | None) -> _Running:
    b, kv, m, _ = q.shape
    scores = jnp.einsum("bkmh,bkhs->bkms", q, k, preferred_element_type=jnp.float32).reshape(b, kv, -1, *mask.shape[1:])
    scores = jnp.where(mask[:, None, None], scores, MASKED).reshape(b, kv, m, -1)
    top = jnp.max(scores, axis=-1)
    top = top if before is None else jnp.maximum(top, before.top)
    weights = jnp.exp(scores - top[..., None])
    mass = jnp.sum(weights, axis=-1)
    out = jnp.einsum("bkms,bksh->bkmh", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
    if before is None:
        return _Running(top, mass, out)
    kept = jnp.exp(before.top - top)
    return _Running(top, mass + kept * before.mass, out + kept[..., None] * before.out)


def _blocks(keys: tuple[Array, ...], values: tuple[Array, ...]) -> Iterator[tuple[Array, Array, tuple[int, int]]]:
    """Keys, values and the positions [start, end) of each block."""
    end = 0
    for k, v in zip(keys, values, strict=True):
        start, end = end, end + v.shape[2]
        yield k, v, (start, end)
