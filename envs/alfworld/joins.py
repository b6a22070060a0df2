"""Which objects make a condition true.

Owns: ``Join``, a condition of the rules made ready for one world.
Promises: every solution once; atoms are tried cheapest first, and looked up in indices where they never change.
Does not: change anything.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from envs.alfworld.pddl import Atom, Case

if TYPE_CHECKING:
    from envs.alfworld.rules import State, World

Facts = dict[str, set[tuple[str, ...]]]  # predicate to the arguments for which it holds
Bound = dict[str, str]  # variable to object


def ground(atom: Atom, bound: Bound) -> Atom:
    """``atom`` with its variables replaced."""
    return tuple([bound.get(word, word) for word in atom])


@dataclasses.dataclass(frozen=True, slots=True)
class _Step:
    """Find atoms of ``predicate`` that have the known ``words`` at the positions ``at``, bind the ``free`` variables (position, name) to
    the rest, then check ``false`` and ``unequal``. Without a predicate: bind the one free variable to every object of ``kind``."""

    predicate: str
    kind: str
    at: tuple[int, ...]
    words: tuple[str, ...]
    free: tuple[tuple[int, str], ...]
    false: tuple[Atom, ...]
    unequal: tuple[tuple[str, str], ...]


class Join:
    """A ``Case`` in the order in which it is tried. ``bound``: variables that have a value before."""

    def __init__(self, world: World, case: Case, parameters: Mapping[str, str], bound: tuple[str, ...] = ()) -> None:
        self.case, self._world = case, world
        types = {**parameters, **case.types}
        self._absent = [[Join(world, inner, {}, tuple(types) + bound) for inner in cases] for cases in case.absent]
        self._false, self._unequal = list(case.false), list(case.unequal)
        known, waiting = set(bound), list(case.true)
        self._steps = [self._step("", "", (), known)]
        while waiting:
            atom = min(waiting, key=lambda atom: self._cost(atom, known))
            waiting.remove(atom)
            self._steps.append(self._step(atom[0], "", atom[1:], known))
        for variable, kind in types.items():
            if variable not in known:
                self._steps.append(self._step("", kind, (variable,), known))

    def solutions(self, state: State, bound: Bound) -> Iterator[Bound]:
        """Every binding that makes the case true; the same dict each time, to be read at once."""
        if self._passes(self._steps[0], state, bound):
            yield from self._from(1, state, bound)

    def holds(self, state: State, bound: Bound) -> bool:
        """Whether any binding does."""
        return next(self.solutions(state, bound), None) is not None

    def _cost(self, atom: Atom, known: set[str]) -> float:
        """A guess at how many atoms will fit."""
        unknown = sum(word[0] == "?" and word not in known for word in atom[1:])
        return 0 if not unknown else (self._world.size(atom[0]) + 1) / (10 if unknown < len(atom) - 1 else 1)

    def _step(self, predicate: str, kind: str, words: tuple[str, ...], known: set[str]) -> _Step:
        """``known`` grows by the step's variables; what can be checked after it is taken from the open checks."""
        free = [i for i, word in enumerate(words) if word[0] == "?" and word not in known]
        if len({words[i] for i in free}) < len(free):
            raise ValueError(f"PDDL condition on {predicate!r} names a variable twice: use engine='official'")
        known.update(words[i] for i in free)
        false = [a for a in self._false if all(word[0] != "?" or word in known for word in a[1:])]
        unequal = [p for p in self._unequal if all(word[0] != "?" or word in known for word in p)]
        self._false = [a for a in self._false if a not in false]
        self._unequal = [p for p in self._unequal if p not in unequal]
        at = tuple(i for i in range(len(words)) if i not in free)
        return _Step(predicate, kind, at, tuple(words[i] for i in at), tuple((i, words[i]) for i in free), tuple(false), tuple(unequal))

    def _from(self, depth: int, state: State, bound: Bound) -> Iterator[Bound]:
        if depth == len(self._steps):
            if not self._absent or not any(join.holds(state, dict(bound)) for cases in self._absent for join in cases):
                yield bound
            return
        step = self._steps[depth]
        checked = not step.false and not step.unequal
        for arguments in self._matches(step, state, bound):
            for i, variable in step.free:
                bound[variable] = arguments[i]
            if checked or self._passes(step, state, bound):
                yield from self._from(depth + 1, state, bound)
        for _, variable in step.free:
            bound.pop(variable, None)

    def _matches(self, step: _Step, state: State, bound: Bound) -> Iterable[tuple[str, ...]]:
        if not step.predicate:
            return [(name,) for name in self._world.of_type(step.kind)]
        values = tuple([bound.get(word, word) for word in step.words])
        held = state.facts.get(step.predicate)
        if held is None:
            return self._world.lookup(step.predicate, step.at, values)
        if not step.free:
            return (values,) if values in held else ()
        if len(step.at) == 1:
            i, value = step.at[0], values[0]
            return [arguments for arguments in held if arguments[i] == value]
        return [arguments for arguments in held if tuple([arguments[i] for i in step.at]) == values]

    def _passes(self, step: _Step, state: State, bound: Bound) -> bool:
        for atom in step.false:
            held = state.facts.get(atom[0])
            if ground(atom, bound)[1:] in (self._world.facts.get(atom[0], ()) if held is None else held):
                return False
        return all(bound.get(a, a) != bound.get(b, b) for a, b in step.unequal)
