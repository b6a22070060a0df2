"""What a learner minimises: a per-token loss and how it is averaged, as one small value.

Owns: the actor's objective (GRPO, paper Eq. 5), the extractor's (CISPO, paper Eq. 3) and supervised cross-entropy for a warm start.
Promises: arguments are checked when the objective is built, not inside the compiled step. Does not: see the model.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from crl_jax.losses.aggregate import Aggregation, aggregate
from crl_jax.losses.cispo import cispo_loss
from crl_jax.losses.correction import Correction, corrected_loss
from crl_jax.losses.grpo import grpo_loss
from crl_jax.losses.ratio import RatioLevel, TokenLoss, importance_ratio

TokenLossFn = Callable[[Float[Array, "B N"], Float[Array, "B N"], Float[Array, "B N"], Bool[Array, "B N"]], TokenLoss]


@dataclasses.dataclass(frozen=True)
class Objective:
    """``token_loss(logps, behaviour_logps, advantages, mask)`` averaged by ``aggregation``; ``normaliser`` as in ``losses.aggregate``."""

    token_loss: TokenLossFn
    aggregation: Aggregation
    normaliser: float | None = None

    def __post_init__(self) -> None:
        nothing = jnp.zeros((1, 1))
        self.token_loss(nothing, nothing, nothing, nothing > 0)
        aggregate(nothing, nothing > 0, self.aggregation, normaliser=self.normaliser)


def actor(
    *,
    ratio: RatioLevel = "token",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    aggregation: Aggregation = "seq_mean_token_mean",
    normaliser: float | None = None,
    correction: Correction | Literal["ratio"] = "ratio",
    correction_low: float = 0.5,
    correction_high: float = 2.0,
) -> Objective:
    """Clipped surrogate (paper Eq. 5), ratio against the behaviour log-probs in the batch; or, with another ``correction``, the gradient
    weighted as in ``losses.correction``. Raises ValueError for a bad range.
    """
    if correction != "ratio":
        token_loss = functools.partial(corrected_loss, correction=correction, level=ratio, low=correction_low, high=correction_high)
        return Objective(token_loss, aggregation, normaliser)
    return Objective(functools.partial(grpo_loss, ratio=ratio, clip_low=clip_low, clip_high=clip_high), aggregation, normaliser)


def extractor(
    *, eps_low: float = 0.1, eps_high: float = 0.1, aggregation: Aggregation = "token_mean", normaliser: float | None = None
) -> Objective:
    """CISPO (paper Eq. 3), ratio against the behaviour log-probs in the batch. Raises ValueError for a bad range."""
    return Objective(functools.partial(cispo_loss, eps_low=eps_low, eps_high=eps_high), aggregation, normaliser)


def supervised(*, aggregation: Aggregation = "token_mean", normaliser: float | None = None) -> Objective:
    """Cross-entropy -logp of the trained tokens; advantages and behaviour log-probs are ignored."""
    return Objective(_cross_entropy, aggregation, normaliser)


def _cross_entropy(
    logps: Float[Array, "B N"], behaviour_logps: Float[Array, "B N"], advantages: Float[Array, "B N"], mask: Bool[Array, "B N"]
) -> TokenLoss:
    del behaviour_logps, advantages
    loss = -jnp.where(mask, logps, 0.0)
    return TokenLoss(loss, importance_ratio(loss, loss, mask), jnp.zeros_like(mask))
