"""What the extractor is asked and how its answers are read.

Owns: the prompts (texts in a data file), the response grammar, its strict parser. Promises: reading model output never raises, unknown
shapes are rejected as a whole with a reason; no operation that a model can write deletes an entry; text of episodes and of entries stands
between delimiters that it cannot close. Does not: sample, tokenise, or touch the bank.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
import string
from collections.abc import Callable, Sequence
from typing import Any, cast

from crl_jax.experience.protocols import Message
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
        try:
            content: object = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path.name} is not JSON in UTF-8: {error}") from error
        if not isinstance(content, dict):
            raise ValueError(f"{path.name} must hold one object of texts, not {type(content).__name__}")
        found = cast(dict[str, str], content)
        wrong = sorted(name for name, text in cast(dict[str, object], content).items() if not isinstance(text, str))
        if wrong:
            raise ValueError(f"{path.name}: {wrong} must be texts")
        known = {field.name for field in dataclasses.fields(ExtractorPrompts)}
        unknown = sorted(set(found) - known)
        required = {f.name for f in dataclasses.fields(ExtractorPrompts) if f.default is dataclasses.MISSING}
        missing = sorted(required - set(found))
        if unknown or missing:
            raise ValueError(f"{path.name}: unknown fields {unknown}, missing fields {missing}; the fields are {sorted(known)}")
        return ExtractorPrompts(**found)


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


def _messages(system: str, user: str, **slots: object) -> list[Message]:
    fill: Callable[[str], str] = lambda text: string.Template(text).safe_substitute(slots)  # noqa: E731  (substituted text is not expanded again)
    return [Message("system", fill(system)), Message("user", fill(user))]


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


def answer_text(response: str) -> str:
    """The last ``<answer>`` block, or, without one, everything after the thinking (nothing, if the thinking was cut off)."""
    spoken = response.rsplit("</think>", 1)[-1].split("<think>", 1)[0]
    blocks = re.findall(r"<answer>(.*?)</answer>", spoken, flags=re.DOTALL)
    return (blocks[-1] if blocks else spoken).strip()


class _Rejected(ValueError):
    """The response does not follow the grammar; the message is the reason that is counted."""


def parse(response: str, *, max_ops: int = 3, max_chars: int = 2000) -> Parsed:
    """Read a distil or merge response: a JSON list of operations, or a single one. Never raises on model output.

    Rejected as a whole: anything but that JSON (text around it, NaN, Infinity, duplicate keys), unknown operations or fields, targets
    that are not positive integers, empty text or more than ``max_chars`` characters, no operation or more than ``max_ops``, ``return``
    beside others.
    """
    try:
        items = _strict_json(answer_text(response))
        rows = cast(list[object], items) if isinstance(items, list) else [items]
        ops = tuple(_operation(row, max_chars) for row in rows)
        if not 1 <= len(ops) <= max_ops:
            raise _Rejected(f"{len(ops)} operations, allowed are 1 to {max_ops}")
        if len(ops) > 1 and any(op.kind is OpKind.NOOP for op in ops):
            raise _Rejected("return beside other operations")
        return Parsed(ops)
    except (_Rejected, json.JSONDecodeError, RecursionError) as error:
        return Parsed(error=f"{type(error).__name__.strip('_')}: {error}")


def _strict_json(text: str) -> object:
    def no_constant(name: str) -> Any:
        raise _Rejected(f"{name} is not JSON")

    def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len({key for key, _ in pairs}) != len(pairs):
            raise _Rejected("duplicate key")
        return dict(pairs)

    def short_int(digits: str) -> int:
        if len(digits) > 9:
            raise _Rejected("number out of range")
        return int(digits)

    def no_float(digits: str) -> Any:
        raise _Rejected(f"{digits[:20]} is not an integer")

    return json.loads(text, parse_constant=no_constant, object_pairs_hook=no_duplicates, parse_int=short_int, parse_float=no_float)


_FIELDS = {"add": {"op", "experience"}, "update": {"op", "targets", "experience"}, "return": {"op"}}


def _operation(row: object, max_chars: int) -> ParsedOp:
    if not isinstance(row, dict):
        raise _Rejected(f"an operation is an object, not {type(row).__name__}")
    fields = cast(dict[str, object], row)
    name = fields.get("op")
    if not isinstance(name, str) or name not in _FIELDS:
        raise _Rejected(f"unknown operation {str(name)[:40]!r}")
    if set(fields) != _FIELDS[name]:
        raise _Rejected(f"{name} has the fields {sorted(_FIELDS[name])}, not {sorted(fields)}"[:200])
    if name == "return":
        return ParsedOp(OpKind.NOOP)
    text = fields["experience"]
    if not isinstance(text, str) or not text.strip():
        raise _Rejected("experience must be non-empty text")
    if any("\ud800" <= char <= "\udfff" for char in text):
        raise _Rejected("experience has half a surrogate pair")
    if len(text) > max_chars:
        raise _Rejected(f"experience has {len(text)} characters, allowed are {max_chars}")
    if name == "add":
        return ParsedOp(OpKind.ADD, text.strip())
    return ParsedOp(OpKind.UPDATE, text.strip(), _targets(fields["targets"]))


def _targets(value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or not value:
        raise _Rejected("targets must be a non-empty list of positions")
    positions = cast(list[object], value)
    if not all(isinstance(p, int) and not isinstance(p, bool) and p >= 1 for p in positions):
        raise _Rejected("targets must be positions counted from 1")
    return tuple(dict.fromkeys(cast(list[int], positions)))


def resolve(op: ParsedOp, shown: Sequence[str], *, merging: bool = False) -> tuple[BankOp | None, int]:
    """The bank operation that ``op`` means for the entry ids ``shown`` in its prompt, and how many targets lie outside that list.

    An update that names no shown entry becomes an add. While merging, an update becomes a merge (compare-and-set) and everything else is
    refused: a merge pass never adds.
    """
    inside = tuple(shown[p - 1] for p in op.targets if p <= len(shown))
    outside = len(op.targets) - len(inside)
    if op.kind is OpKind.NOOP:
        return BankOp(OpKind.NOOP), 0
    if merging:
        return (BankOp(OpKind.MERGE, op.text, inside) if inside and not outside else None), outside
    if op.kind is OpKind.UPDATE and inside:
        return BankOp(OpKind.UPDATE, op.text, inside), outside
    return BankOp(OpKind.ADD, op.text), outside
