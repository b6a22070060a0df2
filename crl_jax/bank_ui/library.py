"""The bank behind the page: its file, its past, and the search over it.

Owns: one read-only store, the books of the revisions looked at last, states on the way to them, the embedder and the view of one revision.
Promises: what a run writes meanwhile is seen at the next look, a history that was rewound or replaced is read anew; going back in time
replays from the nearest state at hand; the embedder is loaded by the first search and only once. Does not: write, or know HTTP.
"""

from __future__ import annotations

import asyncio
import bisect
import sqlite3
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

from crl_jax.bank_tools import view
from crl_jax.bank_tools.book import Book, Kept, read_entries
from crl_jax.bank_tools.place import NotFound, Place
from crl_jax.experience import store_rows as rows
from crl_jax.experience.bank import BankState
from crl_jax.experience.index import Index
from crl_jax.experience.protocols import Embedder
from crl_jax.experience.retrieve import Diversity
from crl_jax.experience.store import Store
from crl_jax.experience.store_schema import LOG

BOOKS = 6  # revisions kept ready
FRAMES = 32  # states kept along the history


class Library:
    """Mutable and thread-safe. ``make_embedder`` and ``make_index`` are what runs use, unless a test says otherwise."""

    def __init__(
        self,
        place: Place,
        *,
        make_embedder: Callable[[], Embedder] = view.real_embedder,
        make_index: Callable[[int], Index] = view.real_index,
    ) -> None:
        self.place = place
        self.rules = view.Rules.of(place.config())
        self._make_embedder = make_embedder
        self._make_index = make_index
        self._lock = threading.RLock()
        self._history = threading.Lock()  # a long way back does not keep the present waiting
        self._memory: weakref.WeakKeyDictionary[Book, dict[Hashable, Any]] = weakref.WeakKeyDictionary()
        self._store, self._file = self._open()
        self._seen: tuple[int, int, int] | None = None  # (data version, revision, sequence number of the newest row of the log)
        self._entries: dict[str, Kept] = {}
        self._books: OrderedDict[int, Book] = OrderedDict()
        self._frames: dict[int, BankState] = {}
        self._embedder: Embedder | None = None
        self._view: view.View | None = None
        self._viewing = asyncio.Lock()

    @property
    def diversity(self) -> Diversity:
        """How the run ranks."""
        return self.rules.diversity

    def book(self, revision: int | None = None) -> Book:
        """The bank at a revision (None: now). Raises NotFound, StoreError."""
        with self._lock:
            self._refresh()
            assert self._seen is not None
            seen, entries, store = self._seen, self._entries, self._store
            revision = seen[1] if revision is None else revision
            if not 0 <= revision <= seen[1]:
                raise NotFound(f"the bank is at revision {seen[1]}: ask for 0 to {seen[1]}")
            if revision in self._books:
                self._books.move_to_end(revision)
                return self._books[revision]
        with self._history:
            state = None if revision == seen[1] else self._state(store, revision, seen[1])
        book = Book(store, revision=revision, state=state, entries=entries)
        with self._lock:
            if seen == self._seen:
                self._books[revision] = book
            while len(self._books) > BOOKS:
                self._books.popitem(last=False)
        return book

    def written(self) -> Hashable:
        """What changes when something is written to the file."""
        with self._lock:
            self._refresh()
            return self._file, self._seen

    def remembered(self, book: Book, key: Hashable, work: Callable[[], Any]) -> Any:
        """What ``work`` made of a book, made once for each key while the book is kept."""
        known = self._memory.setdefault(book, {})
        if key not in known:
            known[key] = work()
        return known[key]

    def warm_up(self) -> None:
        """Read the whole history once, so that the first step back is quick."""
        newest = self.book().revision
        if newest > 1:
            self.book(newest - 1)

    async def view(self, book: Book) -> view.View:
        """The search over a book; the one before it ends."""
        async with self._viewing:
            if self._view is None or self._view.book is not book:
                embedder = await asyncio.to_thread(self.embedder)
                ready = await asyncio.to_thread(view.View.make, book, embedder, self.rules, make_index=self._make_index)
                old, self._view = self._view, ready()
                if old is not None:
                    await old.aclose()
            return self._view

    def embedder(self) -> Embedder:
        """The model that embeds queries. Raises ImportError naming its package."""
        with self._lock:
            if self._embedder is None:
                self._embedder = self._make_embedder()
            return self._embedder

    @property
    def ready(self) -> bool:
        """Whether the embedder is loaded."""
        return self._embedder is not None

    async def aclose(self) -> None:
        """End the search and close the file."""
        if self._view is not None:
            await self._view.aclose()
        self._store.close()

    def _open(self) -> tuple[Store, int]:
        inode = self.place.path.stat().st_ino if self.place.path.exists() else 0
        return Store.open(self.place.path, read_only=True), inode

    def _refresh(self) -> None:
        """Notice what was written since the last look."""
        if self.place.path.exists() and self.place.path.stat().st_ino != self._file:  # repaired or restored: another file
            old = self._store
            self._store, self._file = self._open()  # raises while the new file is no bank: the next look tries again
            old.close()  # only now: as long as it is open, no new file gets its number
            self._forget()
        seen: tuple[int, int, int] = self._store.read(_newest)
        if seen == self._seen:
            return
        if self._seen is not None and not self._store.read(self._continues):
            self._forget()
        elif self._seen is not None:
            self._books.clear()  # they know the newest revision, and entries that have left since
        self._entries = read_entries(self._store)
        self._seen = seen

    def _continues(self, db: sqlite3.Connection) -> bool:
        """Whether the history seen before is the beginning of the one there is."""
        assert self._seen is not None
        _, revision, number = self._seen
        row = db.execute("SELECT revision, abandoned FROM ops WHERE seq=?", (number,)).fetchone()
        return number == 0 or (row is not None and tuple(row) == (revision, 0))

    def _forget(self) -> None:
        self._seen = None
        self._books.clear()
        with self._history:
            self._frames.clear()

    def _state(self, store: Store, revision: int, newest: int) -> BankState:
        """The state after so many changes. Raises NotFound for one that was compacted away."""
        if not self._frames:
            base: BankState = store.read(rows.base_state)
            self._frames[base.revision] = base
        known = sorted(self._frames)
        at = bisect.bisect_right(known, revision) - 1
        if at < 0:
            raise NotFound(f"revision {revision} was compacted away: the oldest that is left is {known[0]}")
        every = max(50, newest // FRAMES)
        state = self._frames[known[at]]
        query = f"SELECT {LOG} FROM ops WHERE abandoned=0 AND base_revision>=? AND revision<=? ORDER BY seq"

        def between(db: sqlite3.Connection) -> list[sqlite3.Row]:
            cursor = db.cursor()
            cursor.row_factory = sqlite3.Row
            return cursor.execute(query, (state.revision, revision)).fetchall()

        for row in store.read(between):
            before = state.revision
            state = rows.replay_row(state, row)
            if state.revision // every != before // every:
                self._frames[state.revision] = state
        return state


@rows.decoding("its revision")
def _newest(db: sqlite3.Connection) -> tuple[int, int, int]:
    version = db.execute("PRAGMA data_version").fetchone()[0]
    revision = int(db.execute("SELECT value FROM meta WHERE key='revision'").fetchone()[0])
    number = db.execute("SELECT coalesce(max(seq), 0) FROM ops WHERE abandoned=0").fetchone()[0]
    return version, revision, number
