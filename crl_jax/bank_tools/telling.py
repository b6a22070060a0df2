"""``crl bank show`` and ``crl bank why``: one entry as text.

Owns: the words and the tree. Promises: model text is printed without control characters; a line per fact. Does not: gather (``lineage``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from crl_jax.bank_tools.book import Book
from crl_jax.bank_tools.lineage import Lineage, Relative, Writing, lineage
from crl_jax.bank_tools.listing import printable

EPISODES = 8  # guided episodes printed one by one; the steps hold all of them


def show(book: Book, entry_id: str) -> Iterator[str]:
    """The entry, whole, with where it came from in a few lines."""
    kept = book.find(entry_id)
    entry, usage = kept.entry, book.usage(entry_id)
    yield f"{printable(entry.text)}\n"
    yield f"namespace   {printable(entry.namespace)}"
    yield f"written     step {entry.step}, extractor version {entry.author_version}, revision {kept.created}"
    yield f"generation  {entry.generation_id or '-'} (operation {entry.op_index})"
    yield f"episodes    {', '.join(entry.episode_ids) or '-'}{_outcome(entry.outcome)}"
    yield f"replaced    {', '.join(entry.parents) or '-'}"
    yield f"read        {usage.shown} times, {usage.succeeded} of them in episodes that succeeded"
    if usage.votes:
        yield f"votes       {usage.votes}"
    if kept.retired is not None:
        yield f"left        at revision {kept.retired}; `crl bank why` says how"


def why(found: Lineage) -> Iterator[str]:
    """The whole story as a tree."""
    entry = found.entry
    yield f"{entry.id}  {_short(entry.text, 100)}"
    written = [f"{found.written_as} at step {entry.step}, revision {found.created_revision}, namespace {printable(entry.namespace)}"]
    yield from _branch("written", [*written, *_writing(found.writing, entry.generation_id)])
    sources = [f"{i}{_outcome(entry.outcome)}" for i in entry.episode_ids]
    yield from _branch("from episodes", sources or ["none on record"])
    yield from _branch("replaced", _tree(found.parents) or ["nothing"])
    yield from _branch("replaced by", _tree(found.children) or ["nothing"])
    yield from _branch("guided", _guided(found))
    yield from _branch("credit", [_credit(found.writing)])
    if found.votes:
        yield from _branch("votes", [f"{kind} at revision {revision}" for revision, kind in found.votes])
    yield from _branch("now", [_now(found)], last=True)


def why_text(book: Book, entry_id: str, found: Lineage | None = None) -> str:
    """`why` of an entry as one text."""
    return "\n".join(why(found or lineage(book, entry_id)))


def _branch(name: str, items: Sequence[str], *, last: bool = False) -> Iterator[str]:
    yield f"{'└' if last else '├'}─ {name}"
    bar = " " if last else "│"
    for n, item in enumerate(items):
        end = n == len(items) - 1
        for m, line in enumerate(item.splitlines() or [""]):
            yield f"{bar}  {('└─ ' if end else '├─ ') if m == 0 else ('   ' if end else '│  ')}{line}"


def _writing(w: Writing | None, generation_id: str) -> list[str]:
    if w is None:
        return [f"generation {generation_id}: not stored" if generation_id else "by no generation: a person or a file brought it in"]
    versions = "-".join(str(v) for v in (w.versions[:1] + w.versions[-1:] if len(w.versions) > 1 else w.versions)) or "?"
    parsed = "read without fault" if not w.parse_error else f"could not be read: {printable(w.parse_error)}"
    head = f"generation {w.id}: {w.kind} at step {w.step}, weight version {versions}, {parsed}"
    lines = [head, f"prompt {w.prompt_tokens} tokens, response {w.response_tokens} tokens"]
    if len(w.entries) > 1:
        lines.append(f"it wrote {len(w.entries)} entries: {', '.join(w.entries[:6])}{' ...' if len(w.entries) > 6 else ''}")
    for name, text in (("prompt", w.prompt), ("response", w.response)):
        if text is not None:
            lines.append(f"{name}:\n{_indent(_cut(printable(text), 1500))}")
    return lines


def _tree(relatives: Sequence[Relative]) -> list[str]:
    return [
        f"{'  ' * (r.distance - 1)}{r.id}  {r.how}{'' if r.live else ', no longer in the bank'}  {_short(r.text, 70)}" for r in relatives
    ]


def _guided(found: Lineage) -> list[str]:
    if not found.guided:
        return ["no finished episode"]
    lines = [
        f"step {s.step}: {s.episodes} episodes, {s.succeeded} succeeded, mean reward {s.reward / s.episodes:+.2f}" for s in found.steps
    ]
    for episode, reader, step, success, reward in found.guided[-EPISODES:]:
        family = "" if reader in ("", found.entry.namespace) else f" (of {printable(reader)})"
        lines.append(f"{episode or 'an episode'}{family} at step {step}: {'success' if success else 'failure'}, reward {reward:g}")
    if len(found.guided) > EPISODES:
        lines.append(f"(the last {EPISODES} of {len(found.guided)} episodes)")
    return lines


def _credit(w: Writing | None) -> str:
    if w is None:
        return "no generation to credit"
    mean = w.credit.mean
    if mean is None:
        text = "no evidence yet"
    else:  # rewards are +1 and -1, so their spread follows from the mean
        error = math.sqrt(max(0.0, 1 - mean * mean) / w.credit.episodes)
        text = f"mean direct reward {mean:+.2f} ± {error:.2f} (one standard error) over {w.credit.episodes} episodes"
    if w.credit.waiting:
        text += f"; {w.credit.waiting[1]} outcomes wait in the training buffer"
    return f"{text}; trained on {w.credit.trained} times"


def _now(found: Lineage) -> str:
    if found.left is None:
        u = found.usage
        return f"in the bank; read {u.shown} times, {u.succeeded} successes, last at step {u.last_shown_step}; utility {found.utility:.2f}"
    revision, step, how = found.left
    return f"{how}, at revision {revision}{'' if step is None else f', step {step}'}"


def _outcome(outcome: bool | None) -> str:
    return "" if outcome is None else " (success)" if outcome else " (failure)"


def _short(text: str, length: int) -> str:
    return _cut(" ".join(printable(text).split()), length)


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length - 4]} ..."


def _indent(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())
