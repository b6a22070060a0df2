"""Inputs of many lengths as few padded dispatches.

Owns: which rows of ``extend`` go together, and what padding makes of them. Does not: know sessions' states or dispatch anything.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import TypeVar

from crl_jax.serving.engine import Row, bucket
from crl_jax.serving.limits import Limits

Owner = TypeVar("Owner")


def group_rows(
    rows: Sequence[tuple[Owner, Row]], row_buckets: Sequence[int], chunk_buckets: Sequence[int]
) -> list[list[tuple[Owner, Row]]]:
    """Batches for ``extend``: longest first, rows of one chunk bucket together; padding rows of a batch are filled with shorter ones.

    A row longer than the largest chunk is cut to it with budget 0 (its rest comes in a later round).
    """
    longest = chunk_buckets[-1]
    cut = [(s, r if len(r.tokens) <= longest else dataclasses.replace(r, tokens=r.tokens[:longest], budget=0)) for s, r in rows]
    cut.sort(key=lambda item: -len(item[1].tokens))
    groups = []
    while cut:
        chunk = bucket(len(cut[0][1].tokens), chunk_buckets)
        same = sum(1 for _, r in cut if bucket(len(r.tokens), chunk_buckets) == chunk)
        size = bucket(min(same, row_buckets[-1]), row_buckets)
        groups.append(cut[:size])
        cut = cut[size:]
    return groups


def padded_tokens(lengths: Sequence[int], limits: Limits) -> int:
    """Tokens that the dispatches for inputs of these lengths compute, padding counted: a chunk of each input in turn, rows of one chunk
    bucket together.
    """
    longest, most, total = limits.chunk_buckets[-1], limits.row_buckets[-1], 0
    left = [n for n in lengths if n > 0]
    while left:
        for chunk, n in Counter(bucket(min(n, longest), limits.chunk_buckets) for n in left).items():
            total += chunk * (n // most * most + (bucket(n % most, limits.row_buckets) if n % most else 0))
        left = [n - longest for n in left if n > longest]
    return total
