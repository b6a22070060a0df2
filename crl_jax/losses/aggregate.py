"""From per-token values to one number, as a total and a count that add exactly.

Owns: the three ways a policy loss is averaged. Promises: the loss of a whole optimiser step is (sum of totals) / (sum of counts),
whatever the split into micro-batches, shards or hosts and whatever the padding; masked values are selected away, so a NaN there is
harmless and a NaN elsewhere surfaces.
Does not: divide: the caller knows when all parts have been added.
"""

from __future__ import annotations

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from crl_jax.records import Sum

Aggregation = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum_norm"]


def aggregate(
    values: Float[Array, "B N"], mask: Bool[Array, "B N"], mode: Aggregation = "token_mean", *, normaliser: float | None = None
) -> Sum:
    """Total and count of ``values`` over the True slots of ``mask``.

    ``token_mean``: sum over tokens / number of tokens (paper Eq. 3). ``seq_mean_token_mean``: sum over rows of the row's token mean /
    number of rows (paper Eq. 5). ``seq_mean_token_sum_norm``: sum over rows of (token sum / ``normaliser``) / number of rows, where
    ``normaliser`` is a constant of the run, in tokens, never a padded length. Rows without a True slot are padding and not counted.
    Raises ValueError when the third mode has no positive ``normaliser`` or another mode is given one.
    """
    if (mode == "seq_mean_token_sum_norm") != (normaliser is not None) or (normaliser is not None and not normaliser > 0):
        raise ValueError("`normaliser` is a positive constant for mode seq_mean_token_sum_norm, and None for the other modes")
    kept = jnp.where(mask, values, 0.0)
    if mode == "token_mean":
        return Sum(jnp.sum(kept), aggregate_count(mask, mode))
    per_row = jnp.sum(kept, axis=-1)
    scale = jnp.maximum(jnp.sum(mask, axis=-1), 1) if normaliser is None else normaliser
    return Sum(jnp.sum(per_row / scale), aggregate_count(mask, mode))


def aggregate_count(mask: Bool[Array, "B N"], mode: Aggregation) -> Int[Array, ""]:
    """The count that ``aggregate`` returns, from the mask alone: the denominator is known before the first micro-batch is run."""
    return jnp.sum(mask) if mode == "token_mean" else jnp.sum(jnp.any(mask, axis=-1))


def masked_sum(values: Float[Array, "B N"], mask: Bool[Array, "B N"]) -> Sum:
    """Token sum and token count: the ``token_mean`` aggregate, for metrics."""
    return aggregate(values, mask, "token_mean")
