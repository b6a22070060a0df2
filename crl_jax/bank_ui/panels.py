"""What each part of the page shows, as plain values for JSON.

Owns: the shapes the page reads, and the limits on how much one answer holds. Promises: pure reads of a book; the same numbers as the
command line prints; sizes are bounded whatever the bank's size. Does not: know HTTP.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from crl_jax.bank_tools import statistics
from crl_jax.bank_tools.book import Book
from crl_jax.bank_tools.lineage import Decode, lineage
from crl_jax.bank_tools.listing import Filter, row, selected
from crl_jax.bank_tools.place import BankInputError, Place
from crl_jax.experience.transfer import lifts

PAGE = 200  # entries of one answer, at most
POINTS = 1500  # of the map; of a larger bank a seeded sample
PAIRS = 4000
NEIGHBOURS = 4  # joined to each point, at most
SNIPPET = 160
GUIDED = 400  # episodes of one entry that are listed one by one


def summary(book: Book, place: Place) -> dict[str, Any]:
    """What stands at the top: where, when, how many, how well."""
    live = book.live
    usage = [book.usage(i) for i in live]
    return {
        "name": place.folder.name if place.folder is not None else f"{place.path.resolve().parent.name}/{place.path.name}",
        "path": str(place.path),
        "revision": book.revision,
        "newest": book.newest,
        "oldest": _oldest(book),
        "step": book.step,
        "entries": len(live),
        "entries_ever": len(book.entries),
        "namespaces": _counted(entry.namespace for entry in live.values()),
        "reads": sum(u.shown for u in usage),
        "reads_succeeded": sum(u.succeeded for u in usage),
        "ever_read": sum(u.shown > 0 for u in usage),
        "success": statistics.success(book),
        "lift": {reader: lift._asdict() for reader, lift in lifts(book.state).items()},
        "generations": book.generations,
        "file_bytes": statistics.file_bytes(place.path),
    }


def growth(book: Book) -> dict[str, Any]:
    """Entries by namespace, changes, and success with and without experience, by training step."""
    return {"steps": statistics.growth(book), "namespaces": sorted({kept.entry.namespace for kept in book.entries.values()})}


def entries(book: Book, wanted: Filter, *, descending: bool, by: str, offset: int, limit: int) -> dict[str, Any]:
    """A page of the table. ``by``: newest, used, useful, success, namespace or text. Raises BankInputError."""
    if not 1 <= limit <= PAGE or offset < 0:
        raise BankInputError(f"limit {limit}, offset {offset}: ask for 1 to {PAGE} entries from 0 on")
    found = selected(book, wanted)
    orders = {"success": lambda k: _rate(book, k.entry.id), "namespace": lambda k: k.entry.namespace, "text": lambda k: k.entry.text}
    if by in orders:
        found.sort(key=orders[by], reverse=True)
    if not descending:
        found.reverse()
    page = [_short(row(book, kept)) for kept in found[offset : offset + limit]]
    return {"total": len(found), "offset": offset, "entries": page}


def entry(book: Book, entry_id: str, decode: Decode | None) -> dict[str, Any]:
    """One entry's whole story. Raises NotFound."""
    found = lineage(book, entry_id, decode=decode).to_dict()
    found["guided_total"] = len(found["guided"])
    found["guided"] = found["guided"][-GUIDED:]
    for name in ("parents", "children"):
        found[f"{name}_total"] = len(found[name])
        found[name] = found[name][:60]
    credit = found["writing"]["credit"] if found["writing"] else None
    if credit is not None:  # rewards are +1 and -1, so their spread follows from the mean
        mean, n = credit["mean"], credit["episodes"]
        credit["error"] = None if mean is None else math.sqrt(max(0.0, 1 - mean * mean) / n)
    return found


class Layout(NamedTuple):
    """The points of the map with what they were made of: entry ids, vectors [n, d] (unit rows), families, how many entries have one."""

    points: list[list[Any]]
    vectors: Float[np.ndarray, "n d"]
    families: list[str]
    total: int
    missing: int
    explained: list[float]


def layout(book: Book) -> Layout:
    """Entries as points in the plane of the two directions in which their vectors differ most (PCA); of a large bank a seeded sample."""
    live = list(book.live)
    ids = live
    if len(live) > POINTS:
        ids = [live[n] for n in sorted(np.random.default_rng(0).choice(len(live), POINTS, replace=False).tolist())]
    ids, vectors = book.vectors(ids)
    places, explained = plane(vectors)
    found = [(book.entries[i].entry, book.usage(i)) for i in ids]
    points: list[list[Any]] = [
        [e.id, round(float(x), 4), round(float(y), 4), e.namespace, e.text[:SNIPPET], u.shown, u.succeeded]
        for (e, u), (x, y) in zip(found, places, strict=True)
    ]
    return Layout(points, vectors, [e.namespace for e, _ in found], len(live), min(len(live), POINTS) - len(ids), explained)


def duplicates(found: Layout, near: float) -> dict[str, Any]:
    """The map: its points, and the pairs of one family that are near. Raises BankInputError for a cosine outside (0, 1]."""
    if not 0 < near <= 1:
        raise BankInputError(f"near={near:g}: give a cosine above 0, at most 1")
    pairs = near_pairs(found.vectors, found.families, near)
    return {
        "points": found.points,
        "pairs": pairs,
        "total": found.total,
        "missing": found.missing,
        "explained": found.explained,
        "in_pairs": len({n for pair in pairs for n in pair[:2]}),
    }


def plane(vectors: Float[np.ndarray, "n d"]) -> tuple[Float[np.ndarray, "n 2"], list[float]]:
    """Coordinates along the first two principal components, each stretched to fill [-1, 1], and the shares of variance they explain."""
    n = len(vectors)
    if n < 2:
        return np.zeros((n, 2), np.float32), [0.0, 0.0]
    centred = vectors - vectors.mean(axis=0)
    spread = centred.T @ centred
    top = _leading(spread)
    top = top * np.where(top[np.abs(top).argmax(axis=0), [0, 1]] < 0, -1, 1)  # a sign that does not flip from one look to the next
    places = centred @ top
    shares = (places**2).sum(axis=0) / (float(np.trace(spread)) or 1.0)
    low, high = places.min(axis=0), places.max(axis=0)
    width = np.where(high - low > 1e-6, high - low, 1.0)
    return 2 * (places - (low + high) / 2) / width, [round(float(share), 4) for share in shares]


def _leading(matrix: Float[np.ndarray, "d d"], rounds: int = 40) -> Float[np.ndarray, "d 2"]:
    """The two leading eigenvectors of a symmetric matrix, by iterating a small subspace: a tenth of the time of all eigenvectors."""
    basis = np.random.default_rng(0).standard_normal((len(matrix), min(8, len(matrix)))).astype(matrix.dtype)
    for _ in range(rounds):
        basis, _ = np.linalg.qr(matrix @ basis)
    values, inside = np.linalg.eigh(basis.T @ matrix @ basis)
    found = basis @ inside[:, np.argsort(-values)[:2]]
    return np.pad(found, ((0, 0), (0, 2 - found.shape[1])))


def near_pairs(vectors: Float[np.ndarray, "n d"], families: list[str], near: float) -> list[list[float]]:
    """[row, row, cosine] of entries of one family at least ``near`` similar, the nearest first, few for each entry."""
    by_family: dict[str, list[int]] = {}
    for n, family in enumerate(families):
        by_family.setdefault(family, []).append(n)
    found: dict[tuple[int, int], float] = {}
    for rows in by_family.values():
        cosines = vectors[rows] @ vectors[rows].T
        np.fill_diagonal(cosines, -1.0)
        k = min(NEIGHBOURS, len(rows) - 1)
        if k < 1:
            continue
        best = np.argpartition(-cosines, k - 1, axis=1)[:, :k]
        for a, b in zip(*np.nonzero(np.take_along_axis(cosines, best, axis=1) >= near), strict=True):
            other = int(best[a, b])
            pair = (rows[min(int(a), other)], rows[max(int(a), other)])
            found[pair] = float(cosines[a, other])
    ordered = sorted(found.items(), key=lambda item: -item[1])[:PAIRS]
    return [[a, b, round(cosine, 4)] for (a, b), cosine in ordered]


def _oldest(book: Book) -> int:
    row = book.store.read(lambda db: db.execute("SELECT revision FROM base").fetchone())
    return int(row[0]) if row else 0


def _rate(book: Book, entry_id: str) -> tuple[float, int]:
    u = book.usage(entry_id)
    return (u.succeeded / u.shown if u.shown else -1.0), u.shown


def _short(found: dict[str, Any]) -> dict[str, Any]:
    names = ("id", "namespace", "text", "step", "outcome", "live", "usage", "utility", "author_version")
    return {name: found[name] for name in names}


def _counted(names: Any) -> dict[str, int]:
    counts: dict[str, int] = {}
    for name in names:
        counts[name] = counts.get(name, 0) + 1
    return dict(sorted(counts.items(), key=lambda item: -item[1]))
