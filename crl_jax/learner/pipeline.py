"""An endless, checkpointable stream of batches of a fixed set of samples, for a warm start or supervised training.

Owns: order and batching. Promises: the order depends on (seed, epoch) alone, not on threads, processes or machines; each epoch is a
different permutation that holds every sample exactly once; a tail shorter than ``batch_size`` is kept and padded with masked rows;
``get_state`` / ``set_state`` continue exactly, with or without prefetching, and a position saved at the end of an epoch is the
beginning of the next one.
Does not: tokenise, or know the objective.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import grain

from crl_jax.learner.batching import part_of, to_batch
from crl_jax.records import TrainBatch, TrainSample

Collate = Callable[[Sequence[TrainSample]], TrainBatch]


def supervised_batches(
    samples: Sequence[TrainSample],
    *,
    batch_size: int,
    seed: int,
    length_buckets: Sequence[int],
    token_buckets: Sequence[int],
    threads: int = 0,
    process: tuple[int, int] = (0, 1),
) -> grain.DatasetIterator[TrainBatch]:
    """Iterator over batches of ``batch_size`` rows, one sample per row. See ``batches``."""

    def collate(rows: Sequence[TrainSample]) -> TrainBatch:
        return to_batch(rows, row_buckets=(batch_size,), length_buckets=length_buckets, token_buckets=token_buckets)

    return batches(samples, collate, batch_size=batch_size, seed=seed, threads=threads, process=process)


def batches(
    samples: Sequence[TrainSample],
    collate: Collate,
    *,
    batch_size: int,
    seed: int,
    threads: int = 0,
    process: tuple[int, int] = (0, 1),
) -> grain.DatasetIterator[TrainBatch]:
    """Iterator over ``collate(samples of one step)``, without end. Its state is a small JSON-able dict.

    ``batch_size`` samples make a step of all processes together; ``process`` = (index, count): this process gets its part of the rows, and
    every process makes the same shapes because each collates the whole step. ``threads`` prefetch in the background (0: none).
    Raises ValueError for no samples, and at the first batch when the rows do not divide over the processes.
    """
    if not samples:
        raise ValueError("no samples to learn from")
    index, count = process

    def part(rows: Sequence[TrainSample]) -> TrainBatch:
        return part_of(collate(rows), index, count)

    order = grain.MapDataset.source(samples).shuffle(seed=seed).batch(batch_size, drop_remainder=False, batch_fn=part).repeat()
    return iter(order.to_iter_dataset(grain.ReadOptions(num_threads=threads, prefetch_buffer_size=2 * threads)))
