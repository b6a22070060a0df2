"""Lessons and demonstrations in files of a person's making, read strictly.

Owns: their formats. Promises: a file is read to its end before anything is done with it, and every bad line is named by its number with
what is wrong; nothing is guessed. Does not: write to a bank.

A lesson is a line ``{"text": ..., "namespace": ..., "outcome": true | false | null, "usage": {...}}`` of which only ``text`` must be there
(other fields of `crl bank export` are allowed and not used), or, in a file that is no JSONL, a line of plain text. A demonstration is a
line ``{"goal", "namespace", "success", "turns": [{"observation", "reply"}, ...], "final_observation"}``, all of them needed.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar, cast

from crl_jax.bank_tools.place import BankInputError
from crl_jax.experience.writer import Lesson
from crl_jax.records import Turn, Usage

MAX_CHARS = 20_000  # as of a lesson written by hand to `crl bank serve`: what a bank holds can be brought into another
MAX_READS = 1_000_000
EXPORTED = {  # what `export` writes; the ids mean nothing in another bank
    *("id", "namespace", "text", "outcome", "usage", "live", "utility", "step", "generation_id", "op_index", "author_version"),
    *("episode_ids", "parents", "created_revision", "retired_revision"),
}
_USAGE = {"shown", "succeeded", "last_shown_step", "recent_shown", "recent_succeeded", "votes"}
T = TypeVar("T")


class Demonstration(NamedTuple):
    """An episode a person played."""

    goal: str
    namespace: str
    success: bool
    turns: tuple[Turn, ...]
    final_observation: str


class _Bad(ValueError):
    """A line that cannot be used; the message says why."""


def read_lessons(path: pathlib.Path, *, namespace: str = "", usage: bool = False) -> list[Lesson]:
    """The lessons of a file, in order; lines without a namespace get ``namespace``. Entries that were exported as retired are left out.

    Raises BankInputError naming the bad lines.
    """
    numbered = _lines(path)
    as_json = path.suffix == ".jsonl" or any(line.lstrip().startswith("{") for _, line in numbered[:1])

    def read(line: str) -> Lesson | None:
        fields = _object(line, EXPORTED) if as_json else {"text": line.strip()}
        if fields.get("live") is False:
            return None
        family = fields.get("namespace", namespace)
        if not isinstance(family, str) or not family.strip():
            raise _Bad('no namespace: add "namespace" or give one for all with --namespace')
        outcome = fields.get("outcome")
        if outcome is not None and not isinstance(outcome, bool):
            raise _Bad("outcome must be true, false or null")
        counted = _usage(fields.get("usage")) if usage else Usage()
        return Lesson(_text(fields.get("text"), "text", MAX_CHARS), _text(family, "namespace", 500), outcome, counted)

    return [lesson for lesson in _each(path, numbered, read) if lesson is not None]


def read_demonstrations(path: pathlib.Path) -> list[Demonstration]:
    """The demonstrations of a JSONL file. Raises BankInputError naming the bad lines."""
    names = set(Demonstration._fields)

    def read(line: str) -> Demonstration:
        fields = _object(line, names)
        if missing := sorted(names - set(fields)):
            raise _Bad(f"{', '.join(missing)} missing")
        if not isinstance(fields["success"], bool):
            raise _Bad("success must be true or false")
        if not isinstance(fields["turns"], list) or not fields["turns"]:
            raise _Bad('turns must be a list of {"observation", "reply"}, one at least')
        turns = tuple(_turn(turn) for turn in cast(list[object], fields["turns"]))
        return Demonstration(
            _text(fields["goal"], "goal", 10_000),
            _text(fields["namespace"], "namespace", 500),
            fields["success"],
            turns,
            _text(fields["final_observation"], "final_observation", 100_000),
        )

    return _each(path, _lines(path), read)


def _lines(path: pathlib.Path) -> list[tuple[int, str]]:
    try:
        content = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise BankInputError(f"{path} cannot be read ({error.strerror}): give a file of lessons") from error
    except UnicodeDecodeError as error:
        raise BankInputError(f"{path} is no UTF-8 text: save it as UTF-8") from error
    # Not splitlines(): JSON may hold characters, such as U+2028, at which that would cut.
    found = [(n, line) for n, line in enumerate(content.split("\n"), 1) if line.strip()]
    if not found:
        raise BankInputError(f"{path} has no line: give one lesson a line")
    return found


def _each(path: pathlib.Path, numbered: Sequence[tuple[int, str]], read: Callable[[str], T]) -> list[T]:
    good: list[T] = []
    bad: list[str] = []
    for n, line in numbered:
        try:
            good.append(read(line))
        except _Bad as error:
            bad.append(f"{path.name}:{n}: {error}")
    if bad:
        more = f"; and {len(bad) - 5} more lines" if len(bad) > 5 else ""
        raise BankInputError(f"nothing was written: {'; '.join(bad[:5])}{more}")
    return good


def _object(line: str, allowed: set[str]) -> dict[str, Any]:
    try:
        found: object = json.loads(line, parse_constant=_no_constant, object_pairs_hook=_each_once)
    except (ValueError, RecursionError) as error:
        raise _Bad(f"not JSON: {error}") from error
    if not isinstance(found, dict):
        raise _Bad(f"a line is one object, not {type(found).__name__}")
    fields = cast(dict[str, Any], found)
    if unknown := sorted(set(fields) - allowed):
        raise _Bad(f"unknown field {unknown[0]!r}: the fields are {', '.join(sorted(allowed))}")
    return fields


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a field is there twice")
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _text(value: object, name: str, limit: int) -> str:
    if not isinstance(value, str) or not value.strip():
        raise _Bad(f"{name} must be a text that is not empty")
    if len(value) > limit:
        raise _Bad(f"{name} has {len(value)} characters, allowed are {limit}")
    if any("\ud800" <= c <= "\udfff" for c in value):
        raise _Bad(f"{name} has half a surrogate pair")
    return value.strip()


def _turn(value: object) -> Turn:
    fields = cast(dict[str, object], value) if isinstance(value, dict) else {}
    if set(fields) != {"observation", "reply"}:
        raise _Bad("a turn has the fields observation and reply")
    return Turn(_text(fields["observation"], "observation", 100_000), _text(fields["reply"], "reply", 100_000), (0, 0))


def _usage(value: object) -> Usage:
    if value is None:
        return Usage()
    fields: dict[str, Any] = cast(dict[str, Any], value) if isinstance(value, dict) else {"": None}
    counts: dict[str, Any] = {name: fields.get(name, 0) for name in ("shown", "succeeded", "votes")}
    counts["last"] = fields.get("last_shown_step", -1)
    whole = all(isinstance(n, int) and not isinstance(n, bool) and -1 <= n <= MAX_READS for n in counts.values())
    if set(fields) - _USAGE or not whole or not 0 <= counts["succeeded"] <= counts["shown"] or counts["votes"] < 0:
        raise _Bad(f"usage holds whole numbers up to {MAX_READS}: shown, succeeded (at most shown), last_shown_step, votes")
    return Usage(counts["shown"], counts["succeeded"], counts["last"], votes=counts["votes"])
