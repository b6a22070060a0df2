"""Truncated importance sampling: a weight for the mismatch between the engine that sampled and the engine that trains.

Owns: the token weight. Promises: no gradient flows through it, it is 1 at masked slots and never above the cap.
Does not: enter the default objectives. Those take their ratio against the behaviour log-probs directly, which already accounts for
the mismatch; the weight is for a loss whose ratio is taken against log-probs recomputed by the training engine.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from crl_jax.losses.ratio import importance_ratio


def truncated_weights(
    proximal_logps: Float[Array, "B N"], behaviour_logps: Float[Array, "B N"], mask: Bool[Array, "B N"], *, cap: float = 2.0
) -> Float[Array, "B N"]:
    """w = min(exp(proximal - behaviour), cap) per token, to multiply a per-token loss with.

    ``proximal_logps``: log-probs of the sampled weights recomputed by the training engine. Raises ValueError for a cap below 1 (it
    would scale every token down).
    """
    if cap < 1.0:
        raise ValueError(f"cap {cap} must be >= 1: it is the largest weight itself, not a distance from 1")
    return jax.lax.stop_gradient(jnp.minimum(importance_ratio(proximal_logps, behaviour_logps, mask), cap))
