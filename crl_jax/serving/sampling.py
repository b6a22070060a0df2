"""Sampling one token per row from logits, with everything about a request carried by its own row.

Owns: temperature, min-p, top-k, top-p, forbidden ids, the constraint mask, and the two log-probabilities reported.
Promises: a row's token depends only on its logits, its parameters, its seed and its counter, never on its neighbours or its place in the
batch; greedy rows take the lowest id among equals; the first log-probability is that of the *untruncated* softmax at the row's
temperature over the allowed ids (greedy rows: at temperature 1), because that is what the learner can recompute; the second is that of
the distribution the token was drawn from (greedy rows: 0).
Does not: draw (``draw``), know about caches, slots or stop ids.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from crl_jax.serving.draw import choose

_EDGE = 1e-6  # float32 rounding of a cumulative sum: a mass within this of top_p counts as reached


class RowParams(NamedTuple):
    """One value per row. ``temperature`` <= 0 is greedy; ``top_k`` 0, ``top_p`` >= 1 and ``min_p`` 0 are off; ``state`` 0 is
    unconstrained; ``forbidden`` is padded with -1.
    """

    temperature: Float[Array, " B"]
    top_p: Float[Array, " B"]
    min_p: Float[Array, " B"]
    top_k: Int[Array, " B"]
    seed: Int[Array, " B"]
    counter: Int[Array, " B"]
    state: Int[Array, " B"]
    forbidden: Int[Array, "B F"]


def sample(
    logits: Float[Array, "B V"], rows: RowParams, allowed: Int[Array, "S A"] | None = None
) -> tuple[Int[Array, " B"], Float[Array, " B"], Float[Array, " B"]]:
    """Token ids and their two log-probabilities (natural log, see the module's promise).

    ``allowed`` is ``ActionTrie.allowed``; None means that no row is constrained. The sort that truncation needs runs only when some
    row asks for it.
    """
    greedy = rows.temperature <= 0
    scaled = logits.astype(jnp.float32) / jnp.where(greedy, 1.0, rows.temperature)[:, None]
    if allowed is not None:
        scaled = jnp.where(allowed_mask(rows.state, allowed, logits.shape[-1]), scaled, -jnp.inf)

    truncated = ((rows.top_p < 1) | (rows.top_k > 0) | (rows.min_p > 0)) & ~greedy
    restricts = truncated | jnp.any(rows.forbidden >= 0, axis=-1)

    def drawn(kept: Float[Array, "B V"]) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
        return choose(kept, greedy, rows.seed, rows.counter)

    def restricted() -> tuple[Int[Array, " B"], Float[Array, " B"], Float[Array, " B"]]:
        free = forbid(scaled, rows.forbidden)
        kept = jax.lax.cond(jnp.any(truncated), lambda: truncate(free, rows), lambda: free)
        return *drawn(kept), jax.nn.logsumexp(scaled, axis=-1)

    def unrestricted() -> tuple[Int[Array, " B"], Float[Array, " B"], Float[Array, " B"]]:
        ids, mass = drawn(scaled)
        return ids, mass, mass

    ids, kept_mass, mass = jax.lax.cond(jnp.any(restricts), restricted, unrestricted)
    chosen = jnp.take_along_axis(scaled, ids[:, None], axis=-1)[:, 0]
    return ids, chosen - mass, jnp.where(greedy, 0.0, chosen - kept_mass)


def allowed_mask(state: Int[Array, " B"], allowed: Int[Array, "S A"], vocab: int) -> Bool[Array, "B V"]:
    """True where a token may be sampled: everywhere in state 0, otherwise at ``allowed[state]``."""
    ids = allowed[state]
    rows = jnp.arange(state.shape[0])[:, None]
    listed = jnp.zeros((state.shape[0], vocab), bool).at[rows, jnp.where(ids < 0, vocab, ids)].set(True, mode="drop")
    return listed | (state == 0)[:, None]


def forbid(scaled: Float[Array, "B V"], forbidden: Int[Array, "B F"]) -> Float[Array, "B V"]:
    """``scaled`` with -inf at each row's forbidden ids (-1: none)."""
    rows = jnp.arange(scaled.shape[0])[:, None]
    return scaled.at[rows, jnp.where(forbidden < 0, scaled.shape[-1], forbidden)].set(-jnp.inf, mode="drop")


def truncate(scaled: Float[Array, "B V"], rows: RowParams) -> Float[Array, "B V"]:
    """``scaled`` with -inf outside the kept set: the entries at least ``min_p`` times as likely as the likeliest, of those the ``top_k``
    largest, of those the smallest set whose renormalised mass is >= ``top_p``.

    Ties keep the lower id; the largest entry is always kept.
    """
    top_k, top_p = rows.top_k[:, None], rows.top_p[:, None]
    rank = jnp.arange(scaled.shape[-1])[None]
    order = jnp.argsort(-scaled, axis=-1, stable=True)
    ordered = jnp.take_along_axis(scaled, order, axis=-1)
    likely = ordered >= ordered[:, :1] + jnp.log(rows.min_p)[:, None]
    in_k = likely & ((rank < top_k) | (top_k <= 0))
    mass = jnp.cumsum(jax.nn.softmax(jnp.where(in_k, ordered, -jnp.inf), axis=-1), axis=-1)
    before = jnp.concatenate([jnp.zeros_like(mass[:, :1]), mass[:, :-1]], axis=-1)
    in_p = (before < top_p - _EDGE) | (top_p >= 1) | (rank == 0)
    keep = jnp.zeros(scaled.shape, bool).at[jnp.arange(scaled.shape[0])[:, None], order].set(in_k & in_p)
    return jnp.where(keep, scaled, -jnp.inf)
