"""From a model's reply to a tool call.

Owns: the syntax of calls and the table of tools.
Promises: the *last* well-formed call outside ``<think>..</think>`` counts; reasoning is never executed; a call with an unknown tool, an
unknown, repeated or missing parameter, or a number that is none is no call; reading takes time linear in the reply.
Does not: know whether a call makes sense (a missing file is the tool's answer).

The syntax, that of function tags::

    <function=execute_bash>
    <parameter=command>ls -la</parameter>
    </function>

A value is taken as it stands: nothing is escaped, and only one line break after the opening and one before the closing tag are dropped. So
it cannot hold ``</parameter>``, ``</function>`` or ``<function=``.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

from envs import parse

MOST = 200_000  # characters of a reply; a longer one is no call

_OPEN, _CLOSE = "<function=", "</function>"
_HEAD = re.compile(r"\A([a-z_]{1,40})>")
_PARAMETER = re.compile(r"\s*<parameter=([a-z_]{1,40})>")
_RANGE = re.compile(r"\A\[\s*(\d{1,7})\s*,\s*(-1|\d{1,7})\s*\]\Z")
_NUMBER = re.compile(r"\A\d{1,7}\Z")

_EDITOR: Mapping[str, tuple[frozenset[str], frozenset[str]]] = {  # by command: parameters it needs, parameters it may have
    "view": (frozenset({"path"}), frozenset({"view_range"})),
    "create": (frozenset({"path", "file_text"}), frozenset()),
    "str_replace": (frozenset({"path", "old_str"}), frozenset({"new_str"})),
    "insert": (frozenset({"path", "insert_line", "new_str"}), frozenset()),
    "undo_edit": (frozenset({"path"}), frozenset()),
}


@dataclasses.dataclass(frozen=True)
class Call:
    """A tool and what to do with it: ``name`` "execute_bash", "submit", or the editor's command; numbers are read in ``numbers``."""

    name: str
    text: Mapping[str, str] = dataclasses.field(default_factory=dict)
    numbers: tuple[int, ...] = ()


def last_call(reply: str) -> Call | None:
    """The call of ``reply``, by the rules of the module's docstring; None when there is none."""
    if len(reply) > MOST or "\0" in reply:
        return None
    try:
        reply.encode()
    except UnicodeEncodeError:  # half a surrogate pair: no program could be told
        return None
    text = parse.without_reasoning(reply)
    end = text.rfind(_CLOSE)
    while end >= 0:
        before = text.rfind(_CLOSE, 0, end)
        start = text.rfind(_OPEN, max(before, 0), end)
        call = _read(text[start + len(_OPEN) : end]) if start >= 0 else None
        if call is not None:
            return call
        end = before
    return None


def write_call(tool: str, parameters: Mapping[str, str]) -> str:
    """A reply that ``last_call`` reads: what a player says."""
    inner = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in parameters.items())
    return f"<function={tool}>\n{inner}</function>"


def _read(inside: str) -> Call | None:
    head = _HEAD.match(inside)
    parameters = _parameters(inside[head.end() :]) if head else None
    if head is None or parameters is None:
        return None
    if head.group(1) == "execute_bash":
        return Call("execute_bash", parameters) if parameters.keys() == {"command"} else None
    if head.group(1) == "submit":
        return Call("submit") if not parameters else None
    return _editor_call(parameters) if head.group(1) == "str_replace_editor" else None


def _parameters(text: str) -> dict[str, str] | None:
    found: dict[str, str] = {}
    at = 0
    while opened := _PARAMETER.match(text, at):
        end = text.find("</parameter>", opened.end())
        if end < 0 or opened.group(1) in found:
            return None
        value = text[opened.end() : end]
        found[opened.group(1)] = value.removeprefix("\n").removesuffix("\n")
        at = end + len("</parameter>")
    return found if not text[at:].strip() else None


def _editor_call(parameters: dict[str, str]) -> Call | None:
    command = parameters.pop("command", "").strip()
    needs, may = _EDITOR.get(command, (frozenset({"?"}), frozenset()))
    if not needs <= parameters.keys() <= needs | may:
        return None
    numbers: tuple[int, ...] = ()
    if "view_range" in parameters:
        pair = _RANGE.match(parameters.pop("view_range").strip())
        if pair is None:
            return None
        numbers = (int(pair.group(1)), int(pair.group(2)))
    if "insert_line" in parameters:
        line = parameters.pop("insert_line").strip()
        if not _NUMBER.match(line):
            return None
        numbers = (int(line),)
    return Call(command, parameters, numbers)
