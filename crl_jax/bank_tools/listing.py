"""``crl bank ls``, ``show`` and ``export``'s rows: entries as lines and as plain values.

Owns: filters and orders of lists of entries, and their one-line form. Promises: the same filters for people, JSON and the web page; control
characters of stored text never reach a terminal. Does not: change anything.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from typing import Any, Literal

from crl_jax.bank_tools.book import Book, Kept
from crl_jax.bank_tools.place import NotFound
from crl_jax.experience.bank import utility
from crl_jax.records import Usage

Sort = Literal["newest", "used", "useful"]


@dataclasses.dataclass(frozen=True)
class Filter:
    """Which entries: of a ``namespace`` (empty: all), whose text or id contains ``text`` (case does not matter), the ``retired`` ones
    too."""

    namespace: str = ""
    text: str = ""
    retired: bool = False
    sort: Sort = "newest"


def selected(book: Book, wanted: Filter) -> list[Kept]:
    """The entries that pass, in their order. ``useful`` is by `bank.utility`, then by how much evidence there is. Raises NotFound for a
    namespace that has no entry."""
    known = {kept.entry.namespace for kept in book.entries.values()}
    if wanted.namespace and wanted.namespace not in known:
        raise NotFound(
            f"no namespace {wanted.namespace!r}: there {'is' if len(known) == 1 else 'are'} {', '.join(sorted(known)) or 'none'}"
        )
    needle = wanted.text.casefold()
    found = [
        kept
        for kept in book.entries.values()
        if (wanted.retired or kept.retired is None)
        and wanted.namespace in ("", kept.entry.namespace)
        and (not needle or needle in kept.entry.text.casefold() or needle in kept.entry.id)
    ]
    return sorted(found, key=_ORDERS[wanted.sort](book), reverse=True)


def _newest(book: Book) -> Callable[[Kept], Any]:
    del book
    return lambda kept: kept.entry.id


def _used(book: Book) -> Callable[[Kept], Any]:
    return lambda kept: (book.usage(kept.entry.id).shown, kept.entry.id)


def _useful(book: Book) -> Callable[[Kept], Any]:
    def order(kept: Kept) -> Any:
        usage = book.usage(kept.entry.id)
        return utility(usage), usage.shown, kept.entry.id

    return order


_ORDERS: dict[str, Callable[[Book], Callable[[Kept], Any]]] = {"newest": _newest, "used": _used, "useful": _useful}


def row(book: Book, kept: Kept) -> dict[str, Any]:
    """One entry as plain values."""
    usage = book.usage(kept.entry.id)
    return {
        **dataclasses.asdict(kept.entry),
        "live": kept.retired is None,
        "created_revision": kept.created,
        "retired_revision": kept.retired,
        "usage": dataclasses.asdict(usage),
        "utility": round(utility(usage), 6),
    }


def lines(book: Book, wanted: Filter, *, limit: int, as_json: bool) -> Iterator[str]:
    """The list as text: one line per entry, or one JSON object per line; ``limit`` 0 for all."""
    found = selected(book, wanted)
    for kept in found[: limit or None]:
        if as_json:
            yield json.dumps(row(book, kept), ensure_ascii=True)
        else:
            yield one_line(kept, book.usage(kept.entry.id))
    if limit and len(found) > limit and not as_json:
        yield f"... and {len(found) - limit} more (--limit 0 shows all)"


def one_line(kept: Kept, usage: Usage) -> str:
    """id, namespace, step, reads (successful of all), outcome of the source, first line of the text."""
    entry = kept.entry
    source = "" if entry.outcome is None else "  from a success" if entry.outcome else "  from a failure"
    gone = "" if kept.retired is None else f"  (left at revision {kept.retired})"
    first = printable(entry.text).splitlines()[0] if entry.text.strip() else ""
    return f"{entry.id}  {printable(entry.namespace)}  step {entry.step}  {usage.succeeded}/{usage.shown}{source}{gone}  {first}"


def printable(text: str) -> str:
    """Text of a model or a file without what could move a terminal's cursor; line ends and tabs stay."""
    return "".join(c if c in "\n\t" or c.isprintable() else "�" for c in text)
