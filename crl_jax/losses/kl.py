"""Estimators of the reverse KL divergence KL(policy || reference) from tokens that the policy sampled.

Owns: k1, k2 and k3. Promises: for finite log-probs, value and gradient are finite. Does not: enter the default objectives (the method
uses no KL term).

With d = logp - ref_logp, and tokens drawn from the policy:

====  =====================  ==========================  ==================================================================
name  value                  expected value              expected gradient when put in a loss (samples held fixed)
====  =====================  ==========================  ==================================================================
k1    d                      KL(policy || ref), exact    0: useless as a loss, good as a metric
k2    d^2 / 2                close to KL for small d     that of KL(policy || ref), exact: use this one as a loss
k3    exp(-d) - 1 + d        KL(policy || ref), exact    that of KL(ref || policy): agrees with the above only near d = 0
====  =====================  ==========================  ==================================================================
"""

from __future__ import annotations

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float

from crl_jax.losses.ratio import LOG_RATIO_LIMIT

Estimator = Literal["k1", "k2", "k3"]


def kl_estimate(logps: Float[Array, "..."], ref_logps: Float[Array, "..."], estimator: Estimator = "k3") -> Float[Array, "..."]:
    """Per-token estimate in nats, with its gradient in ``logps``. k3's exponent is clipped to +-20 (gradient 1 beyond that)."""
    d = logps - ref_logps
    if estimator == "k1":
        return d
    if estimator == "k2":
        return 0.5 * jnp.square(d)
    return jnp.exp(jnp.clip(-d, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)) - 1.0 + d
