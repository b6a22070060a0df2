"""Advantages on the host: rewards of whole episodes in, one number per episode out.

Owns: group-relative, sub-group and batch-mean advantages.
Promises: members are matched by id, never by position or by text; a missing reward (NaN) leaves the baseline and gets advantage 0; a
group without spread, or with a single scored member, gets exactly 0; everything else is finite and, when normalised, at most (n - 1)
/ sqrt(n) in size.
Does not: filter groups, clip or whiten advantages, or spread them over tokens.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from jaxtyping import Bool, Float, Int

Normalise = Literal["mean_std", "mean"]


def group_advantages(
    rewards: Float[np.ndarray, " N"],
    group_ids: Int[np.ndarray, " N"],
    *,
    normalise: Normalise = "mean_std",
    eps: float = 1e-6,
) -> Float[np.ndarray, " N"]:
    """Advantage of each reward against its own group, float32.

    ``mean_std``: A = (r - mean) / (std + eps); ``mean``: A = r - mean. Mean and std are over the scored members of the group; std is
    the unbiased (n - 1) estimate from the sum of centred squares, which leaves no rounding residue to divide by. Raises ValueError
    for unequal lengths.
    """
    if rewards.shape != group_ids.shape or rewards.ndim != 1:
        raise ValueError(
            f"rewards {rewards.shape} and ids {group_ids.shape} must be one-dimensional and of equal length: one id per reward"
        )
    values = rewards.astype(np.float64)
    scored = np.isfinite(values)
    if np.isinf(values).any():
        raise ValueError("rewards must be finite, or NaN where nothing scored the episode")
    advantages = np.zeros(values.shape, np.float64)
    for group in np.unique(group_ids):
        members = scored & (group_ids == group)
        advantages[members] = _standardise(values[members], normalise, eps)
    return advantages.astype(np.float32)


def subgroup_advantages(
    rewards: Float[np.ndarray, " N"],
    group_ids: Int[np.ndarray, " N"],
    condition_ids: Int[np.ndarray, " N"],
    *,
    normalise: Normalise = "mean_std",
    eps: float = 1e-6,
) -> Float[np.ndarray, " N"]:
    """Advantage inside (group, condition): guided episodes compete with guided ones, free with free (paper Eq. 5).

    Same rules as ``group_advantages``. Raises ValueError for unequal lengths.
    """
    if not rewards.shape == group_ids.shape == condition_ids.shape:
        raise ValueError(
            f"rewards {rewards.shape}, group ids {group_ids.shape} and condition ids {condition_ids.shape} must have equal length"
        )
    pairs = np.stack([group_ids, condition_ids], axis=-1).reshape(-1, 2)
    keys = np.unique(pairs, axis=0, return_inverse=True)[1].reshape(-1)
    return group_advantages(rewards, keys, normalise=normalise, eps=eps)


def batch_advantages(rewards: Float[np.ndarray, " N"], mask: Bool[np.ndarray, " N"]) -> Float[np.ndarray, " N"]:
    """A = r - mean of r over the batch (extractor baseline, paper Eq. 3), float32; 0 where ``mask`` is False or the reward is NaN."""
    return group_advantages(np.where(mask, rewards, np.nan), np.zeros(rewards.shape, np.int64), normalise="mean")


def _standardise(values: Float[np.ndarray, " n"], normalise: Normalise, eps: float) -> Float[np.ndarray, " n"]:
    """Centred (and scaled) members of one group; exact zeros when there is nothing to compare."""
    if len(values) < 2 or values.max() == values.min():
        return np.zeros_like(values)
    centred = values - values.mean()
    if normalise == "mean":
        return centred
    return centred / (np.sqrt(np.square(centred).sum() / (len(values) - 1)) + eps)
