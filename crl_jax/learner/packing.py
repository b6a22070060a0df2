"""Several sequences in one row, and one copy of a beginning that they share.

Owns: which sequence goes into which row, and the arrays of such a batch. Promises: every sample is in the batch or the call raises; every
sampled token is trained exactly once; shapes come from the given buckets alone; loss and gradient are those of the unpacked batch up to
rounding. Does not: put arrays on devices, cut samples, or keep their order.

The G episodes of a group often begin with the same prompt. With ``share_prefixes`` samples that agree in every token before their first
trained one are a family: the row holds that beginning once, and each sequence continues it with its own tokens.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from crl_jax.learner.batching import bucket_of, check_scored, empty_batch
from crl_jax.records import TrainBatch, TrainSample


class _Piece(NamedTuple):
    """Sequences that share their first ``shared`` tokens, in one row."""

    members: tuple[int, ...]
    shared: int
    size: int  # tokens in the row


@dataclasses.dataclass
class _Row:
    """Mutable: the pieces of one row while it is filled."""

    pieces: list[_Piece]
    tokens: int
    sequences: int


def pack_batch(
    samples: Sequence[TrainSample],
    *,
    row_buckets: Sequence[int],
    length_buckets: Sequence[int],
    sequence_buckets: Sequence[int],
    token_buckets: Sequence[int],
    share_prefixes: bool = False,
) -> TrainBatch:
    """A packed ``TrainBatch`` (see there) of the buckets that compute on the fewest tokens.

    ``row_buckets``: allowed B. ``length_buckets``: allowed T, tokens of a row. ``sequence_buckets``: allowed P, sequences of a row.
    ``token_buckets``: allowed N, trained tokens per sequence. Raises ValueError when a sample is longer than the longest row, when the rows
    needed are more than the largest bucket, when the first token of a log is trained, or when there are no samples.
    """
    masks = check_scored(samples)
    counts = [int(m.sum()) for m in masks]
    n = bucket_of(counts, token_buckets, "sample", "trained tokens", "lower sampling.max_new_tokens or the number of turns")
    lengths = [len(s.log) for s in samples]
    least = bucket_of(lengths, length_buckets, "sample", "tokens", "raise the row length, or shorten episodes and prompts")
    families = list(_families(samples, masks)) if share_prefixes else [((i,), 0) for i in range(len(samples))]

    layouts = []
    for t in sorted(length for length in length_buckets if length >= least):
        rows = _fill(_pieces(families, lengths, t, max(sequence_buckets)), t, max(sequence_buckets))
        fitting = [b for b in row_buckets if b >= len(rows)]
        if fitting:
            layouts.append((min(fitting) * t, t, min(fitting), rows))
    if not layouts:
        raise ValueError(
            f"{len(samples)} samples of {sum(lengths)} tokens do not fit {max(row_buckets)} rows: use longer rows or fewer samples"
        )
    _, t, b, rows = min(layouts, key=lambda layout: layout[:2])
    p = min(size for size in sequence_buckets if size >= max(row.sequences for row in rows))
    return _write(samples, masks, rows, (b, t, p, n), share_prefixes)


def _families(samples: Sequence[TrainSample], masks: Sequence[np.ndarray]) -> Iterator[tuple[tuple[int, ...], int]]:
    """(members, tokens they share) of samples with equal beginnings, in order of first appearance."""
    groups: dict[bytes, list[int]] = {}
    for i, (sample, mask) in enumerate(zip(samples, masks, strict=True)):
        start = int(mask.argmax()) if mask.any() else len(mask)
        groups.setdefault(np.asarray(sample.log.ids[:start], np.int32).tobytes(), []).append(i)
    for beginning, members in groups.items():
        yield tuple(members), len(beginning) // 4


def _pieces(families: Sequence[tuple[tuple[int, ...], int]], lengths: Sequence[int], t: int, most: int) -> list[_Piece]:
    """Families cut so that each piece fits a row; a cut repeats the beginning. A family of one shares nothing."""
    pieces = []
    for members, shared in families:
        taken: list[int] = []
        size = shared
        for i in sorted(members, key=lambda i: -lengths[i]):
            own = lengths[i] - shared
            if taken and (size + own > t or len(taken) == most):
                pieces.append(_Piece(tuple(taken), shared if len(taken) > 1 else 0, size))
                taken, size = [], shared
            taken.append(i)
            size += own
        pieces.append(_Piece(tuple(taken), shared if len(taken) > 1 else 0, size))
    return pieces


def _fill(pieces: Sequence[_Piece], t: int, most: int) -> list[_Row]:
    """First fit, longest first."""
    rows: list[_Row] = []
    for piece in sorted(pieces, key=lambda piece: -piece.size):
        for row in rows:
            if row.tokens + piece.size <= t and row.sequences + len(piece.members) <= most:
                break
        else:
            row = _Row([], 0, 0)
            rows.append(row)
        row.pieces.append(piece)
        row.tokens += piece.size
        row.sequences += len(piece.members)
    return rows


def _write(
    samples: Sequence[TrainSample], masks: Sequence[np.ndarray], rows: Sequence[_Row], sizes: tuple[int, int, int, int], share: bool
) -> TrainBatch:
    b, t, p, n = sizes
    batch = empty_batch(b, t, b * p, n)
    source = np.zeros((b * p, n), np.int32)
    segments, prefixes = np.full((b, t), -1, np.int32), np.full((b, t), -1, np.int32)
    for r, row in enumerate(rows):
        at, segment, slot = 0, 0, r * p
        for piece in row.pieces:
            begin, root = at, segment
            if piece.shared:
                ids = samples[piece.members[0]].log.ids[: piece.shared]
                batch.tokens[r, at : at + piece.shared] = ids
                batch.positions[r, at : at + piece.shared] = np.arange(piece.shared)
                segments[r, at : at + piece.shared] = prefixes[r, at : at + piece.shared] = segment
                at, segment = at + piece.shared, segment + 1
            for i in piece.members:
                log, where = samples[i].log, np.flatnonzero(masks[i])
                own = len(log) - piece.shared
                batch.tokens[r, at : at + own] = log.ids[piece.shared :]
                batch.positions[r, at : at + own] = np.arange(piece.shared, len(log))
                segments[r, at : at + own] = segment
                prefixes[r, at : at + own] = root if piece.shared else segment
                place = functools.partial(_slot, begin=begin, at=at, shared=piece.shared)
                k = len(where)
                batch.token_index[slot, :k], source[slot, :k] = place(where), place(where - 1)
                batch.mask[slot, :k] = True
                batch.behaviour_logps[slot, :k] = log.logps[where]
                batch.advantages[slot, :k] = samples[i].advantage
                batch.states[slot, :k] = log.states[where]
                at, segment, slot = at + own, segment + 1, slot + 1
    return batch._replace(source_index=source, segments=segments, prefixes=prefixes if share else None)


def _slot(position: Int[np.ndarray, " n"], *, begin: int, at: int, shared: int) -> Int[np.ndarray, " n"]:
    """Slots of the row that hold these positions of a sequence whose beginning lies at ``begin`` and whose own tokens lie at ``at``."""
    return np.where(position < shared, begin + position, at + position - shared)
