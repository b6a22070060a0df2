"""The importance ratio between the policy being trained and the one that sampled.

Owns: token and sequence ratios, and the record a policy loss returns.
Promises: masked slots may hold anything, NaN included: they give ratio 1 and no gradient; the ratio is finite for finite log-probs, because
the log-ratio is clipped to +-20 (its gradient is 0 beyond that).
Does not: clip the ratio for a particular algorithm.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

RatioLevel = Literal["token", "sequence"]

LOG_RATIO_LIMIT = 20.0  # exp(20) = 4.9e8: large enough to never touch a useful ratio, small enough to square in float32


class TokenLoss(NamedTuple):
    """A policy loss before aggregation: per-token ``loss`` to minimise, the unclipped ``ratio``, and where the clip took effect."""

    loss: Float[Array, "B N"]
    ratio: Float[Array, "B N"]
    clipped: Bool[Array, "B N"]


def importance_ratio(
    logps: Float[Array, "B N"],
    behaviour_logps: Float[Array, "B N"],
    mask: Bool[Array, "B N"],
    level: RatioLevel = "token",
) -> Float[Array, "B N"]:
    """Ratio of the trained policy to the sampling one, per token; 1 where ``mask`` is False.

    ``token``: exp(logp - behaviour). ``sequence``: exp(mean of logp - behaviour over the row's masked tokens), the same value in the
    whole row: the geometric mean of the token ratios, so a long row does not leave the clip range by its length alone.
    """
    log_ratio = jnp.where(mask, logps, 0.0) - jnp.where(mask, behaviour_logps, 0.0)
    if level == "sequence":
        length = jnp.maximum(jnp.sum(mask, axis=-1, keepdims=True), 1)
        log_ratio = jnp.where(mask, jnp.sum(log_ratio, axis=-1, keepdims=True) / length, 0.0)
    return jnp.exp(jnp.clip(log_ratio, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
