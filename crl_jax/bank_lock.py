"""One process writes a bank's file at a time.

Owns: the lock beside the file. Promises: it goes with the process, also a killed one; a second process is told before it opens the file.
Does not: keep readers away (they take no lock).
"""

from __future__ import annotations

import contextlib
import fcntl
import pathlib
from collections.abc import Iterator

from crl_jax.config.parse import ConfigError


@contextlib.contextmanager
def writing(path: pathlib.Path) -> Iterator[None]:
    """Inside the block nobody else writes the bank at ``path``. Raises ConfigError when somebody does, or its folder cannot be written."""
    with contextlib.ExitStack() as stack:
        try:
            lock = stack.enter_context(path.with_name(path.name + ".lock").open("a"))
        except OSError as error:
            raise ConfigError(f"cannot write in {path.parent} ({error.strerror}): give another folder") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            other = "a `crl bank serve`, or a run that trains"
            raise ConfigError(f"another process writes {path} ({other}): end it first, or use its address as bank.server.url") from error
        yield
