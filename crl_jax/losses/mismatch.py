"""How far the policy that is trained lies from the one that sampled: other weights (lag) and another engine (arithmetic, kernels).

Owns: the absolute difference of log-probs (mean and maximum) and the effective share of the sample, as parts that add exactly.
Promises: masked slots may hold anything; the parts of micro-batches give what the whole batch gives. Does not: correct anything
(``losses.correction``, ``losses.grpo``).

With rho the importance ratio of a token (log-ratio clipped to +-20, ``losses.ratio``), the effective number of tokens is
(sum rho)^2 / sum rho^2 (Kish): all of them where the two agree, fewer the more a few tokens carry the weight.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from crl_jax.losses.aggregate import masked_sum
from crl_jax.losses.ratio import importance_ratio
from crl_jax.records import Sum


class Mismatch(NamedTuple):
    """Parts over trained tokens: |logp - behaviour| (nats) as a Sum and its maximum, rho and rho^2 as Sums."""

    gap: Sum
    gap_max: Any
    weight: Sum
    square: Sum


def mismatch(logps: Float[Array, "B N"], behaviour_logps: Float[Array, "B N"], mask: Bool[Array, "B N"]) -> Mismatch:
    """The parts of one batch or micro-batch; without a trained token all are 0."""
    gap = jnp.where(mask, jnp.abs(logps - behaviour_logps), 0.0)
    rho = importance_ratio(logps, behaviour_logps, mask)
    return Mismatch(masked_sum(gap, mask), jnp.max(gap), masked_sum(rho, mask), masked_sum(jnp.square(rho), mask))


def over_parts(parts: Mismatch) -> Mismatch:
    """One from many that are stacked along a leading axis."""

    def total(part: Sum) -> Sum:
        return Sum(jnp.sum(part.total, axis=0), jnp.sum(part.count, axis=0))

    return Mismatch(total(parts.gap), jnp.max(parts.gap_max, axis=0), total(parts.weight), total(parts.square))


def mismatch_sums(parts: Mismatch) -> dict[str, Sum]:
    """``logp_gap`` (mean, nats), ``logp_gap_max`` (one per step) and ``ess`` (effective tokens over tokens, in (0, 1])."""
    weight, square = parts.weight.total, parts.square.total
    effective = weight * (weight / jnp.where(square > 0, square, 1.0))
    return {
        "logp_gap": parts.gap,
        "logp_gap_max": Sum(parts.gap_max, 1),
        "ess": Sum(effective, parts.weight.count),
    }
