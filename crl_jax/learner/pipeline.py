"""An endless, checkpointable stream of supervised batches for a warm start.

Owns: order and batching of a fixed set of samples. Promises: the order depends on (seed, epoch) alone; each epoch is a different
permutation that holds every sample exactly once; a tail shorter than ``batch_size`` is kept and padded with masked rows;
``get_state`` / ``set_state`` continue exactly.
Does not: start threads or processes, tokenise, or know the objective.
"""

from __future__ import annotations

from collections.abc import Sequence

import grain

from crl_jax.learner.batching import to_batch
from crl_jax.records import TrainBatch, TrainSample


def supervised_batches(
    samples: Sequence[TrainSample],
    *,
    batch_size: int,
    seed: int,
    length_buckets: Sequence[int],
    token_buckets: Sequence[int],
) -> grain.DatasetIterator[TrainBatch]:
    """Iterator over batches of ``batch_size`` rows, without end. Its state is a small JSON-able dict. Raises ValueError for no samples."""
    if not samples:
        raise ValueError("no samples to learn from")

    def collate(rows: Sequence[TrainSample]) -> TrainBatch:
        return to_batch(rows, row_buckets=(batch_size,), length_buckets=length_buckets, token_buckets=token_buckets)

    order = grain.MapDataset.source(samples).shuffle(seed=seed).batch(batch_size, drop_remainder=False, batch_fn=collate).repeat()
    return iter(order.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)))
