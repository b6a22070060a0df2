"""Which store file a command means, and how it may be opened.

Owns: the way from a path a person gives (a run's folder, or a bank file) to the file and the run's recipe. Promises: reading never writes,
and sees one moment of a bank that a run is writing; writing is refused while another process writes the bank; every mistake is one line
with its fix. Does not: interpret the bank.
"""

from __future__ import annotations

import contextlib
import pathlib
import sqlite3
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from crl_jax.errors import UserError
from crl_jax.run_files import BANK_FILE, CONFIG

if TYPE_CHECKING:
    from crl_jax.config.schema import Config
    from crl_jax.experience.store import Store


class BankInputError(UserError, ValueError):
    """A person gave something that cannot be used; nothing was done."""

    exit_code = 2


class NotFound(UserError, LookupError):
    """There is no such bank, entry, namespace or revision."""

    exit_code = 1


class Place(NamedTuple):
    """A store file, and the run's folder it lies in (None: it belongs to no run)."""

    path: pathlib.Path
    folder: pathlib.Path | None

    def config(self) -> Config | None:
        """The run's recipe; None without a run. Raises ConfigError when it cannot be read."""
        if self.folder is None:
            return None
        from crl_jax.config import load

        return load(self.folder / CONFIG)


def find(given: pathlib.Path) -> Place:
    """The bank of a run's folder, or the store file itself. Raises NotFound."""
    with _looking(given):
        path = given / BANK_FILE if given.is_dir() else given
        there = path.is_file()
    if not there:
        raise NotFound(f"{path} does not exist: give the folder of a run with a bank, e.g. runs/quickstart, or a {BANK_FILE} file")
    return _place(path)


def find_broken(given: pathlib.Path) -> Place:
    """As `find`, also where a killed repair left no file in its place yet."""
    from crl_jax.experience.recover import begun

    path = given if given.suffix == ".sqlite" else given / BANK_FILE
    with _looking(given):
        ended_midway = begun(path)
    return _place(path) if ended_midway else find(given)


def find_or_new(given: pathlib.Path) -> Place:
    """As `find`; where nothing is yet, the place of a new bank: FOLDER/bank.sqlite, or the file if its name ends with .sqlite."""
    with _looking(given):
        there = given.is_file() or (given / BANK_FILE).is_file()
    if there:
        return find(given)
    return _place(given if given.suffix == ".sqlite" else given / BANK_FILE)


def _place(path: pathlib.Path) -> Place:
    return Place(path, path.parent if (path.parent / CONFIG).is_file() else None)


@contextlib.contextmanager
def _looking(given: pathlib.Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:  # a name too long, a folder that may not be entered
        raise BankInputError(f"{str(given)[:200]} cannot be looked at ({error.strerror}): give a folder you may read") from error


@contextlib.contextmanager
def _damage(path: pathlib.Path) -> Iterator[None]:
    """Damage that shows only while the file is read is told like damage that shows when it is opened."""
    from crl_jax.experience.store import StoreDamaged

    try:
        yield
    except sqlite3.DatabaseError as error:
        raise StoreDamaged(
            f"{path} is damaged ({error}): `crl bank verify` says more, `crl bank repair` brings its last good state"
        ) from error


@contextlib.contextmanager
def reading(place: Place) -> Iterator[Store]:
    """The store, read only, as it is at this moment: what a run writes meanwhile is not seen. Raises StoreError, NotFound."""
    from crl_jax.experience.store import Store

    store = Store.open(place.path, read_only=True)
    try:
        with _damage(place.path):
            store.read(lambda db: db.execute("BEGIN"))
            yield store
    finally:
        store.close()


@contextlib.contextmanager
def claimed(place: Place) -> Iterator[None]:
    """Nobody else writes the bank inside the block; the folder of a new one is made. Raises BankInputError, ConfigError."""
    from crl_jax import bank_lock

    try:
        place.path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BankInputError(f"{place.path.parent} cannot be made ({error.strerror}): choose another folder") from error
    with bank_lock.writing(place.path):
        yield


@contextlib.contextmanager
def writing(place: Place) -> Iterator[Store]:
    """The store, to be written. Raises ConfigError while another process (a run, `crl bank serve`) writes it, StoreError."""
    from crl_jax.experience.store import Store

    with claimed(place):
        store = Store.open(place.path)
        try:
            with _damage(place.path):
                yield store
        finally:
            store.close()


def undone_by_resume(place: Place) -> str:
    """A warning, if the run is one whose ``--resume`` goes back to its checkpoint and so undoes what is written now; else empty."""
    config = place.config()
    if config is None or not config.run.sync:
        return ""
    return (
        f"note: {place.folder} is a synchronous run (run.sync): `crl train --resume` goes back to its newest checkpoint and undoes this; "
        "bring it into a new run's folder, or an asynchronous one, to keep it"
    )
