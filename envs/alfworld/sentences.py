"""The sentences of a game: its own grammar, read and spoken.

Owns: the format that TextWorld calls twl2 (action blocks with a command template and a feedback rule; productions with conditions), and the
names of things ("drawer 3").
Promises: what is said is what TextWorld's generator says, letter for letter; a game file's expressions are looked up, never evaluated as
Python; a construct that is not understood is a ValueError that names it, when it is to be spoken.
Does not: know what holds (it asks a ``Told``).
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

Bound = Mapping[str, str]  # variable of the grammar to object
Say = Callable[["Speech", Bound], Iterable[str]]

_BLOCK = re.compile(
    r'action\s+([\w/-]+)\s*\{((?>\s*\w+\s*::\s*(?:"""(?:.*?)"""|"[^"]*")\s*;|\s*#[^\n]*)*+)\s*\}'
    r'|\bgrammar\s*::\s*"""(.*?)"""\s*;',
    re.DOTALL,
)
_FIELD = re.compile(r'(template|feedback)\s*::\s*"([^"]*)"\s*;|grammar\s*::\s*"""(.*?)"""\s*;', re.DOTALL)
_SYMBOL = re.compile(
    r"(?P<open>\[)?\{(?:#(?P<inner>[\w()/!<>\-\s,.]+)#|(?P<code>[^|\[\]{}\n<>]+))(?:\s*\|\s*(?P<given>[^;|{}\n\[\]#]+))?\}(?(open)\])"
    r"|#(?P<rule>[\w()/!<>\-\s,.]+)#"
    r'|(?P<text>[^;|"<>\[\]#{}]+)'
)
_TERM = re.compile(r"""\s*(?:(\w+)\.(name|id|type|indefinite|definite)|(\w+)|'([^']*)'|"([^"]*)")\s*""")
_NAME = re.compile(r"\w+")
_ATOM = re.compile(r"\s*([\w/]+)\(([^()]*)\)\s*")


class Told(Protocol):
    """What a sentence may ask about a state."""

    def all_told(self, predicate: str) -> Iterable[tuple[str, ...]]:
        """Arguments for which a predicate is told to hold."""
        ...


@dataclasses.dataclass(frozen=True)
class Speech:
    """What a derivation looks at."""

    told: Told
    names: Mapping[str, str]


class Sentences:
    """A grammar. ``commands``: the template of each action, by its name in lower case; ``named``: all words in it, the names of its
    variables among them; ``asked``: the predicates it asks for; ``task``: the line that tells the goal."""

    def __init__(self, text: str) -> None:
        self._rules: dict[str, list[tuple[str, Say]]] = {}
        self.commands: dict[str, str] = {}
        feedback: dict[str, str] = {}
        productions: dict[str, list[dict[str, str]]] = {}
        for name, body, shared in _BLOCK.findall(text):
            for field, value, own in _FIELD.findall(body):
                if field:
                    (self.commands if field == "template" else feedback)[name.lower()] = value
                else:
                    productions.update(_json(own))
            if shared:
                productions.update(_json(shared))
        if not self.commands or "intro" not in productions:
            raise ValueError("this game's grammar has no actions or no intro: the game file is damaged")
        for left, rights in productions.items():
            self._rules[left] = [(right.get("condition", ""), self._compile(right["rhs"])) for right in rights]
        self.task: str = productions["task"][0]["rhs"] if "task" in productions else ""
        self.named = {action: frozenset(_NAME.findall(template)) for action, template in self.commands.items()}
        self.asked = {action: {atom[0] for atom in _ATOM.findall(template)} for action, template in self.commands.items()}
        self._say_command = {action: self._compile(template) for action, template in self.commands.items()}
        self._say_feedback = {action: self._compile(start) for action, start in feedback.items()}
        self._say_intro = self._compile("#intro#")

    def command(self, action: str, told: Told, names: Mapping[str, str], bound: Bound) -> str:
        """The command for an action with its parameters bound."""
        return "".join(self._say_command[action](Speech(told, names), bound))

    def feedback(self, action: str, told: Told, names: Mapping[str, str], bound: Bound) -> str:
        """What is said after an action; ``told`` is the state it led to."""
        return "".join(self._say_feedback[action](Speech(told, names), bound))

    def intro(self, told: Told, names: Mapping[str, str]) -> str:
        """What is said at the start."""
        return "".join(self._say_intro(Speech(told, names), {}))

    def _derive(self, rule: str, speech: Speech, bound: Bound) -> Iterable[str]:
        for condition, say in self._rules.get(rule, ()):
            if not condition or next(iter(_answers(_query(condition), speech.told, dict(bound))), None) is not None:
                return say(speech, bound)
        raise ValueError(f"no rule of this game's grammar fits #{rule}#")

    def _compile(self, text: str) -> Say:
        parts, at = [], 0
        text = re.sub(r"\A\s+", "", text).replace("\\n", "\n")  # TextWorld's parser skips white space where a text begins
        while at < len(text):
            found = _SYMBOL.match(text, at)
            if found is None:
                break  # TextWorld's parser, too, ends at what it cannot read
            parts.append(self._symbol(found))
            at = found.end()
        return lambda speech, bound: (word for part in parts for word in part(speech, bound))

    def _symbol(self, found: re.Match[str]) -> Say:
        if found["text"] is not None:
            literal = found["text"]
            return lambda speech, bound: (literal,)
        if found["rule"] is not None:
            rule = found["rule"]
            return lambda speech, bound: self._derive(rule, speech, bound)
        inner, given = found["inner"], found["given"] or ""
        one: Say = _expression(found["code"]) if inner is None else lambda speech, bound: self._derive(inner, speech, bound)

        def each(speech: Speech, bound: Bound) -> list[str]:
            found = _answers(_query(given), speech.told, dict(bound)) if given else [bound]
            return ["".join(one(speech, answer)) for answer in found]

        return each if not found["open"] else lambda speech, bound: self._listed(each(speech, bound), speech, bound)

    def _listed(self, items: list[str], speech: Speech, bound: Bound) -> Iterable[str]:
        def separator(rule: str) -> str:
            return "".join(self._derive(rule, speech, bound))

        if len(items) < 2:
            return items or self._derive("list_empty", speech, bound)
        return (separator("list_separator").join(items[:-1]), separator("list_last_separator"), items[-1])


def names_of(objects: Iterable[str]) -> dict[str, str]:
    """Names as ALFWorld gives them: the kind, then a number; of one kind, the highest number goes to the first in the alphabet."""
    kinds = {name: _kind(name) for name in sorted(objects)}
    left = Counter(kind for name, kind in kinds.items() if "_bar_" in name)
    named = {}
    for name, kind in kinds.items():
        if "_bar_" in name:
            named[name] = f"{kind} {left[kind]}"
            left[kind] -= 1
        else:
            named[name] = f"{kind} "
    return named


def _kind(name: str) -> str:
    if "_bar_" not in name:
        for mangled, plain in (("_minus_", "-"), ("_plus_", "+"), ("_dot_", "."), ("_comma_", ",")):
            name = name.replace(mangled, plain)
        return name
    return name.split("_bar_", 1)[0] + ("basin" if "basin" in name else "")


def _json(block: str) -> dict[str, list[dict[str, str]]]:
    return json.loads("\n".join(line for line in block.split("\n") if not line.lstrip().startswith("#")))


@functools.lru_cache(maxsize=256)
def _query(text: str) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """``p(a:kind) & q(a:kind, b:other)`` as predicates and variable names."""
    atoms = []
    for part in text.split("&") if text.strip() else ():
        found = _ATOM.fullmatch(part)
        if found is None:
            raise ValueError(f"grammar condition {part!r}: not understood by the engine 'native'; use engine='official'")
        atoms.append((found[1], tuple(argument.split(":")[0].strip() for argument in found[2].split(","))))
    return tuple(atoms)


def _answers(atoms: tuple[tuple[str, tuple[str, ...]], ...], told: Told, bound: dict[str, str]) -> Iterable[dict[str, str]]:
    """Every way to bind the variables of a conjunction, in TextWorld's order; two variables are never the same object."""
    if not atoms:
        yield dict(bound)
        return
    (predicate, variables), rest = atoms[0], atoms[1:]
    fixed = [(i, bound[variable]) for i, variable in enumerate(variables) if variable in bound]
    held = told.all_told(predicate)
    for i, value in fixed:
        held = [arguments for arguments in held if arguments[i] == value]
    for arguments in sorted(held):
        new: dict[str, str] = {}
        for variable, value in zip(variables, arguments, strict=True):
            if variable not in bound and new.setdefault(variable, value) != value:
                break
        else:
            if len(set(new.values())) == len(new) and not set(new.values()) & set(bound.values()):
                yield from _answers(rest, told, {**bound, **new})


def _expression(code: str) -> Say:
    """``a.b + ' ' + c`` or ``a.b or a.c``."""
    choices = [[_term(word, code) for word in choice.split("+")] for choice in re.split(r"\bor\b", code)]

    def say(speech: Speech, bound: Bound) -> Iterable[str]:
        said = ""
        for choice in choices:
            said = "".join(term(speech, bound) for term in choice)
            if said:
                break
        return (said,)

    return say


def _term(word: str, code: str) -> Callable[[Speech, Bound], str]:
    found = _TERM.fullmatch(word)
    if found is None:
        return _not_understood(code)
    variable, attribute, bare, single, double = found.groups()
    if attribute in ("indefinite", "definite"):
        return lambda speech, bound: "a" if attribute == "indefinite" else "the"
    if attribute == "id":
        return lambda speech, bound: bound[variable]
    if attribute == "type":
        return _not_understood(code)
    if variable or bare:
        return lambda speech, bound: speech.names[bound[variable or bare]]
    return lambda speech, bound: single or double or ""


def _not_understood(code: str) -> Callable[[Speech, Bound], str]:
    def say(speech: Speech, bound: Bound) -> str:
        raise ValueError(f"grammar expression {code!r}: not understood by the engine 'native'; use engine='official'")

    return say
