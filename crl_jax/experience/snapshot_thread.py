"""A snapshot of the bank's file, made beside the work.

Owns: the thread, and what it copies. Promises: the copy holds what was committed when it was begun, whatever is written meanwhile, and
nobody waits for it but who asks; it is among the snapshots only when it is whole; its error is raised by the next ``settled``, once.
Does not: decide when one is made, or bring one back (``recover``).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import pathlib
import sqlite3
import threading

from crl_jax.experience.recover import keep_newest, snapshot_file
from crl_jax.experience.store import Store, no_copy
from crl_jax.experience.store_connect import connect, copy_whole


class SnapshotThread:
    """Mutable: at most one snapshot is under way. The newest ``keep`` stay; 0, or a store in memory, has none."""

    def __init__(self, store: Store, keep: int) -> None:
        self._store, self._keep = store, keep
        self._running: concurrent.futures.Future[None] | None = None

    def begin(self) -> None:
        """Begin to copy what the store holds now; call it where nothing else is written meanwhile, after `settled`. Raises StoreError."""
        path = pathlib.Path(self._store.path)
        if self._keep < 1 or not path.is_file():
            return
        target = snapshot_file(path, self._store.revision)
        try:
            source = connect(path, timeout_s=10.0, read_only=True)
            source.execute("BEGIN")
            source.execute("SELECT count(*) FROM meta").fetchone()  # from here on this connection sees no later commit
        except sqlite3.Error as error:
            raise no_copy(path, target, error) from error
        self._running = concurrent.futures.Future()
        threading.Thread(target=self._copy, args=(self._running, source, path, target), name="crl-bank-snapshot", daemon=True).start()

    async def settled(self, timeout_s: float) -> None:
        """Returns when no snapshot is being made. Raises the error of the one that was, and TimeoutError."""
        if (running := self._running) is None:
            return
        try:
            await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(running)), timeout_s)
        except TimeoutError:
            late = f"the snapshot of {self._store.path} was not made within {timeout_s:g} s"
            raise TimeoutError(f"{late}: is that disk stuck? Switch snapshots off with bank.snapshots=0") from None
        finally:
            if running.done() and self._running is running:
                self._running = None

    def _copy(self, done: concurrent.futures.Future[None], source: sqlite3.Connection, path: pathlib.Path, target: pathlib.Path) -> None:
        try:
            if not target.exists():
                copy_whole(source, target)
            keep_newest(path, self._keep)
        except (OSError, sqlite3.Error) as error:
            done.set_exception(no_copy(path, target, error))
        except BaseException as error:  # handed to whoever waits
            done.set_exception(error)
        else:
            done.set_result(None)
        finally:
            source.close()
