"""Count-aware weights: an experience that has been trained on often, or just now, weighs less in the extractor's update (paper Eq. 7).

Owns: the weight. Promises: a generation never trained on weighs exactly 1. Does not: keep the counts (the caller records them when it
trains).
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Int


def count_weights(
    counts: Int[np.ndarray, " N"],
    last_trained: Int[np.ndarray, " N"],
    step: int,
    *,
    alpha: float = 0.5,
    cooldown: int = 2,
) -> Float[np.ndarray, " N"]:
    """w = 0 if step - last_trained < cooldown, else (1 + count)^-alpha; 1 where ``count`` is 0. Multiply advantages by it, after centring.

    ``counts``: updates the generation has been in. ``last_trained``: step of the last one, any value where the count is 0. With at
    most one update per step a ``cooldown`` below 2 steps never acts. Raises ValueError for unequal lengths, a negative count, alpha
    or cooldown, or a ``last_trained`` in the future.
    """
    if counts.shape != last_trained.shape:
        raise ValueError(f"counts {counts.shape} and last_trained {last_trained.shape} must have equal length")
    if (counts < 0).any() or alpha < 0 or cooldown < 0:
        raise ValueError(f"counts, alpha {alpha} and cooldown {cooldown} must not be negative")
    trained = counts > 0
    if (last_trained[trained] > step).any():
        raise ValueError(f"last_trained {last_trained[trained].max()} is after step {step}: both must come from the same step counter")
    weights = (1.0 + counts.astype(np.float64)) ** -alpha
    weights[trained & (step - last_trained < cooldown)] = 0.0
    return weights.astype(np.float32)
