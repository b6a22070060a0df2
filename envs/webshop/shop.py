"""One shop: what is for sale, its search and its goals, read-only and shared by all environments of a process.

Owns: ``Shop`` and keeping each one once.
Promises: 64 environments cost one catalogue, one index and one set of goals per kind; the index is built on the first search.
Does not: know about episodes.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from envs.api import EnvUnavailable, Split
from envs.webshop import goals as goal_files
from envs.webshop import products as product_files
from envs.webshop.draw import Draw
from envs.webshop.goals import Goal, Kind
from envs.webshop.products import Product

if TYPE_CHECKING:
    from envs.webshop.search import Index

MAX_QUERY = 1000  # characters; the rest of a query is not read
_LOCK = threading.RLock()
INSTALL = "webshop: pip install 'crl-jax[webshop]'"


class Stock:
    """The products of one set of files. ``source`` is "real" or "generated"."""

    def __init__(self, folder: str) -> None:
        self.files = product_files.read(folder)
        self.source = self.files.source
        self.products = product_files.products(self.files)
        self._list = tuple(self.products.values())
        self._index: Index | None = None
        self._search = functools.lru_cache(maxsize=4096)(self._ask)  # rollout groups ask the same again and again

    def prepare(self) -> None:
        """Build the index, unless it is there. Raises ``EnvUnavailable`` when its packages are missing."""
        with _LOCK:
            if self._index is None:
                try:
                    import rapidfuzz  # noqa: F401  (the reward's)

                    from envs.webshop import search

                    index = search.Index(map(search.document, self._list))
                except ModuleNotFoundError as missing:
                    raise EnvUnavailable(f"{INSTALL} ({missing.name} is missing)") from missing
                self._index = index

    def search(self, query: str) -> Sequence[Product]:
        """The products found for a query, best first. Raises ``EnvUnavailable`` as ``prepare``."""
        return self._search(query[:MAX_QUERY].lower())

    def _ask(self, query: str) -> Sequence[Product]:
        self.prepare()
        assert self._index is not None
        return tuple(self._list[place] for place in self._index.best(query))


class Shop:
    """A stock with the goals of one kind. A goal's id is "goal-" and its number."""

    def __init__(self, stock: Stock, kind: Kind) -> None:
        self.stock, self.kind = stock, kind
        self.goals = goal_files.goals(stock.files, stock.products, kind)
        self._digits = max(4, len(str(len(self.goals) - 1)))
        self.ids = {f"goal-{number:0{self._digits}}": number for number in range(len(self.goals))}
        self._members = {split: goal_files.members(self.goals, split, stock.source) for split in ("train", "heldout")}
        self._train = self._members["train"]
        self.weights = goal_files.weights(self.goals)  # by number, see ``goals.weights``
        self._sums = list(itertools.accumulate(self.weights[number] for number in self._train))

    def members(self, split: Split) -> list[int]:
        """The numbers of the goals of a split."""
        return self._members[split]

    def task_id(self, number: int) -> str:
        """The id of goal ``number``."""
        return f"goal-{number:0{self._digits}}"

    def goal(self, task: str) -> Goal:
        """The goal of an id. Raises KeyError."""
        if task not in self.ids:
            raise KeyError(f"no webshop task {task!r}: use {self.task_id(0)} to {self.task_id(len(self.goals) - 1)}")
        return self.goals[self.ids[task]]

    def draw(self, seed: int) -> str:
        """The id of a training goal, drawn by weight."""
        place = bisect.bisect(self._sums, Draw("goal", seed).between(0.0, self._sums[-1]))
        return self.task_id(self._train[min(place, len(self._train) - 1)])


def shop(kind: Kind) -> Shop:
    """The shop of the data that ``WEBSHOP_DATA`` names, made at most once per process. Raises ``EnvUnavailable``."""
    return _shop(product_files.data_folder(), kind)


def _shop(folder: str, kind: Kind) -> Shop:
    with _LOCK:
        return _made(folder, kind)


@functools.cache
def _stock(folder: str) -> Stock:
    return Stock(folder)


@functools.cache
def _made(folder: str, kind: Kind) -> Shop:
    return Shop(_stock(folder), kind)
