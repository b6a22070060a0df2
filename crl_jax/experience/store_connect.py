"""The connection to a store file, and its copy.

Owns: how SQLite is asked to open it, and to copy it. Promises: a file that is only read is not written, nor anything beside it; what its
write-ahead log holds is read with it, or there is an error. Does not: look at the content (``store``).
"""

from __future__ import annotations

import contextlib
import pathlib
import sqlite3


def connect(path: str | pathlib.Path, *, timeout_s: float, read_only: bool) -> sqlite3.Connection:
    """Raises sqlite3.OperationalError for a file that cannot be opened, sqlite3.DatabaseError for one that is no database."""
    if not read_only or str(path) == ":memory:":
        return sqlite3.connect(str(path), timeout=timeout_s, isolation_level=None, check_same_thread=False)
    uri = pathlib.Path(path).resolve().as_uri()
    try:
        db = sqlite3.connect(f"{uri}?mode=ro", uri=True, timeout=timeout_s, isolation_level=None, check_same_thread=False)
        db.execute("SELECT 1 FROM sqlite_master")
    except sqlite3.OperationalError:  # a folder that cannot be written has no room for the files WAL needs, and then no writer either
        log = pathlib.Path(f"{path}-wal")
        if log.is_file() and log.stat().st_size:  # `immutable` would pass over it, and show less than was acknowledged
            fix = f"copy both into a folder that may be written, and read {pathlib.Path(path).name} there"
            raise sqlite3.OperationalError(f"its folder cannot be written, and {log.name} holds changes of its own: {fix}") from None
        db = sqlite3.connect(f"{uri}?immutable=1", uri=True, timeout=timeout_s, isolation_level=None, check_same_thread=False)
    return db


def copy_whole(source: sqlite3.Connection, target: pathlib.Path) -> None:
    """Write what ``source`` holds to ``target``, which appears only when it is complete. Raises OSError and sqlite3.Error; then nothing is
    left of it."""
    part = target.with_name(target.name + ".part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        part.unlink(missing_ok=True)
        with contextlib.closing(sqlite3.connect(part)) as copy:
            source.backup(copy)
        part.replace(target)
    except (OSError, sqlite3.Error):
        with contextlib.suppress(OSError):  # a folder that cannot be written refuses this too
            part.unlink(missing_ok=True)
        raise
