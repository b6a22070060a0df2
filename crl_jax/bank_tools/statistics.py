"""``crl bank stats``: a bank in numbers.

Owns: which numbers, their JSON form and their table. Promises: reads only; sums and counts beside every rate, so that two banks can be
added up. Does not: list entries (``listing``).
"""

from __future__ import annotations

import pathlib
import statistics
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np

from crl_jax.bank_tools.book import Book
from crl_jax.bank_tools.listing import printable
from crl_jax.experience.index import ExactIndex
from crl_jax.experience.merging import redundancy
from crl_jax.experience.transfer import lifts

SAMPLE = 256  # entries whose neighbours are looked up
NEAR = 0.85


def gather(book: Book, path: pathlib.Path, *, near: float = NEAR) -> dict[str, Any]:
    """All numbers as plain values. ``near`` is the cosine from which entries count as redundant."""
    live = book.live
    usage = [book.usage(i) for i in live]
    writes, leavings = _flow(book)
    return {
        "revision": book.revision,
        "step": book.step,
        "entries": len(live),
        "entries_ever": len(book.entries),
        "namespaces": dict(Counter(entry.namespace for entry in live.values())),
        "sources": _sources(book),
        "written": dict(writes),
        "left": dict(leavings),
        "generations": book.generations,
        "ever_read": sum(u.shown > 0 for u in usage),
        "reads": sum(u.shown for u in usage),
        "reads_succeeded": sum(u.succeeded for u in usage),
        "votes": sum(u.votes for u in usage),
        "voted": sum(u.votes > 0 for u in usage),
        "success": success(book),
        "lift": {reader: lift._asdict() for reader, lift in sorted(lifts(book.state).items())},
        "age_steps": _ages(book),
        "redundancy": shares(book, near),
        "redundancy_cosine": near,
        "file_bytes": file_bytes(path),
        "growth": growth(book, points=8),
    }


def file_bytes(path: pathlib.Path) -> int:
    """Size of the store with the log that SQLite keeps beside it."""
    return sum(p.stat().st_size for p in (path, path.with_name(path.name + "-wal")) if p.exists())


def success(book: Book) -> dict[str, dict[str, int]]:
    """Episodes and successes with and without experience."""
    found = {"with": {"episodes": 0, "succeeded": 0}, "without": {"episodes": 0, "succeeded": 0}}
    for _, read, episodes, succeeded in book.outcomes():
        side = found["with" if read else "without"]
        side["episodes"] += episodes
        side["succeeded"] += succeeded
    return found


def shares(book: Book, near: float) -> dict[str, float]:
    """By namespace, the share of (at most 256 sampled) entries with a neighbour of cosine ``near`` or more."""
    ids, vectors = book.vectors()
    by_space: dict[str, list[int]] = {}
    for n, i in enumerate(ids):
        by_space.setdefault(book.entries[i].entry.namespace, []).append(n)
    found: dict[str, float] = {}
    for namespace, rows in by_space.items():
        index = ExactIndex(vectors.shape[1])
        index.add([ids[n] for n in rows], vectors[rows], namespace=namespace)
        some = rows if len(rows) <= SAMPLE else sorted(np.random.default_rng(0).choice(rows, SAMPLE, replace=False).tolist())
        found[namespace] = redundancy(index, {ids[n]: vectors[n] for n in some}, namespace=namespace, cosine=near, largest=5).share
    return found


def growth(book: Book, *, points: int = 0) -> list[dict[str, Any]]:
    """By step: entries written and removed, entries by namespace after it, episodes and successes with and without experience; every step,
    or about ``points`` stretches that end at the step named."""
    steps: dict[int, dict[str, Any]] = {}

    def at(step: int) -> dict[str, Any]:
        return steps.setdefault(step, {"written": Counter[str](), "left": Counter[str](), "change": Counter[str](), "success": {}})

    for i, kept in book.entries.items():
        namespace = kept.entry.namespace
        born = at(book.applied.get(kept.created, kept.entry.step))
        born["written"][_way(book, i)] += 1
        born["change"][namespace] += 1
        if kept.retired is not None:
            died = at(book.applied.get(kept.retired, kept.entry.step))
            died["left"][_end(book, kept.retired)] += 1
            died["change"][namespace] -= 1
    for step, read, episodes, succeeded in book.outcomes():
        at(step)["success"]["with" if read else "without"] = (episodes, succeeded)
    ordered = sorted(steps)
    ends = set(ordered[:: -max(1, len(ordered) // points)]) if points else set(ordered)
    return list(_stretches(steps, ordered, ends))


def _stretches(steps: dict[int, dict[str, Any]], ordered: list[int], ends: set[int]) -> Iterator[dict[str, Any]]:
    size: Counter[str] = Counter()
    written, left, success = Counter[str](), Counter[str](), {"with": [0, 0], "without": [0, 0]}
    for step in ordered:
        here = steps[step]
        size.update(here["change"])
        written.update(here["written"])
        left.update(here["left"])
        for side, (episodes, succeeded) in here["success"].items():
            success[side][0] += episodes
            success[side][1] += succeeded
        if step in ends:
            entries = {name: n for name, n in size.items() if n}
            yield {"step": step, "entries": entries, "written": dict(written), "left": dict(left), **success}
            written, left, success = Counter[str](), Counter[str](), {"with": [0, 0], "without": [0, 0]}


def _way(book: Book, entry_id: str) -> str:
    operation = book.log.get(book.entries[entry_id].created)
    if operation is None:
        return "update" if book.entries[entry_id].entry.parents else "add"
    return operation.reason if operation.reason in ("dedup", "import", "seed") else operation.kind


def _end(book: Book, revision: int) -> str:
    operation = book.log.get(revision)
    if operation is None:
        return "other"
    return operation.reason if operation.reason in ("evict", "dedup") else operation.kind


def _flow(book: Book) -> tuple[Counter[str], Counter[str]]:
    writes, leavings = Counter[str](), Counter[str]()
    for i, kept in book.entries.items():
        writes[_way(book, i)] += 1
        if kept.retired is not None:
            leavings[_end(book, kept.retired)] += 1
    return writes, leavings


def _sources(book: Book) -> dict[str, int]:
    names = {True: "success", False: "failure", None: "neither"}
    return dict(Counter(names[entry.outcome] for entry in book.live.values()))


def _ages(book: Book) -> dict[str, float] | None:
    ages = [max(0, book.step - entry.step) for entry in book.live.values()]
    return {"median": statistics.median(ages), "oldest": max(ages)} if ages else None


def table(found: dict[str, Any]) -> Iterator[str]:
    """The numbers for a person."""
    yield f"entries      {found['entries']} ({found['entries_ever']} ever written)"
    for namespace, n in found["namespaces"].items():
        near = found["redundancy"].get(namespace)
        yield f"  {printable(namespace):<24} {n}" + ("" if near is None else f", {near:.0%} with a near duplicate")
    yield f"written      {_counts(found['written'])}"
    yield f"left         {_counts(found['left'])}"
    yield f"sources      {_counts(found['sources'])}"
    if found["age_steps"]:
        yield f"age          {found['age_steps']['median']:g} steps in the middle, {found['age_steps']['oldest']} the oldest"
    yield f"ever read    {found['ever_read']}"
    rate = f", {found['reads_succeeded'] / found['reads']:.3f} of them in episodes that succeeded" if found["reads"] else ""
    yield f"reads        {found['reads']}{rate}"
    for side, tally in found["success"].items():
        yield f"success      {_rate(tally['succeeded'], tally['episodes'])} {side} experience ({tally['episodes']} episodes)"
    for reader, lift in found["lift"].items():
        own, foreign = (f"{lift[side]:+.3f}" if lift[side] is not None else "-" for side in ("own", "foreign"))
        yield f"lift         {printable(reader) or '(no family)'}: own {own}, foreign against own {foreign}"
    if found["votes"]:
        yield f"votes        {found['votes']} on {found['voted']} entries"
    yield f"generations  {found['generations']}\nrevision     {found['revision']} (step {found['step']})"
    yield f"file         {found['file_bytes'] / 2**20:.1f} MiB"
    if len(found["growth"]) > 1:
        yield "\nto step  entries  written  left  with     without"
        for row in found["growth"]:
            flow = f"{sum(row['written'].values()):>7}  {sum(row['left'].values()):>4}"
            rates = "  ".join(f"{_rate(row[side][1], row[side][0]):<7}" for side in ("with", "without"))
            yield f"{row['step']:>7}  {sum(row['entries'].values()):>7}  {flow}  {rates}".rstrip()


def _rate(succeeded: int, episodes: int) -> str:
    return f"{succeeded / episodes:.3f}" if episodes else "-"


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{n} {name}" for name, n in sorted(counts.items(), key=lambda item: -item[1])) or "none"
