"""Reading PDDL: the domain of a household game and one of its problems.

Owns: the S-expressions, and conditions in disjunctive normal form.
Promises: names are in lower case, as the planner's translator makes them; a construct that is not understood is a ValueError that names it.
Does not: evaluate anything (see ``rules``).

Understood: typing, and/or/not/exists/forall/=, add and delete effects, ``when``. Costs are skipped.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Iterable, Mapping

Atom = tuple[str, ...]  # predicate, then arguments; variables begin with "?"
Node = str | list["Node"]

_TOKEN = re.compile(r";[^\n]*|[()]|[^\s();]+")


@dataclasses.dataclass(frozen=True)
class Case:
    """One way to make a condition true: every atom of ``true`` holds, none of ``false``, and no case of any of ``absent`` can be met.

    ``unequal``: pairs that must differ. ``types``: of the variables that the condition itself introduced.
    """

    true: tuple[Atom, ...] = ()
    false: tuple[Atom, ...] = ()
    unequal: tuple[tuple[str, str], ...] = ()
    absent: tuple[tuple[Case, ...], ...] = ()
    types: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def predicates(self) -> set[str]:
        """All predicates that it asks for."""
        inner = {predicate for cases in self.absent for case in cases for predicate in case.predicates()}
        return {atom[0] for atom in self.true + self.false} | inner

    def __add__(self, other: Case) -> Case:
        return Case(
            self.true + other.true,
            self.false + other.false,
            self.unequal + other.unequal,
            self.absent + other.absent,
            {**self.types, **other.types},
        )


@dataclasses.dataclass(frozen=True)
class Effect:
    """``atom`` becomes true (``adds``) or false; where it is ``conditional``, if one of ``cases`` held before."""

    atom: Atom
    adds: bool
    conditional: bool = False
    cases: tuple[Case, ...] = ()


@dataclasses.dataclass(frozen=True)
class Schema:
    """An action: parameters (variable to type, in order), the ways in which it may be taken, and what it does."""

    name: str
    parameters: Mapping[str, str]
    cases: tuple[Case, ...]
    effects: tuple[Effect, ...]


@dataclasses.dataclass(frozen=True)
class Problem:
    """A game's start: objects with their types, the atoms that hold, and the goal."""

    types: Mapping[str, str]
    facts: tuple[Atom, ...]
    goal: tuple[Case, ...]


@functools.lru_cache(maxsize=8)  # all games of a data set share one domain
def read_domain(text: str) -> tuple[Schema, ...]:
    """The actions of a domain. Raises ValueError."""
    return tuple(_schema(part) for part in _parse(text) if isinstance(part, list) and part[0] == ":action")


def read_problem(text: str) -> Problem:
    """A problem. Raises ValueError."""
    parts = {str(part[0]): part[1:] for part in _parse(text) if isinstance(part, list)}
    for wanted in (":objects", ":init", ":goal"):
        if wanted not in parts:
            raise ValueError(f"this PDDL problem has no {wanted}: the game file is damaged")
    facts = tuple(_atom(node) for node in parts[":init"] if node[0] != "=")  # costs and distances
    return Problem(_typed(parts[":objects"]), facts, _cases(parts[":goal"][0], itertools.count()))


def _parse(text: str) -> list[Node]:
    """The body of ``(define ...)``."""
    stack: list[list[Node]] = [[]]
    for token in _TOKEN.findall(text.lower()):
        if token == "(":
            stack.append([])
        elif token == ")":
            if len(stack) < 2:
                raise ValueError("PDDL closes a bracket that it never opened")
            done = stack.pop()
            stack[-1].append(done)
        elif token[0] != ";":
            stack[-1].append(token)
    if len(stack) != 1 or not stack[0] or not isinstance(stack[0][0], list):
        raise ValueError("PDDL ends inside a bracket: the game file is damaged")
    return stack[0][0]


def _typed(nodes: Iterable[Node]) -> dict[str, str]:
    """``a b - kind c - other`` as a mapping; without a type, "object". A comma stays part of the type, as for the planner (which then knows
    no object of it: so it is that only what is held can be examined)."""
    found: dict[str, str] = {}
    waiting: list[str] = []
    after_dash = False
    for node in nodes:
        name = str(node)
        if after_dash:
            found.update(dict.fromkeys(waiting, name))
            waiting, after_dash = [], False
        elif name == "-":
            after_dash = True
        else:
            waiting.append(name)
    found.update(dict.fromkeys(waiting, "object"))
    return found


def _atom(node: Node) -> Atom:
    if isinstance(node, str) or not all(isinstance(word, str) for word in node):
        raise ValueError(f"PDDL: expected an atom, found {node!r}")
    return tuple(str(word) for word in node)


def _schema(part: list[Node]) -> Schema:
    fields = {str(key): value for key, value in zip(part[2::2], part[3::2], strict=True)}
    parameters = _typed(fields[":parameters"])
    cases = _cases(fields.get(":precondition", []), itertools.count())
    return Schema(str(part[1]), parameters, cases, tuple(_effects(fields[":effect"])))


def _effects(node: Node, *when: tuple[Case, ...]) -> Iterable[Effect]:
    """``when``: the cases of the condition that the effect is under, if it is."""
    if not node or node[0] == "increase":
        return
    if node[0] == "and":
        for part in node[1:]:
            yield from _effects(part, *when)
    elif node[0] == "when":
        yield from _effects(node[2], _cases(node[1], itertools.count()))
    elif node[0] == "not":
        yield Effect(_atom(node[1]), False, bool(when), *when)
    elif node[0] in ("forall", "or"):
        raise ValueError(f"PDDL effect {node[0]!r}: not understood by the engine 'native'; use engine='official'")
    else:
        yield Effect(_atom(node), True, bool(when), *when)


def _cases(node: Node, fresh: itertools.count[int], *, holds: bool = True, names: Mapping[str, str] | None = None) -> tuple[Case, ...]:
    """Disjunctive normal form of ``node`` (of its negation when not ``holds``); quantified variables get names of their own."""
    names = names or {}
    if not node:
        return (Case(),) if holds else ()
    head, rest = node[0], node[1:]
    if head == "not":
        return _cases(rest[0], fresh, holds=not holds, names=names)
    if head in ("and", "or"):
        parts = [_cases(part, fresh, holds=holds, names=names) for part in rest]
        if (head == "and") == holds:
            return tuple(functools.reduce(Case.__add__, choice, Case()) for choice in itertools.product(*parts))
        return tuple(case for part in parts for case in part)
    if head in ("exists", "forall"):
        own = {variable: (f"{variable}.{next(fresh)}", kind) for variable, kind in _typed(rest[0]).items()}
        inner = {**names, **{variable: new for variable, (new, _) in own.items()}}
        types = dict(own.values())
        met = tuple(Case(types=types) + case for case in _cases(rest[1], fresh, holds=head == "exists", names=inner))
        return met if (head == "exists") == holds else (Case(absent=(met,)),)
    words = _atom([names.get(word, word) if isinstance(word, str) else word for word in node])
    if head == "=":
        if holds:
            raise ValueError("PDDL condition '=': not understood by the engine 'native'; use engine='official'")
        return (Case(unequal=((words[1], words[2]),)),)
    return (Case(true=(words,)),) if holds else (Case(false=(words,)),)
