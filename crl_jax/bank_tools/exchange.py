"""``crl bank export``, ``import`` and ``seed``: lessons out of a bank and into one.

Owns: what they write and say. Promises: an export appears only when it is complete; an import is read to its end before the bank is opened
for writing, then all of it is one transaction: whole, or not at all. Does not: read the formats (``lessons``) or ask a model
(``seeding``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import sys
from collections.abc import Iterator

from crl_jax.bank_tools import view
from crl_jax.bank_tools.book import Book
from crl_jax.bank_tools.lessons import read_lessons
from crl_jax.bank_tools.listing import Filter, row, selected
from crl_jax.bank_tools.place import BankInputError, Place, reading, undone_by_resume, writing
from crl_jax.experience import store_rows as rows
from crl_jax.experience.writer import Lesson, WritePolicy, Writer, Written


def export(place: Place, target: pathlib.Path, wanted: Filter, *, revision: int | None, overwrite: bool) -> int:
    """Write the entries, oldest first, as one JSON object a line; ``-`` is the standard output."""
    if str(target) != "-":
        _may_be_written(target, place, overwrite=overwrite)
    with reading(place) as store:
        book = Book(store, revision=revision)
        lines = [json.dumps(row(book, kept), ensure_ascii=True) for kept in reversed(selected(book, wanted))]
    if str(target) == "-":
        sys.stdout.writelines(f"{line}\n" for line in lines)
        return 0
    part = target.with_name(target.name + ".part")
    try:
        with part.open("w", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in lines)
            file.flush()
            os.fsync(file.fileno())
        part.replace(target)
    except OSError as error:
        with contextlib.suppress(OSError):  # a folder that cannot be written refuses this too
            part.unlink(missing_ok=True)
        raise BankInputError(f"{target} cannot be written ({error.strerror}): choose a folder you may write in, with room") from error
    print(f"{len(lines)} entries of {place.path} are in {target}")
    return 0


def _may_be_written(target: pathlib.Path, place: Place, *, overwrite: bool) -> None:
    """Raises BankInputError for a file that is there, and for what no export may ever replace: the bank, its companions, devices."""
    try:
        there, regular = target.exists(), target.is_file()
        whole = target.resolve()
        bank = regular and whole.open("rb").read(16) == b"SQLite format 3\0"
    except OSError as error:
        raise BankInputError(f"{str(target)[:200]} cannot be written ({error.strerror}): choose another file") from error
    mine = place.path.resolve()
    if bank or (whole.parent == mine.parent and whole.name.startswith(mine.name)):
        raise BankInputError(f"{target} is a bank's own file: give another name for the lessons")
    if there and not regular:
        raise BankInputError(f"{target} is no file: give the name of a file, or - for the standard output")
    if there and not overwrite:
        raise BankInputError(f"{target} is there already: give another name, or --overwrite")


def policy(place: Place, dedup: float | None) -> WritePolicy:
    """The run's own, with another limit for duplicates if one is given (0: none are)."""
    config = place.config()
    if config is None:
        found = WritePolicy()
    else:
        from crl_jax.bank_settings import write_policy_of

        found = write_policy_of(config.bank)
    if dedup is None:
        return found
    if not 0 <= dedup <= 1:
        raise BankInputError(f"--dedup {dedup:g}: give the cosine from which two entries are duplicates, e.g. 0.95; 0 switches it off")
    return dataclasses.replace(found, dedup_cosine=dedup or 2.0)


def bring_in(place: Place, file: pathlib.Path, *, reason: str, namespace: str, usage: bool, dedup: float | None) -> int:
    """``import`` and ``seed``: the lessons of a file into a bank, which is made if there is none."""
    new = not place.path.is_file()
    how = policy(place, dedup)
    only = namespace or ("" if new else _only_namespace(place))
    lessons = read_lessons(file, namespace=only, usage=usage)
    if not lessons:
        print(f"{file} holds no entry that is in its bank: nothing was written")
        return 0
    written, entries = write(place, lessons, how, reason=reason)
    for line in _said(place, file, lessons, written, entries, new=new):
        print(line)
    if warning := undone_by_resume(place):
        print(warning, file=sys.stderr)
    return 0


def write(place: Place, lessons: list[Lesson], how: WritePolicy, *, reason: str) -> tuple[Written, int]:
    """Bring lessons into the bank in one transaction; what was written, and how many entries there are now."""
    embedder = view.real_embedder()
    with writing(place) as store:
        writer = Writer(store, embedder, lambda: view.real_index(embedder.dim), how)
        writer.load()
        step = store.read(rows.newest_step)
        try:
            written = writer.bring_in(lessons, step=step, reason=reason)
        except ValueError as error:
            raise BankInputError(f"nothing was written: {error}") from error
        finally:
            writer.index.close()
        return written, len(writer.state)


def _only_namespace(place: Place) -> str:
    """The bank's namespace, if it has one alone."""
    with reading(place) as store:
        found = list(store.load().spaces)
    return found[0] if len(found) == 1 else ""


def _said(place: Place, file: pathlib.Path, lessons: list[Lesson], done: Written, entries: int, *, new: bool) -> Iterator[str]:
    kept = [entry for entry in done.written if entry.id not in done.retired]
    where = f"{'a new bank, ' if new else ''}{place.path}"
    yield f"{len(lessons)} lessons of {file}: {len(kept)} are new entries of {where}, which holds {entries}"
    if done.duplicates:
        yield f"{done.duplicates} were duplicates: one text of each is kept, with the usage of all"
    if done.evicted:
        yield f"{done.evicted} entries left, because their namespace is full (bank.capacity)"
