"""A stored bank as the actor sees it: what a query would be shown, and why.

Owns: the read-only search service over one revision: the run's embedder, its index, its ranking with the counters as they stand. Promises:
nothing is counted, reserved or written; an entry without a usable stored vector is embedded again in memory only; the explanation is made
of the very numbers that ordered the entries. Does not: keep itself up to date (a new revision is a new view).
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from crl_jax.bank_tools.book import Book
from crl_jax.bank_tools.listing import printable
from crl_jax.bank_tools.place import BankInputError, NotFound
from crl_jax.experience.index import Index, has_direction
from crl_jax.experience.protocols import Embedder
from crl_jax.experience.reader import Ranked, Reader, Routing
from crl_jax.experience.retrieve import Diversity
from crl_jax.experience.search import SearchService

if TYPE_CHECKING:
    from crl_jax.config.schema import Config

TEXT_LIMIT = 4000  # characters of a query


@dataclasses.dataclass(frozen=True)
class Rules:
    """How the run ranks: its diversity settings, routing, and what a step leaves of an entry's recent counts."""

    diversity: Diversity = dataclasses.field(default_factory=Diversity)
    routing: Routing = Routing.TASK
    decay: tuple[float, float, int] | None = None

    @staticmethod
    def of(config: Config | None) -> Rules:
        """Those of a configuration; the defaults without one."""
        if config is None:
            return Rules()
        from crl_jax.bank_settings import diversity_of

        decay = None if config.bank.utility_decay is None else (*config.bank.utility_decay, config.run.steps)
        return Rules(diversity_of(config.bank), Routing(config.bank.routing), decay)

    def fading(self, step: int) -> float:
        """The decay in force at a step, as the manager has it."""
        if self.decay is None:
            return 1.0
        first, last, steps = self.decay
        return last + (first - last) * (1 + math.cos(math.pi * min(1.0, step / max(1, steps)))) / 2


def real_embedder() -> Embedder:
    """The embedder runs use. Raises ImportError naming its package."""
    from crl_jax.models.embedder import MiniLM

    return MiniLM()


def real_index(dim: int) -> Index:
    """The index runs use."""
    from crl_jax.experience.scann_index import ScannIndex

    return ScannIndex(dim)


class View:
    """Mutable service on one event loop: create it there (`make`), `aclose` it there."""

    def __init__(self, book: Book, embedder: Embedder, rules: Rules, index: Index, embedded_now: int) -> None:
        self._index = index
        self.book = book
        self.embedded_now = embedded_now
        self._search = SearchService(embedder=embedder, index=lambda: index, counts=Counter(), workers=1, timeout_s=120.0)
        self._reader = Reader(
            search=self._search,
            state=lambda: book.state,
            step=lambda: book.step,
            diversity=rules.diversity,
            seed=0,
            routing=rules.routing,
            decay=lambda: rules.fading(book.step),
        )
        self._rules = rules

    @staticmethod
    def make(book: Book, embedder: Embedder, rules: Rules, *, make_index: Callable[[int], Index] = real_index) -> Callable[[], View]:
        """Index the live entries, which may take a while and needs no event loop; what it returns makes the view on the running one."""
        stored, _ = book.store.vectors(fingerprint=embedder.fingerprint, dim=embedder.dim, ids=list(book.live))
        vectors = {i: vector for i, vector in stored.items() if has_direction(vector)}
        missing = [entry for i, entry in book.live.items() if i not in vectors]
        made = embedder.embed([entry.text for entry in missing]) if missing else ()
        vectors |= {entry.id: vector for entry, vector in zip(missing, made, strict=True) if has_direction(vector)}
        index = make_index(embedder.dim)
        for namespace, space in book.state.spaces.items():
            if found := [i for i in space if i in vectors]:
                index.add(found, np.stack([vectors[i] for i in found]), namespace=namespace)
        return lambda: View(book, embedder, rules, index, len(missing))

    async def search(self, namespace: str, text: str) -> list[Ranked]:
        """Every candidate of a query, the one that is shown first at the front. Raises BankInputError, NotFound."""
        text = check_query(text)
        namespace = self.family(namespace)
        return await self._reader.explain(namespace, text)

    def family(self, namespace: str) -> str:
        """The namespace to ask in: the one given, or the only one there is."""
        known = sorted(self.book.state.spaces)
        if not namespace:
            if len(known) == 1:
                return known[0]
            which = f"there are {', '.join(known)}" if known else "the bank is empty"
            raise BankInputError(f"say for which family the actor asks with --namespace: {which}")
        if namespace not in known and self._rules.routing is Routing.TASK:
            raise NotFound(f"no namespace {namespace!r}: there {'is' if len(known) == 1 else 'are'} {', '.join(known) or 'none'}")
        return namespace

    async def aclose(self) -> None:
        """End the threads."""
        await self._search.aclose()
        self._index.close()


def check_query(text: str) -> str:
    """A query without blanks around it. Raises BankInputError for none, or one of more than 4,000 characters."""
    text = text.strip()
    if not text or len(text) > TEXT_LIMIT:
        raise BankInputError(f"the query has {len(text)} characters: give 1 to {TEXT_LIMIT}, the words of a task's goal")
    if any("\ud800" <= c <= "\udfff" for c in text):
        raise BankInputError("the query has half a surrogate pair: give whole characters")
    return text


def explained(ranked: Sequence[Ranked], rules: Rules, *, limit: int) -> list[dict[str, Any]]:
    """The candidates as plain values: place, similarity and its rank, counters, the parts of the score, and the reason in words."""
    by_similarity = sorted(range(len(ranked)), key=lambda n: -ranked[n].shown.similarity)
    rank = {n: place for place, n in enumerate(by_similarity)}
    return [
        {
            "place": n + 1,
            "id": r.shown.id,
            "text": r.shown.text,
            "similarity": round(r.shown.similarity, 6),
            "similarity_rank": rank[n] + 1,
            "shown": r.standing.shown,
            "last_shown_step": r.standing.last_shown_step,
            "utility": round(r.standing.utility, 6),
            "outcome": r.standing.outcome,
            "score": None if r.score is None else {**r.score._asdict(), "total": sum(r.score)},
            "in_prompt": r.score is not None and n < rules.diversity.k,
            "why": reason(r, rank[n], rules.diversity),
        }
        for n, r in enumerate(ranked[: limit or None])
    ]


def reason(r: Ranked, rank: int, how: Diversity) -> str:
    """Why a candidate stands where it does, in words."""
    if r.score is None:
        if r.shown.similarity < how.min_similarity:
            return f"never shown: similarity {r.shown.similarity:.3f} is below bank.min_similarity {how.min_similarity:g}"
        return f"never shown: success {r.standing.utility:.2f} of its readers is below bank.min_utility {how.min_utility:g}"
    parts = [f"rank {rank + 1} by similarity"]
    if r.standing.shown:
        parts.append(f"shown {r.standing.shown} times {r.score.showings:+.2f}")
    if r.score.recent:
        parts.append(f"shown at step {r.standing.last_shown_step} {r.score.recent:+.0f}")
    if r.score.utility:
        parts.append(f"success {r.standing.utility:.2f} of its readers {r.score.utility:+.2f}")
    if r.score.penalty:
        parts.append(f"its family's lessons hurt here {r.score.penalty:+.0f}")
    if how.contrast:
        parts.append("contrast: one lesson of a success and one of a failure come first")
    return f"{', '.join(parts)}: score {sum(r.score):.2f}"


def lines(found: Sequence[dict[str, Any]]) -> list[str]:
    """The answer for a person."""
    out: list[str] = []
    for row in found:
        mark = "→" if row["in_prompt"] else "–" if row["score"] is None else " "
        first = " ".join(printable(row["text"]).split())
        out.append(
            f"{mark} {row['place']:>2}  {row['id']}  cosine {row['similarity']:.3f}  read {row['shown']}  utility {row['utility']:.2f}"
        )
        out += [f"      {first}", f"      {row['why']}"]
    return out
