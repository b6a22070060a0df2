"""Embeddings of texts that came up lately, in queries or in lessons.

Owns: the cache, and `OneByOne`. Promises: least recently used texts leave first; a batch's vectors come out in the order of its texts, each
distinct missing text is named once. Does not: embed, or lock (one thread looks up and stores; `assemble` may run on another).
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float

from crl_jax.experience.protocols import Embedder

Vector = Float[np.ndarray, " d"]


class OneByOne:
    """An embedder that computes every text alone: its vectors depend on nothing but the text, to the last bit (in a synchronous run, whose
    next process has an empty cache and so embeds other texts together)."""

    def __init__(self, embedder: Embedder) -> None:
        self._embedder = embedder
        self.dim, self.fingerprint = embedder.dim, embedder.fingerprint

    def embed(self, texts: Sequence[str]) -> Float[np.ndarray, "n d"]:
        """One row per text."""
        return np.concatenate([np.zeros((0, self.dim), np.float32), *(self._embedder.embed([text]) for text in texts)])


class QueryVectors:
    """Mutable cache of at most ``size`` vectors by text."""

    def __init__(self, size: int, counts: Counter[str]) -> None:
        self._size = size
        self._counts = counts
        self._cache: OrderedDict[str, Vector] = OrderedDict()

    def look_up(self, texts: Sequence[str]) -> tuple[dict[str, Vector], list[str]]:
        """The vectors that are here, and the distinct texts without one, in order."""
        known: dict[str, Vector] = {}
        missing: dict[str, None] = {}
        cache = self._cache
        for text in texts:
            vector = cache.get(text)
            if vector is None:
                missing[text] = None
            elif text not in known:
                known[text] = vector
                cache.move_to_end(text)
        self._counts["cache_hits"] += len(texts) if not missing else sum(text in known for text in texts)
        self._counts["cache_misses"] += len(missing)
        return known, list(missing)

    def store(self, vectors: Mapping[str, Vector]) -> None:
        """Keep these; the least recently used leave."""
        for text, vector in vectors.items():
            self._cache[text] = vector.copy()  # a row of its own: a view would keep its whole batch in memory
        while len(self._cache) > self._size:
            self._cache.popitem(last=False)


def assemble(texts: Sequence[str], vectors: Mapping[str, Vector]) -> Float[np.ndarray, "n d"]:
    """One row per text. (Joining and cutting is eight times as fast as stacking: it runs for every query.)"""
    return np.concatenate(list(map(vectors.__getitem__, texts))).reshape(len(texts), -1)
