"""``crl bank consolidate``: offline sleep. Duplicates become one entry, near entries are merged by the extractor.

Owns: the order (duplicates first, so that the model is asked less), and the numbers before and after. Promises: an entry leaves only in the
change that inserts what replaces it, so a model that fails loses nothing; ``--dry-run`` changes nothing and needs no model. Does not: merge
(``experience.editor``) or compare (``experience.writer``).
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from crl_jax.bank_tools import offline, view
from crl_jax.bank_tools.book import Book
from crl_jax.bank_tools.listing import printable
from crl_jax.bank_tools.place import BankInputError, Place, reading, undone_by_resume, writing
from crl_jax.bank_tools.statistics import shares
from crl_jax.experience.index import ExactIndex
from crl_jax.experience.merging import redundancy
from crl_jax.experience.writer import WritePolicy, Writer

if TYPE_CHECKING:
    from crl_jax.config.schema import Config


@dataclasses.dataclass(frozen=True)
class Plan:
    """``duplicate`` and ``near`` are cosines, ``chunk`` how many near entries one generation merges; ``whole`` merges all entries of a
    namespace in their order, not only near ones; at most ``passes`` rounds."""

    duplicate: float = 0.95
    near: float = 0.85
    chunk: int = 5
    whole: bool = False
    passes: int = 1

    def checked(self) -> Plan:
        """Itself. Raises BankInputError."""
        if not (0 < self.near <= 1 and 0 < self.duplicate <= 1):
            raise BankInputError(f"--dedup {self.duplicate:g}, --near {self.near:g}: cosines lie above 0, and 1 is the same direction")
        if self.passes < 1:
            raise BankInputError(f"--passes {self.passes}: give 1 or more")
        return self


def dry_run(place: Place, plan: Plan) -> int:
    """Say which groups would become one entry."""
    with reading(place) as store:
        book = Book(store)
        print(f"before: {_numbers(book, plan)}")
        for name, cosine, largest in (("duplicates", plan.duplicate, 8), ("near", plan.near, plan.chunk)):
            groups = list(_groups(book, cosine, largest))
            print(f"{name} (cosine {cosine:g} or more): {len(groups)} groups of {sum(map(len, groups))} entries")
            for group in groups[:20]:
                print("\n".join(f"  {'┌' if n == 0 else '│'} {i}  {_first(book, i)}" for n, i in enumerate(group)))
            if len(groups) > 20:
                print(f"  ... and {len(groups) - 20} more groups")
    print("nothing was changed (--dry-run)")
    return 0


def consolidate(place: Place, plan: Plan, *, config: Config | None, dedup_only: bool) -> int:
    """Do it; 1 if the extractor was asked and no merge came of it."""
    recipe = None if dedup_only else offline.recipe(place, config)
    with reading(place) as store:
        print(f"before: {_numbers(Book(store), plan)}", flush=True)
    gone = _deduplicate(place, plan)
    print(f"duplicates: {gone} entries left, their usage is with the one that stays", flush=True)
    failed = False if recipe is None else not _merge(place, plan, recipe)
    with reading(place) as store:
        print(f"after:  {_numbers(Book(store), plan)}")
    if warning := undone_by_resume(place):
        print(warning, file=sys.stderr)
    return int(failed)


def _deduplicate(place: Place, plan: Plan) -> int:
    embedder = view.real_embedder()
    with writing(place) as store:
        writer = Writer(store, embedder, lambda: view.real_index(embedder.dim), _policy(place, plan), purpose="consolidate")
        writer.load()
        try:
            return sum(writer.deduplicate(namespace) for namespace in list(writer.state.spaces))
        finally:
            writer.index.close()


def _policy(place: Place, plan: Plan) -> WritePolicy:
    """The run's, with the duplicates of the plan."""
    config = place.config()
    if config is None:
        return WritePolicy(dedup_cosine=plan.duplicate, keep_better=True)
    from crl_jax.bank_settings import write_policy_of

    return dataclasses.replace(write_policy_of(config.bank), dedup_cosine=plan.duplicate)


def _merge(place: Place, plan: Plan, config: Config) -> bool:
    """Whether there was nothing to merge, or something was merged."""
    bank = dataclasses.replace(config.bank, merge_chunk=plan.chunk, merge_cosine=plan.near)
    with offline.opened(place, dataclasses.replace(config, bank=bank), purpose="consolidate") as ready:

        async def passes() -> int:
            total = 0
            for _ in range(plan.passes):
                spaces = list(ready.manager.state.spaces)
                merge = ready.manager.merge if plan.whole else ready.manager.merge_redundant
                written = sum([await merge(namespace) for namespace in spaces])
                total += written
                if not written:
                    break
            return total

        chunks = max(1, len(ready.manager.state)) * plan.passes
        written = ready.shell.call(passes(), ready.deadline_s * chunks, "consolidating the bank")
        counts = ready.manager.counts
    asked, unread = counts["generations_merge"] + counts["merge_failed"], counts["parse_failures"]
    print(f"merges: the extractor ({ready.weights}) was asked {asked} times and wrote {written} entries", flush=True)
    if unread or counts["merge_failed"] or counts["problem_merge_op_refused"]:
        refused = counts["problem_merge_op_refused"]
        lost = f"{unread} answers could not be read, {counts['merge_failed']} did not come, {refused} operations were no merge"
        print(f"  {lost}: these entries stay")
    return not asked or bool(written)


def _numbers(book: Book, plan: Plan) -> str:
    near = shares(book, plan.near)
    parts = [f"{printable(name)} {share:.0%} near" for name, share in near.items()]
    return f"{len(book.live)} entries" + (f" ({', '.join(parts)})" if parts else "")


def _groups(book: Book, cosine: float, largest: int) -> Iterator[tuple[str, ...]]:
    ids, vectors = book.vectors()
    rows = dict(zip(ids, vectors, strict=True))
    for namespace in book.state.spaces:
        here = [i for i in book.state.space(namespace) if i in rows]
        if len(here) > 1:
            index = ExactIndex(vectors.shape[1])
            index.add(here, np.stack([rows[i] for i in here]), namespace=namespace)
            yield from redundancy(index, {i: rows[i] for i in here}, namespace=namespace, cosine=cosine, largest=largest).clusters


def _first(book: Book, entry_id: str) -> str:
    return " ".join(printable(book.entries[entry_id].entry.text).split())[:100]
