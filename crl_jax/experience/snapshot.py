"""A bank to look at: the content of a store file, in memory.

Owns: ``copy_of``. Promises: the file's content stays as it is, whatever is done with the copy, also while another process writes it.
Does not: write anything back.
"""

from __future__ import annotations

import contextlib
import pathlib
import sqlite3

from crl_jax.experience.store import Store, StoreError


def copy_of(path: pathlib.Path, *, revision: int | None = None) -> Store:
    """A store in memory that starts with what the file holds now, or held at a ``revision`` of the past.

    Raises StoreError when there is no usable file, ValueError when it never was at that revision.
    """
    if not path.is_file():
        raise StoreError(f"{path} does not exist: the bank of this run was moved or deleted; restore it from a backup")
    copy = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    with contextlib.closing(Store.open(path, read_only=True)) as source:  # raises for a damaged or foreign file
        source.read(lambda db: db.backup(copy))
    store = Store(copy, f"the copy of {path}")
    if revision is not None:
        store.rewind(revision)
    return store
