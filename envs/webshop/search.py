"""The shop's search: BM25 as Lucene has it, by the library bm25s.

Owns: what is indexed (title, description, first bullet, options; lower case), words (English stop words out, Porter stems), and the
ranking: k1 0.9, b 0.4, at most 50 products, equal scores in the order of the catalogue.
Promises: an index is read-only after it was built, so all environments of a process share one; any text is a query.
Does not: round document lengths to a byte, as Lucene itself does, so long documents may change places with the original.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import Stemmer

from envs.webshop.products import Product

FOUND = 50  # products per search
K1, B = 0.9, 0.4
_STOP = "a an and are as at be but by for if in into is it no not of on or such that the their then there these they this to was will with"
STOP_WORDS = frozenset(_STOP.split())  # Lucene's
_WORD = re.compile(r"\w+(?:[.'’]\w+)*")


def words(text: str, stemmer: Any) -> list[str]:
    """The index words of ``text``, in order."""
    found = (word.removesuffix("'s").removesuffix("’s") for word in _WORD.findall(text.lower()))
    return stemmer.stemWords([word for word in found if word and word not in STOP_WORDS])


def document(product: Product) -> str:
    """What is indexed of a product."""
    options = ", and ".join(f"{name}: {', '.join(values)}" for name, values in product.options.items())
    first = product.bullets[0] if product.bullets else ""
    return f"{product.title} {product.description} {first} {options}"


class Index:
    """A search index over texts."""

    def __init__(self, texts: Iterable[str]) -> None:
        stemmer = Stemmer.Stemmer("porter")
        split = [words(text.encode("utf-8", "replace").decode(), stemmer) for text in texts]
        vocabulary = sorted({word for text in split for word in text})
        self._numbers = {word: number for number, word in enumerate(vocabulary)}
        self._stemmer = stemmer
        self._bm25 = _bm25s().BM25(method="lucene", k1=K1, b=B)
        numbered = [[self._numbers[word] for word in text] for text in split]
        self._bm25.index((numbered, self._numbers), show_progress=False, create_empty_token=False)

    def scores(self, query: str) -> np.ndarray | None:
        """The BM25 score of every text, or None when no word of the query is in any."""
        text = query.encode("utf-8", "replace").decode()  # a lone surrogate is no letter
        numbers = [self._numbers[word] for word in words(text, self._stemmer) if word in self._numbers]
        return self._bm25.get_scores_from_ids(numbers) if numbers else None

    def best(self, query: str, count: int = FOUND) -> Sequence[int]:
        """Places of the best ``count`` texts, best first; fewer when fewer hold a word of the query."""
        scores = self.scores(query)
        if scores is None:
            return ()
        some = np.flatnonzero(scores > 0)
        if len(some) > count:
            some = some[scores[some] >= np.partition(scores[some], -count)[-count]]
        return some[np.argsort(-scores[some], kind="stable")][:count].tolist()


def _bm25s() -> Any:
    """The library. It imports jax where that is installed, and computes with it at once, which would start a device in every worker."""
    if sys.modules.get("bm25s") is not None:
        return sys.modules["bm25s"]
    with _hidden("jax.lax" if "jax" in sys.modules else "jax"):
        return importlib.import_module("bm25s")


@contextmanager
def _hidden(module: str) -> Iterator[None]:
    """Make importing ``module`` fail."""
    before = sys.modules.get(module)
    sys.modules[module] = None  # pyright: ignore[reportArgumentType]
    try:
        yield
    finally:
        del sys.modules[module]
        if before is not None:
            sys.modules[module] = before
