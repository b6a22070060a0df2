"""The pass over whole sequences that training differentiates: packing, rematerialisation, scan over layers, mixed precision.

Owns: how a step runs the layers. Promises: none of ``Execution``'s choices changes the result beyond rounding; parameters stay in the list
form that files, rules and decoding use. Does not: know losses or caches.

Layers are stored one by one because decoding is 2-3 times slower on CPU with a stacked array, and files name them one by one. With
``scan_layers`` they are stacked inside the step: one more copy of the weights, for a program whose size does not grow with depth.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from crl_jax.models.attention import Attend, Scope, einsum_attention, visible
from crl_jax.models.config import ModelConfig
from crl_jax.models.layers import Block, Rotary, Transformer, View, views
from crl_jax.models.matmul import PRODUCT, matmul

Remat = Literal["none", "full", "dots", "attention"]
"""What the backward pass recomputes: nothing; each layer from its input; all but the products with weights; or all but queries, keys,
values and what attention found (names ``qkv`` and ``attended``), so that the widest arrays, those of the MLP, are not kept."""


@dataclasses.dataclass(frozen=True)
class Execution:
    """How to run the layers. ``dtype`` is the type of the activations (None: that of the parameters); ``whole_rows`` says that ``attend``
    takes all queries of a row or none; ``residual`` is the placement of the activations between layers and ``wide`` that of queries, keys,
    values and the MLP's hidden layer (None: the compiler's choice).
    """

    remat: Remat = "none"
    scan_layers: bool = False
    dtype: Any = None
    attend: Attend = einsum_attention
    whole_rows: bool = False
    residual: jax.sharding.Sharding | None = None
    wide: jax.sharding.Sharding | None = None


PLAIN = Execution()

_MIXED = "scan_layers needs layers of one kind, but this model mixes local and global attention: set scan_layers=false"


def check_scan(config: ModelConfig) -> None:
    """Raises ValueError when the layers of ``config`` before its last are not of one kind, so that ``scan_layers`` cannot run them."""
    if len({layer in config.local_layers for layer in range(config.n_layers - 1)}) > 1:
        raise ValueError(_MIXED)


def forward(
    model: Transformer,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    *,
    segments: Int[Array, "B T"] | None = None,
    prefixes: Int[Array, "B T"] | None = None,
    read: Int[Array, "B M"] | None = None,
    how: Execution = PLAIN,
) -> Float[Array, "B M D"]:
    """Final hidden states at the positions ``read`` of each row (None: all of them, M = T).

    ``segments`` numbers the sequences packed into a row and ``prefixes`` says which sequence each token continues (its own when it
    continues none); None: one sequence per row. The last layer runs its queries and its MLP for ``read`` only.
    """
    everything = visible(positions, segments, prefixes)
    ids = jnp.where(positions >= 0, 0, -1) if segments is None else segments
    seen = views(model.config, positions, positions, everything)
    layers = [(*nnx.split(block), view) for block, view in zip(model.layers, seen, strict=True)]
    x = model.embedded(tokens)
    x = _placed(x if how.dtype is None else x.astype(how.dtype), how.residual)

    def apply(graph: Any, view: View, state: Any, x: Array, read: Array | None = None) -> Array:
        return _layer(graph, view.window, how, state, x, view.angles, view.mask, ids, prefixes, read)

    body = layers if read is None else layers[:-1]
    if how.scan_layers and len(body) > 1:
        x = _scan(body, x, apply, how.remat)
    else:
        for graph, state, view in body:
            x = _remat(functools.partial(apply, graph, view), how.remat)(state, x)
    if read is not None:
        graph, state, view = layers[-1]
        x = _remat(functools.partial(apply, graph, view), how.remat)(state, x, read)
    return model.final_norm(x)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _layer(
    graph: Any,
    window: int | None,
    how: Execution,
    state: Any,
    x: Float[Array, "B T D"],
    angles: Rotary,
    mask: Bool[Array, "B T T"],
    segments: Int[Array, "B T"],
    prefixes: Int[Array, "B T"] | None,
    read: Int[Array, "B M"] | None,
) -> Array:
    """One block. Compiled as a part of the step; being a function of its own, it is traced and differentiated once for all layers."""
    block: Block = nnx.merge(graph, state)
    scope = Scope(mask, segments, prefixes, window)
    place = functools.partial(_placed, where=how.wide)
    q, k, v = (checkpoint_name(y, "qkv") for y in block.attn.project(block.attn_norm(x), angles, place))
    early = read is not None and not how.whole_rows and q.shape[1] > read.shape[1]  # else picking would not save work
    if read is not None and early:
        q = jnp.take_along_axis(q, read[:, :, None, None], axis=1)
        scope = scope._replace(mask=jnp.take_along_axis(mask, read[:, :, None], axis=1))
    attended = checkpoint_name(how.attend(q, k, v, scope).astype(x.dtype), "attended")
    if read is not None:
        x = jnp.take_along_axis(x, read[:, :, None], axis=1)
        attended = attended if early else jnp.take_along_axis(attended, read[:, :, None], axis=1)
    return _placed(block.finish(x, matmul(place(attended), block.attn.o[...]), place), how.residual)


def _placed(x: Array, where: jax.sharding.Sharding | None) -> Array:
    """Activations between layers split over the sequence too: what the backward pass keeps of each layer is then split as well, and the
    all-reduce after attention and MLP becomes a reduce-scatter and an all-gather (arXiv:2205.05198). The arrays inside a layer
    are placed as well, for the compiler would otherwise split their gradients along the sequence and move them there and back.
    """
    return x if where is None else jax.lax.with_sharding_constraint(x, where)


def _remat(function: Callable[..., Array], remat: Remat) -> Callable[..., Array]:
    policies = jax.checkpoint_policies
    if remat == "none":
        return function
    if remat == "full":
        return jax.checkpoint(function)
    if remat == "dots":
        return jax.checkpoint(function, policy=policies.save_only_these_names(PRODUCT))
    return jax.checkpoint(function, policy=policies.save_only_these_names("qkv", "attended"))


def _scan(layers: list[tuple[Any, Any, View]], x: Array, apply: Callable[..., Array], remat: Remat) -> Array:
    """The layers as one loop over their stacked parameters. Raises ValueError when they are not all of one kind."""
    graph, _, view = layers[0]
    if any(other is not view for _, _, other in layers):
        raise ValueError(_MIXED)
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(state for _, state, _ in layers))

    def body(x: Array, state: Any) -> tuple[Array, None]:
        return _remat(functools.partial(apply, graph, view), remat)(state, x), None

    return jax.lax.scan(body, x, stacked)[0]
