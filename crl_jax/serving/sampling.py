"""Sampling one token per row from logits, with everything about a request carried by its own row.

Owns: temperature, top-k, top-p, the constraint mask, the random numbers, and the log-probability that is reported.
Promises: a row's token depends only on its logits, its parameters, its seed and its counter, never on its neighbours or its place in the
batch; greedy rows take the lowest id among equals; the reported log-probability is that of the *untruncated* softmax at the row's
temperature over the allowed ids (greedy rows: at temperature 1), because that is what the learner can recompute.
Does not: know about caches, slots or stop ids.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

_EDGE = 1e-6  # float32 rounding of a cumulative sum: a mass within this of top_p counts as reached


class RowParams(NamedTuple):
    """One value per row. ``temperature`` <= 0 is greedy; ``top_k`` 0 and ``top_p`` >= 1 are off; ``state`` 0 is unconstrained."""

    temperature: Float[Array, " B"]
    top_p: Float[Array, " B"]
    top_k: Int[Array, " B"]
    seed: Int[Array, " B"]
    counter: Int[Array, " B"]
    state: Int[Array, " B"]


def sample(
    logits: Float[Array, "B V"], rows: RowParams, allowed: Int[Array, "S A"] | None = None
) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
    """Token ids and their log-probabilities (natural log, see the module's promise).

    ``allowed`` is ``ActionTrie.allowed``; None means that no row is constrained. Random numbers are Gumbel noise from
    fold_in(fold_in(key(0), seed), counter), one draw per vocabulary entry. The sort that top-k and top-p need runs only when some row
    asks for it.
    """
    greedy = rows.temperature <= 0
    scaled = logits.astype(jnp.float32) / jnp.where(greedy, 1.0, rows.temperature)[:, None]
    if allowed is not None:
        scaled = jnp.where(allowed_mask(rows.state, allowed, logits.shape[-1]), scaled, -jnp.inf)
    truncated = (rows.top_p < 1) | (rows.top_k > 0)

    def randomised() -> Int[Array, " B"]:
        kept = jax.lax.cond(jnp.any(truncated & ~greedy), lambda: truncate(scaled, rows.top_k, rows.top_p), lambda: scaled)
        return jnp.argmax(jnp.where(greedy[:, None], scaled, kept + _gumbel(rows, logits.shape[-1])), axis=-1)

    ids = jax.lax.cond(jnp.all(greedy), lambda: jnp.argmax(scaled, axis=-1), randomised).astype(jnp.int32)
    chosen = jnp.take_along_axis(scaled, ids[:, None], axis=-1)[:, 0]
    return ids, chosen - jax.nn.logsumexp(scaled, axis=-1)


def allowed_mask(state: Int[Array, " B"], allowed: Int[Array, "S A"], vocab: int) -> Bool[Array, "B V"]:
    """True where a token may be sampled: everywhere in state 0, otherwise at ``allowed[state]``."""
    ids = allowed[state]
    rows = jnp.arange(state.shape[0])[:, None]
    listed = jnp.zeros((state.shape[0], vocab), bool).at[rows, jnp.where(ids < 0, vocab, ids)].set(True, mode="drop")
    return listed | (state == 0)[:, None]


def truncate(scaled: Float[Array, "B V"], top_k: Int[Array, " B"], top_p: Float[Array, " B"]) -> Float[Array, "B V"]:
    """``scaled`` with -inf outside the kept set: first the ``top_k`` largest, then of those the smallest set whose renormalised mass is
    >= ``top_p``.

    Ties keep the lower id; the largest entry is always kept.
    """
    rank = jnp.arange(scaled.shape[-1])[None]
    order = jnp.argsort(-scaled, axis=-1, stable=True)
    ordered = jnp.take_along_axis(scaled, order, axis=-1)
    in_k = (rank < top_k[:, None]) | (top_k[:, None] <= 0)
    mass = jnp.cumsum(jax.nn.softmax(jnp.where(in_k, ordered, -jnp.inf), axis=-1), axis=-1)
    before = jnp.concatenate([jnp.zeros_like(mass[:, :1]), mass[:, :-1]], axis=-1)
    in_p = (before < top_p[:, None] - _EDGE) | (top_p[:, None] >= 1) | (rank == 0)
    keep = jnp.zeros(scaled.shape, bool).at[jnp.arange(scaled.shape[0])[:, None], order].set(in_k & in_p)
    return jnp.where(keep, scaled, -jnp.inf)


def _gumbel(rows: RowParams, vocab: int) -> Float[Array, "B V"]:
    """Gumbel noise per row from the row's own seed and counter."""
    root = jax.random.key(0, impl="threefry2x32")

    def draw(seed: Int[Array, ""], counter: Int[Array, ""]) -> Float[Array, " V"]:
        return jax.random.gumbel(jax.random.fold_in(jax.random.fold_in(root, seed), counter), (vocab,), jnp.float32)

    return jax.vmap(draw)(rows.seed, rows.counter)
