"""One merge pass over a namespace: sliding chunks, each with what the chunk before it wrote.

Owns: the order of chunks and the carry (paper section on merging: bounded context, carried results). Promises: an entry vanishes only in
the same change that inserts its replacement; a chunk that fails leaves its entries as they are and carries nothing on; every written
entry belongs to the generation of its own chunk. Does not: call the model or the bank itself.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence


async def merge_pass(ids: Sequence[str], *, chunk_size: int, merge_chunk: Callable[[Sequence[str]], Awaitable[Sequence[str]]]) -> int:
    """Run ``merge_chunk`` (ids in, ids of the entries it wrote out, empty if unchanged) over ``ids``; returns the number of entries
    written."""
    carry: Sequence[str] = ()
    written = 0
    for start in range(0, len(ids), chunk_size):
        chunk = (*carry[-chunk_size:], *ids[start : start + chunk_size])
        if len(chunk) < 2:
            break
        carry = await merge_chunk(chunk)
        written += len(carry)
    return written
