"""A decoder-only transformer as functions of plain parameters: training, prefill and decode call the same ones.

Owns: ``init``, ``hidden_states``, ``unembed``, ``init_cache``. Promises: parameters are a plain nested dict of arrays, complete or refused;
the result for a token depends on the tokens before it in its own row only, never on padding or on other rows.
Does not: sample, compute losses, read files or place arrays on devices.

Sequences are described by ``positions``: 0, 1, 2, ... for tokens and -1 for padding, on any side. Padding is never attended to and never
written to a cache; what comes out at a padding position is finite and meaningless.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from crl_jax.models.cache import KVCache
from crl_jax.models.config import ModelConfig
from crl_jax.models.forward import Execution, forward
from crl_jax.models.layers import Transformer
from crl_jax.models.matmul import matmul
from crl_jax.models.params import Params, check_complete, flatten, unflatten
from crl_jax.models.transposed import from_the_left

__all__ = [
    "Execution",
    "KVCache",
    "ModelConfig",
    "Params",
    "count_params",
    "hidden_states",
    "init",
    "init_cache",
    "param_shapes",
    "unembed",
]


def init(config: ModelConfig, key: Array) -> Params:
    """Fresh float32 parameters. Pure, so ``jax.jit(init, static_argnums=0, out_shardings=...)`` makes them sharded."""
    return _plain(nnx.state(Transformer(config, nnx.Rngs(params=key))))


def param_shapes(config: ModelConfig) -> Params:
    """The tree of ``init`` with ``jax.ShapeDtypeStruct`` leaves."""
    return _plain(_structure(config)[1])


def count_params(config: ModelConfig) -> int:
    """Number of scalars; a tied head counts once."""
    return sum(leaf.size for leaf in jax.tree.leaves(param_shapes(config)))


def hidden_states(
    config: ModelConfig,
    params: Params,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    *,
    cache: KVCache | None = None,
    slots: Int[Array, " B"] | None = None,
    segments: Int[Array, "B T"] | None = None,
    prefixes: Int[Array, "B T"] | None = None,
    read: Int[Array, "B M"] | None = None,
    how: Execution | None = None,
) -> tuple[Float[Array, "B T D"], KVCache | None]:
    """Hidden states after the final norm, and the cache.

    Without ``cache``: a query sees keys of its row whose position is in [0, its own]; ``segments``, ``prefixes``, ``read`` (packed rows,
    states at some positions only) and ``how`` to run it are those of ``forward``.

    With ``cache``: every token is first written at its position of its cache row, then attends to positions [0, its own] of that row.
    ``slots[b]`` is the cache row of row b (distinct for rows that hold tokens; None: all rows in order); other cache rows are returned
    untouched. Positions past the cache's length are dropped, so the caller checks lengths. Donate the cache to have it updated in place.

    Raises ValueError when ``params`` do not fit ``config`` or when ``slots`` come without a cache.
    """
    model = _bind(config, params)
    if cache is None:
        if slots is not None:
            raise ValueError("`slots` name rows of a cache: pass `cache=init_cache(...)` with them")
        return forward(model, tokens, positions, segments=segments, prefixes=prefixes, read=read, how=how or Execution()), None
    if slots is None and tokens.shape[0] != cache.rows:
        raise ValueError(f"{tokens.shape[0]} token rows for a cache of {cache.rows} rows: pass `slots` to say which rows they are")
    return model.cached(tokens, positions, cache, slots)


def unembed(config: ModelConfig, params: Params, hidden: Float[Array, "*d D"], *, decoding: bool = False) -> Float[Array, "*d V"]:
    """Logits in float32, against the embedding table when ``tie_embeddings``. Give it only the positions that need logits.

    ``decoding`` says that nothing will be differentiated, so that a tied table may stand on the left (``models.transposed``).
    """
    if not config.tie_embeddings:
        return matmul(hidden, params["head"]["kernel"], jnp.float32)
    table = params["embed"]["table"]
    if not decoding or hidden.ndim != 2:
        return matmul(hidden, table.T, jnp.float32)
    left = functools.partial(from_the_left, dtype=jnp.float32)
    return jax.lax.platform_dependent(hidden, table, cpu=left, default=lambda x, table: matmul(x, table.T, jnp.float32))


def init_cache(
    config: ModelConfig,
    batch: int,
    length: int,
    dtype: Any = jnp.float32,
    *,
    blocks: Sequence[int] | None = None,
    by_token: bool = False,
) -> KVCache:
    """An empty cache of ``batch`` rows of ``length`` positions, in ``blocks`` of so many positions (None: one) or, in one, ``by_token``.

    The cost of a decode step grows with the blocks that hold a position in use.
    """
    heads, width = config.n_kv_heads, config.head_dim
    sizes = (length,) if blocks is None or by_token else tuple(blocks)
    if sum(sizes) != length:
        raise ValueError(f"blocks of {sizes} positions do not make up {length}: use cache.doubling_blocks({length})")

    def layers(shape: Callable[[int], tuple[int, ...]]) -> tuple[tuple[Array, ...], ...]:
        # separate buffers: a donated one may appear only once
        return tuple(tuple(jnp.zeros(shape(n), dtype) for n in sizes) for _ in range(config.n_layers))

    if by_token:
        k, v = (layers(lambda n: (batch, n, heads, width)) for _ in "kv")
        return KVCache(k, v, by_token=True)
    return KVCache(layers(lambda n: (batch, heads, width, n)), layers(lambda n: (batch, heads, n, width)))


@functools.lru_cache(maxsize=32)
def _structure(config: ModelConfig) -> tuple[Any, Any]:
    """Graph definition and abstract state of the NNX module."""
    return nnx.split(nnx.eval_shape(lambda: Transformer(config, nnx.Rngs(params=jax.random.key(0)))))


def _plain(state: Any) -> Params:
    """NNX state to nested dicts with string keys (NNX lists have integer keys)."""
    return unflatten({".".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(nnx.pure(state))})


def _bind(config: ModelConfig, params: Params) -> Transformer:
    """The NNX module holding ``params``."""
    graph, abstract = _structure(config)
    flat = flatten(params)
    check_complete(flat, flatten(_plain(abstract)), source=f"model `{config.name}`")
    state = nnx.from_flat_state([(path, nnx.Param(flat[".".join(map(str, path))])) for path, _ in nnx.to_flat_state(abstract)])
    return nnx.merge(graph, state)
