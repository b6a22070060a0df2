"""The actor's loss: the clipped surrogate of GRPO (paper Eq. 5, with advantages from ``losses.advantages``).

Owns: the per-token surrogate. Promises: minimising it raises the probability of tokens with positive advantage, and a token that has
already moved past its clip bound in the direction of its advantage has exactly no gradient. Does not: aggregate, penalise KL, or
reward entropy.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from crl_jax.losses.ratio import RatioLevel, TokenLoss, importance_ratio


def grpo_loss(
    logps: Float[Array, "B N"],
    behaviour_logps: Float[Array, "B N"],
    advantages: Float[Array, "B N"],
    mask: Bool[Array, "B N"],
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    ratio: RatioLevel = "token",
) -> TokenLoss:
    """loss = -min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A) per token; 0 where ``mask`` is False.

    ``clipped`` marks the tokens whose minimum is the clipped branch (those without gradient). Raises ValueError for a negative clip
    width or ``clip_low`` above 1.
    """
    if not (0.0 <= clip_low <= 1.0 and clip_high >= 0.0):
        raise ValueError(f"clip_low {clip_low} must lie in [0, 1] and clip_high {clip_high} be >= 0: they are widths around 1, not bounds")
    rho = importance_ratio(logps, behaviour_logps, mask, ratio)
    gain = jnp.where(mask, advantages, 0.0)
    free = rho * gain
    bounded = jnp.clip(rho, 1.0 - clip_low, 1.0 + clip_high) * gain
    return TokenLoss(-jnp.minimum(free, bounded), rho, mask & (bounded < free))
