"""What the extractor is asked and how its answers are read.

Owns: the prompts (texts in a data file), the response grammar, its strict parser. Promises: reading model output never raises, unknown
shapes are rejected as a whole with a reason; no operation that a model can write deletes an entry; text of episodes and of entries stands
between delimiters that it cannot close. Does not: sample, tokenise, or touch the bank.
"""

from __future__ import annotations

import dataclasses
import pathlib
import re
import string
from collections.abc import Mapping, Sequence
from typing import cast

from crl_jax.experience.prompt_file import load_texts
from crl_jax.experience.protocols import Message
from crl_jax.experience.strict import UNREADABLE, Rejected, answer_text, lesson_text, reason, strict_json
from crl_jax.records import BankOp, OpKind, Turn

DEFAULT_PROMPTS = pathlib.Path(__file__).with_name("extractor_prompts.json")


@dataclasses.dataclass(frozen=True)
class ExtractorPrompts:
    """Prompt texts with ``$name`` slots: ``max_ops`` (systems of distil and merge), ``outcome``, ``goal``, ``transcript``, ``entries``,
    ``entry``, ``query``. A recipe may bring its own file; every field must be there."""

    distil_system: str
    distil_user: str
    merge_system: str
    merge_user: str
    ask_system: str
    ask_user: str
    success_word: str = "success"
    failure_word: str = "failure"
    no_entries: str = "(none)"

    @staticmethod
    def load(path: pathlib.Path = DEFAULT_PROMPTS) -> ExtractorPrompts:
        """Read the texts from a JSON file of this class's fields. Raises ValueError naming missing or unknown fields or what is no text."""
        return load_texts(ExtractorPrompts, path)


def as_data(text: str) -> str:
    """Text that cannot close (or open) a delimiter of the prompts: tags of our own names lose their bracket."""
    return re.sub(r"<(?=\s*/?\s*(?:episode|lessons?|question|answer)\b)", "‹", text, flags=re.IGNORECASE)


def transcript(turns: Sequence[Turn], final_observation: str, *, keep_turns: int | None = None) -> str:
    """The episode as text, one labelled line per observation and reply. With ``keep_turns`` the middle is left out and its length named."""
    blocks = [f"{'tool' if turn.tool else 'environment'}: {turn.observation}\nagent: {turn.reply}" for turn in turns]
    if keep_turns is not None and keep_turns < len(blocks):
        head, tail = (keep_turns + 1) // 2, keep_turns // 2
        left_out = f"({len(blocks) - keep_turns} turns left out)"
        blocks = [*blocks[:head], left_out, *blocks[len(blocks) - tail :]]
    return "\n".join([*blocks, f"environment: {final_observation}"])


def numbered(texts: Sequence[str], none: str) -> str:
    """Texts as a list counted from 1, made inert by `as_data`; ``none`` stands for an empty list. Further lines of a text are indented,
    so that no text can look like the next item."""
    return "\n".join(f"{n}. " + "\n   ".join(as_data(text).splitlines()) for n, text in enumerate(texts, 1)) or none


def fill(text: str, slots: Mapping[str, object]) -> str:
    """``text`` with its ``$name`` slots filled in. What is filled in is not expanded again."""
    return string.Template(text).safe_substitute(slots)


def _messages(system: str, user: str, **slots: object) -> list[Message]:
    return [Message("system", fill(system, slots)), Message("user", fill(user, slots))]


def distil_messages(
    prompts: ExtractorPrompts,
    *,
    goal: str,
    success: bool,
    turns: Sequence[Turn],
    final_observation: str,
    entries: Sequence[str],
    max_ops: int,
    keep_turns: int | None = None,
) -> list[Message]:
    """The request to distil one finished episode. ``entries`` are the texts it had read, numbered from 1 for ``targets``."""
    return _messages(
        prompts.distil_system,
        prompts.distil_user,
        max_ops=max_ops,
        outcome=prompts.success_word if success else prompts.failure_word,
        goal=as_data(goal),
        transcript=as_data(transcript(turns, final_observation, keep_turns=keep_turns)),
        entries=numbered(entries, prompts.no_entries),
    )


def merge_messages(prompts: ExtractorPrompts, *, entries: Sequence[str], max_ops: int) -> list[Message]:
    """The request to merge one chunk of entries, numbered from 1."""
    return _messages(prompts.merge_system, prompts.merge_user, max_ops=max_ops, entries=numbered(entries, prompts.no_entries))


def ask_messages(prompts: ExtractorPrompts, *, query: str, entry: str) -> list[Message]:
    """The request to answer an actor's question with the help of one entry."""
    return _messages(prompts.ask_system, prompts.ask_user, query=as_data(query), entry=as_data(entry))


# -------------------------------------------------------------------------------------------------------------------- reading


@dataclasses.dataclass(frozen=True)
class ParsedOp:
    """One operation as written: ``targets`` are 1-based positions in the list of entries the prompt showed."""

    kind: OpKind
    text: str = ""
    targets: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Parsed:
    """Operations of one response, or why it has none (``error`` non-empty, ``ops`` empty): all or nothing."""

    ops: tuple[ParsedOp, ...] = ()
    error: str = ""

    @property
    def is_noop(self) -> bool:
        """Whether a well-formed response asks for no change."""
        return not self.error and all(op.kind is OpKind.NOOP for op in self.ops)


def parse(response: str, *, max_ops: int = 3, max_chars: int = 2000, allow_votes: bool = False) -> Parsed:
    """Read a distil or merge response: a JSON list of operations, or a single one. Never raises on model output.

    Rejected as a whole: anything but that JSON (text around it, NaN, Infinity, duplicate keys), unknown operations or fields, targets
    that are not positive integers, empty text or more than ``max_chars`` characters, no operation or more than ``max_ops``, ``return``
    beside others; votes, unless ``allow_votes``.
    """
    try:
        items = strict_json(answer_text(response))
        rows = cast(list[object], items) if isinstance(items, list) else [items]
        ops = tuple(_operation(row, max_chars, _FIELDS | _VOTES if allow_votes else _FIELDS) for row in rows)
        if not 1 <= len(ops) <= max_ops:
            raise Rejected(f"{len(ops)} operations, allowed are 1 to {max_ops}")
        if len(ops) > 1 and any(op.kind is OpKind.NOOP for op in ops):
            raise Rejected("return beside other operations")
        return Parsed(ops)
    except UNREADABLE as error:
        return Parsed(error=reason(error))


_FIELDS = {"add": {"op", "experience"}, "update": {"op", "targets", "experience"}, "return": {"op"}}
_VOTES = {"upvote": {"op", "targets"}, "downvote": {"op", "targets"}}


def _operation(row: object, max_chars: int, grammar: Mapping[str, set[str]]) -> ParsedOp:
    if not isinstance(row, dict):
        raise Rejected(f"an operation is an object, not {type(row).__name__}")
    fields = cast(dict[str, object], row)
    name = fields.get("op")
    if not isinstance(name, str) or name not in grammar:
        raise Rejected(f"unknown operation {str(name)[:40]!r}")
    if set(fields) != grammar[name]:
        raise Rejected(f"{name} has the fields {sorted(grammar[name])}, not {sorted(fields)}"[:200])
    text = lesson_text(fields["experience"], max_chars) if "experience" in fields else ""
    return ParsedOp(OpKind(name), text, _targets(fields["targets"]) if "targets" in fields else ())


def _targets(value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or not value:
        raise Rejected("targets must be a non-empty list of positions")
    positions = cast(list[object], value)
    if not all(isinstance(p, int) and not isinstance(p, bool) and p >= 1 for p in positions):
        raise Rejected("targets must be positions counted from 1")
    return tuple(dict.fromkeys(cast(list[int], positions)))


def resolve(op: ParsedOp, shown: Sequence[str], *, merging: bool = False) -> tuple[BankOp | None, int]:
    """The bank operation that ``op`` means for the entry ids ``shown`` in its prompt, and how many targets lie outside that list.

    An update that names no shown entry becomes an add, a vote on none becomes nothing. While merging, an update becomes a merge
    (compare-and-set) and everything else is refused: a merge pass never adds.
    """
    inside = tuple(shown[p - 1] for p in op.targets if p <= len(shown))
    outside = len(op.targets) - len(inside)
    if op.kind is OpKind.NOOP:
        return BankOp(OpKind.NOOP), 0
    if merging:
        whole = op.kind is OpKind.UPDATE and inside and not outside
        return (BankOp(OpKind.MERGE, op.text, inside) if whole else None), outside
    if op.kind in (OpKind.UPVOTE, OpKind.DOWNVOTE):
        return (BankOp(op.kind, "", inside) if inside else BankOp(OpKind.NOOP)), outside
    if op.kind is OpKind.UPDATE and inside:
        return BankOp(OpKind.UPDATE, op.text, inside), outside
    return BankOp(OpKind.ADD, op.text), outside
