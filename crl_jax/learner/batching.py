"""From token logs to the arrays of one optimiser step.

Owns: padding and bucketing. Promises: every sample is in the batch or the call raises; shapes come from the given buckets alone, so
the number of compiled programs is bounded by their product; padding is on the right, has position -1 and mask False, and no row is
cloned to fill a batch.
Does not: put arrays on devices, drop or reorder samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from crl_jax.records import TrainBatch, TrainSample


def to_batch(
    samples: Sequence[TrainSample],
    *,
    row_buckets: Sequence[int],
    length_buckets: Sequence[int],
    token_buckets: Sequence[int],
) -> TrainBatch:
    """NumPy arrays of the smallest bucket that holds all ``samples``, row i being sample i.

    ``row_buckets``: allowed B. ``length_buckets``: allowed T, in tokens. ``token_buckets``: allowed N, trained tokens per row.
    Raises ValueError when a sample or the batch is larger than the largest bucket (over-long samples are never cut), when the first
    token of a log is trained (nothing precedes it to score it from), or when there are no samples.
    """
    if not samples:
        raise ValueError("no samples: skip the update instead of training on an empty batch")
    masks = [sample.log.loss_mask for sample in samples]
    for i, mask in enumerate(masks):
        if mask[:1].any():
            raise ValueError(
                f"sample {i}: its first token is trained, but a token is scored from the one before it: start logs with a prompt"
            )
    b = _bucket([len(samples)], row_buckets, "batch", "rows", "use a smaller batch or more micro-batches")
    t = _bucket([len(s.log) for s in samples], length_buckets, "sample", "tokens", "raise max_length, or shorten episodes and prompts")
    n = _bucket(
        [int(m.sum()) for m in masks], token_buckets, "sample", "trained tokens", "lower sampling.max_new_tokens or the number of turns"
    )

    batch = _empty(b, t, n)
    for row, (sample, mask) in enumerate(zip(samples, masks, strict=True)):
        log, where = sample.log, np.flatnonzero(mask)
        length, trained = len(log), len(where)
        batch.tokens[row, :length] = log.ids
        batch.positions[row, :length] = np.arange(length)
        batch.token_index[row, :trained] = where
        batch.mask[row, :trained] = True
        batch.behaviour_logps[row, :trained] = log.logps[where]
        batch.advantages[row, :trained] = sample.advantage
        batch.states[row, :trained] = log.states[where]
    return batch


def _empty(b: int, t: int, n: int) -> TrainBatch:
    def filled(width: int, dtype: type, value: int = 0) -> Any:
        return np.full((b, width), value, dtype)

    return TrainBatch(
        tokens=filled(t, np.int32),
        positions=filled(t, np.int32, -1),
        token_index=filled(n, np.int32),
        mask=filled(n, np.bool_),
        behaviour_logps=filled(n, np.float32),
        advantages=filled(n, np.float32),
        states=filled(n, np.int32),
    )


def _bucket(sizes: Sequence[int], buckets: Sequence[int], what: str, unit: str, fix: str) -> int:
    """The smallest bucket that holds the largest size."""
    worst = int(np.argmax(sizes))
    fitting = [bucket for bucket in buckets if bucket >= sizes[worst]]
    if not fitting:
        name = f"{what} {worst}" if what == "sample" else what
        raise ValueError(f"{name} has {sizes[worst]} {unit}, more than the largest bucket {max(buckets, default=0)}: {fix}")
    return min(fitting)
