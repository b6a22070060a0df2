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
from jaxtyping import Bool

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
    masks = check_scored(samples)
    b = bucket_of([len(samples)], row_buckets, "batch", "rows", "use a smaller batch or more micro-batches")
    t = bucket_of([len(s.log) for s in samples], length_buckets, "sample", "tokens", "raise max_length, or shorten episodes and prompts")
    n = bucket_of(
        [int(m.sum()) for m in masks], token_buckets, "sample", "trained tokens", "lower sampling.max_new_tokens or the number of turns"
    )

    batch = empty_batch(b, t, b, n)
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


def part_of(batch: TrainBatch, index: int, count: int) -> TrainBatch:
    """Part ``index`` of ``count`` equal parts by rows; a packed row takes its sequences along. Raises ValueError if they do not divide."""
    rows = batch.tokens.shape[0]
    if rows % count:
        raise ValueError(f"{rows} rows do not divide over {count} processes: use row buckets that are multiples of it")
    return TrainBatch._make(leaf if leaf is None else leaf.reshape(count, -1, *leaf.shape[1:])[index] for leaf in batch)


def check_scored(samples: Sequence[TrainSample]) -> list[Bool[np.ndarray, " T"]]:
    """The loss mask of each sample. Raises ValueError when there are no samples or the first token of one is trained."""
    if not samples:
        raise ValueError("no samples: skip the update instead of training on an empty batch")
    masks = [sample.log.loss_mask for sample in samples]
    for i, mask in enumerate(masks):
        if mask[:1].any():
            raise ValueError(
                f"sample {i}: its first token is trained, but a token is scored from the one before it: start logs with a prompt"
            )
    return masks


def empty_batch(b: int, t: int, s: int, n: int) -> TrainBatch:
    """NumPy arrays of ``b`` rows of ``t`` tokens and ``s`` sequences of ``n`` trained tokens, all padding."""

    def filled(shape: tuple[int, int], dtype: type, value: int = 0) -> Any:
        return np.full(shape, value, dtype)

    return TrainBatch(
        tokens=filled((b, t), np.int32),
        positions=filled((b, t), np.int32, -1),
        token_index=filled((s, n), np.int32),
        mask=filled((s, n), np.bool_),
        behaviour_logps=filled((s, n), np.float32),
        advantages=filled((s, n), np.float32),
        states=filled((s, n), np.int32),
    )


def bucket_of(sizes: Sequence[int], buckets: Sequence[int], what: str, unit: str, fix: str) -> int:
    """The smallest bucket that holds the largest size. Raises ValueError that names it and ``fix`` when none does."""
    worst = int(np.argmax(sizes))
    fitting = [bucket for bucket in buckets if bucket >= sizes[worst]]
    if not fitting:
        name = f"{what} {worst}" if what == "sample" else what
        raise ValueError(f"{name} has {sizes[worst]} {unit}, more than the largest bucket {max(buckets, default=0)}: {fix}")
    return min(fitting)
