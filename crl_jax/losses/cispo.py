"""The extractor's loss: CISPO, a policy gradient weighted by a clipped importance ratio (paper Eq. 3).

Owns: the per-token loss. Promises: d loss / d logp = -clip(rho, 1 - eps_low, 1 + eps_high) A for every token, inside and outside the
clip range: the ratio is a weight without gradient, so no token is silenced by the clip. Does not: aggregate, or compute advantages.

``eps_low`` and ``eps_high`` are distances from 1: ``eps_high=0.28`` caps the ratio at 1.28. Some code bases name the absolute cap the
same way.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from crl_jax.losses.ratio import TokenLoss, importance_ratio


def cispo_loss(
    logps: Float[Array, "B N"],
    behaviour_logps: Float[Array, "B N"],
    advantages: Float[Array, "B N"],
    mask: Bool[Array, "B N"],
    *,
    eps_low: float = 0.1,
    eps_high: float = 0.1,
) -> TokenLoss:
    """loss = -sg(clip(rho, 1 - eps_low, 1 + eps_high)) A logp per token; 0 where ``mask`` is False.

    ``clipped`` marks tokens whose weight was clipped (they keep their gradient). Raises ValueError unless 0 <= eps_low <= 1 and
    eps_high >= 0, which is the same as a cap of at least 1.
    """
    if not 0.0 <= eps_low <= 1.0:
        raise ValueError(f"eps_low {eps_low} must lie in [0, 1]: the ratio is kept above 1 - eps_low")
    if eps_high < 0.0:
        raise ValueError(f"eps_high {eps_high} must be >= 0: it is added to 1, the ratio is capped at 1 + eps_high")
    rho = jax.lax.stop_gradient(importance_ratio(logps, behaviour_logps, mask))
    weight = jnp.clip(rho, 1.0 - eps_low, 1.0 + eps_high)
    gain = jnp.where(mask, advantages, 0.0)
    return TokenLoss(-weight * gain * jnp.where(mask, logps, 0.0), rho, mask & (weight != rho))
