"""The rules of a household game: what may be done, what it does, whether the goal is reached.

Owns: a world (what never changes in a game) and its states.
Promises: the actions that may be taken are exactly the operators that Fast Downward's translator makes for the state, without those that
would change nothing ("go to" the place where one is).
Does not: put anything into words (see ``sentences``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from envs.alfworld.joins import Bound, Facts, Join, ground
from envs.alfworld.pddl import Atom, Case, Problem, Schema

Operator = tuple[str, tuple[str, ...]]  # action and its arguments

_LARGE = frozenset({"inreceptacle", "objectatlocation"})  # a state has many atoms of these: what follows from them is not kept
_MOST_KEPT = 2000


class World:
    """Domain and problem. One instance serves any number of states and is never changed by them."""

    def __init__(self, schemas: tuple[Schema, ...], problem: Problem) -> None:
        self.schemas = {schema.name: schema for schema in schemas}
        self.types = problem.types
        self.changing = {effect.atom[0] for schema in schemas for effect in schema.effects}
        self.facts: Facts = defaultdict(set)
        for atom in problem.facts:
            self.facts[atom[0]].add(atom[1:])
        self._of_type: dict[str, tuple[str, ...]] = {
            kind: tuple(sorted(name for name, its in problem.types.items() if its == kind)) for kind in set(problem.types.values())
        }
        self._index: dict[tuple[str, tuple[int, ...]], dict[tuple[str, ...], list[tuple[str, ...]]]] = {}
        self._joins = {
            schema.name: [Join(self, case, schema.parameters) for case in schema.cases if self._possible(case)] for schema in schemas
        }
        self._reads = {
            name: {predicate for join in joins for predicate in join.case.predicates() if predicate in self.changing}
            for name, joins in self._joins.items()
        }
        self._sure = {schema.name for schema in schemas if all(_always_changes(schema, case) for case in schema.cases)}
        self._kept: dict[tuple[object, ...], list[Operator]] = {}
        self._effects = {
            schema.name: [(effect, [Join(self, case, {}, tuple(schema.parameters)) for case in effect.cases]) for effect in schema.effects]
            for schema in schemas
        }
        self._goal = [Join(self, case, {}) for case in problem.goal if self._possible(case)]

    def start(self) -> State:
        """The first state."""
        return State(self, {predicate: set(self.facts.get(predicate, ())) for predicate in self.changing})

    def of_type(self, kind: str) -> tuple[str, ...]:
        """Objects of a type, sorted; "object" without objects of its own means all."""
        return self._of_type.get(kind) or (tuple(sorted(self.types)) if kind == "object" else ())

    def size(self, predicate: str) -> int:
        """About how many atoms of it hold: as many as at the start; a few, where it begins with none and changes."""
        return len(self.facts.get(predicate, ())) or (3 if predicate in self.changing else 0)

    def lookup(self, predicate: str, at: tuple[int, ...], values: tuple[str, ...]) -> list[tuple[str, ...]]:
        """Atoms of a predicate that never changes, with these values at these positions, sorted."""
        index = self._index.get((predicate, at))
        if index is None:
            index = self._index[predicate, at] = defaultdict(list)
            for arguments in sorted(self.facts.get(predicate, ())):
                index[tuple(arguments[i] for i in at)].append(arguments)
        return index.get(values, [])

    def operators(self, state: State) -> list[Operator]:
        """What may be done in ``state``, each once."""
        found: list[Operator] = []
        for name, joins in self._joins.items():
            reads = self._reads[name]
            if reads & _LARGE:
                found += self._operators(name, joins, state)
                continue
            key = (name, *(frozenset(state.facts[predicate]) for predicate in sorted(reads)))
            kept = self._kept.get(key)
            if kept is None:
                if len(self._kept) >= _MOST_KEPT:
                    self._kept.clear()
                kept = self._kept[key] = self._operators(name, joins, state)
            found += kept
        return found

    def reached(self, state: State) -> bool:
        """Whether the goal holds."""
        return any(join.holds(state, {}) for join in self._goal)

    def happens(self, state: State, operator: Operator) -> list[tuple[Atom, bool, bool]]:
        """The effects of ``operator``: what becomes true (or false), and whether it really does or its condition does not hold."""
        name, arguments = operator
        bound = dict(zip(self.schemas[name].parameters, arguments, strict=True))
        return [
            (ground(effect.atom, bound), effect.adds, not effect.conditional or any(join.holds(state, dict(bound)) for join in joins))
            for effect, joins in self._effects[name]
        ]

    def _operators(self, name: str, joins: list[Join], state: State) -> list[Operator]:
        schema = self.schemas[name]
        found: dict[Operator, None] = {}
        for join in joins:
            for bound in join.solutions(state, {}):
                if name in self._sure or self._changes(join.case, schema, bound):
                    found[name, tuple([bound[variable] for variable in schema.parameters])] = None
        return list(found)

    def _possible(self, case: Case) -> bool:
        """Whether every type that the case names has objects."""
        return all(self.of_type(kind) for kind in case.types.values())

    def _changes(self, case: Case, schema: Schema, bound: Bound) -> bool:
        """False when the preconditions already say everything that the effects would bring."""
        adds = [ground(effect.atom, bound) for effect in schema.effects if effect.adds and not effect.conditional]
        for effect in schema.effects:
            atom = ground(effect.atom, bound)
            before = case.true if effect.adds else case.false
            said = any(other[0] == atom[0] and ground(other, bound) == atom for other in before)
            if effect.conditional or not (said or (not effect.adds and atom in adds)):
                return True
        return False


class State:
    """What holds now, and what is *told* to hold: the official engine tells every effect of an operator, conditional ones too, and tells
    that an atom is false (as ``not_<predicate>``) only after an operator made it so."""

    def __init__(self, world: World, facts: Facts) -> None:
        self.world, self.facts = world, facts
        self.told: Facts = {predicate: set(atoms) for predicate, atoms in facts.items()}

    def copy(self) -> State:
        """One that changes by itself."""
        twin = State(self.world, {predicate: set(atoms) for predicate, atoms in self.facts.items()})
        twin.told = {predicate: set(atoms) for predicate, atoms in self.told.items()}
        return twin

    def apply(self, operator: Operator) -> None:
        """Do it; it must be one of ``World.operators``."""
        effects = self.world.happens(self, operator)
        added = {atom for atom, adds, real in effects if adds and real}
        for adds in (False, True):  # what is added and deleted at once is there
            for atom in [atom for atom, its, real in effects if its is adds and real]:
                (self.facts[atom[0]].add if adds else self.facts[atom[0]].discard)(atom[1:])
        for adds in (True, False):
            for atom in [atom for atom, its, _ in effects if its is adds and (adds or atom not in added)]:
                gains, loses = (atom[0], f"not_{atom[0]}") if adds else (f"not_{atom[0]}", atom[0])
                self.told.setdefault(gains, set()).add(atom[1:])
                self.told.get(loses, set()).discard(atom[1:])

    def all_told(self, predicate: str) -> set[tuple[str, ...]]:
        """Arguments for which a predicate is told to hold."""
        told = self.told.get(predicate)
        return self.world.facts.get(predicate, set()) if told is None else told


def _always_changes(schema: Schema, case: Case) -> bool:
    """Whether some effect adds an atom of a predicate of which the preconditions say nothing."""
    said = {atom[0] for atom in case.true}
    return any(effect.adds and not effect.conditional and effect.atom[0] not in said for effect in schema.effects)


def pairs(atoms: Iterable[tuple[str, ...]]) -> dict[str, str]:
    """Atoms of two arguments as a mapping, in the order of the first."""
    return {atom[0]: atom[1] for atom in sorted(atoms)}
