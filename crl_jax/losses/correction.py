"""Policy gradient with an importance weight for what lies between the policy that sampled and the one that is trained: other weights (an
asynchronous run) and another engine.

Owns: the weights and the loss that is multiplied with them, an alternative to the clipped surrogate of ``losses.grpo`` (whose ratio
corrects the same gap).
Promises: d loss / d logp = -weight x A, the weight without gradient; masked slots have weight 1 and may hold anything.
Does not: aggregate, or compute advantages.

``none``    weight 1: right only for samples of exactly the trained policy.
``tis``     min(rho, high): truncated importance sampling. Large ratios would raise the variance, small ones are kept.
``icepop``  rho inside [low, high], 0 outside: tokens on which the two disagree too much teach nothing.
rho is the ratio of the token, or (level ``sequence``) the product of the row's ratios, the same for all its tokens.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from crl_jax.losses.ratio import LOG_RATIO_LIMIT, RatioLevel, TokenLoss, importance_ratio

Correction = Literal["none", "tis", "icepop"]


def corrected_loss(
    logps: Float[Array, "B N"],
    behaviour_logps: Float[Array, "B N"],
    advantages: Float[Array, "B N"],
    mask: Bool[Array, "B N"],
    *,
    correction: Correction,
    level: RatioLevel = "token",
    low: float = 0.5,
    high: float = 2.0,
) -> TokenLoss:
    """loss = -sg(weight) A logp per token; 0 where ``mask`` is False. ``clipped`` marks tokens whose weight is not rho itself.

    Raises ValueError unless 0 <= low <= 1 <= high: both are values of the ratio, not distances from 1.
    """
    if not 0.0 <= low <= 1.0 <= high:
        raise ValueError(f"low {low} and high {high} are values of the ratio itself: 0 <= low <= 1 <= high")
    rho = jax.lax.stop_gradient(
        _product(logps, behaviour_logps, mask) if level == "sequence" else importance_ratio(logps, behaviour_logps, mask)
    )
    weight = jnp.clip(rho, 1.0, 1.0)  # none
    if correction == "tis":
        weight = jnp.minimum(rho, high)
    elif correction == "icepop":
        weight = jnp.where((rho >= low) & (rho <= high), rho, 0.0)
    gain = jnp.where(mask, advantages, 0.0)
    return TokenLoss(-weight * gain * jnp.where(mask, logps, 0.0), rho, mask & (weight != rho))


def _product(logps: Float[Array, "B N"], behaviour_logps: Float[Array, "B N"], mask: Bool[Array, "B N"]) -> Float[Array, "B N"]:
    """The ratio of the whole row's probability, in each of its trained tokens; 1 elsewhere."""
    log_ratio = jnp.where(mask, logps, 0.0) - jnp.where(mask, behaviour_logps, 0.0)
    total = jnp.sum(log_ratio, axis=-1, keepdims=True)
    return jnp.where(mask, jnp.exp(jnp.clip(total, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)), 1.0)
