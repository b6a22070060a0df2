"""The experience bank as a value: a state, and functions from an operation to the next state.

Owns: what every operation does to the entries (method: add, update, return; merge and retire are the manager's own), ids, eviction order,
usage counters. Promises: pure and deterministic, so a log of operations replays to the same state; every read and write is scoped by
namespace; an operation never deletes knowledge without inserting its replacement in the same change (only ``RETIRE`` drops entries, and
no model can emit it); bad input is a `Problem` to count, never an exception. Does not: embed, search, store, or know the time.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from crl_jax.records import BankOp, Experience, OpKind, Usage


class Author(NamedTuple):
    """Who wrote an operation: the generation, its weight version, the actor step, and the episodes it was distilled from."""

    generation_id: str
    version: int
    step: int
    episode_ids: tuple[str, ...] = ()


class Problem(NamedTuple):
    """Something an operation asked for that the bank did not do. ``code`` is the name of the counter."""

    code: str
    detail: str


class Eviction(enum.Enum):
    """Which entry leaves a full namespace first: the oldest, the one unseen for longest, or the one with the lowest `utility`."""

    FIFO = "fifo"
    LRU = "lru"
    UTILITY = "utility"


def _no_spaces() -> dict[str, dict[str, Experience]]:
    return {}


def _no_usage() -> dict[str, Usage]:
    return {}


@dataclasses.dataclass(frozen=True)
class BankState:
    """All entries by namespace (in insertion order), their usage, and the number of changes so far. Treat the mappings as read-only."""

    spaces: Mapping[str, Mapping[str, Experience]] = dataclasses.field(default_factory=_no_spaces)
    usage: Mapping[str, Usage] = dataclasses.field(default_factory=_no_usage)  # of live entries that were ever shown
    revision: int = 0

    def space(self, namespace: str) -> Mapping[str, Experience]:
        """The entries of one namespace in insertion order; empty if there are none."""
        return self.spaces.get(namespace, {})

    def find(self, experience_id: str) -> Experience | None:
        """The live entry with this id in any namespace."""
        for space in self.spaces.values():
            if experience_id in space:
                return space[experience_id]
        return None

    def __len__(self) -> int:
        return sum(len(space) for space in self.spaces.values())


class Applied(NamedTuple):
    """What one operation did: the next state, the entry it wrote, the ids it removed, and what it could not do."""

    state: BankState
    written: Experience | None
    retired: tuple[str, ...]
    problems: tuple[Problem, ...]


def apply(state: BankState, op: BankOp, *, namespace: str, author: Author, op_index: int = 0, inherit_usage: bool = False) -> Applied:
    """The state after one operation; the revision rises by one exactly when something changed.

    An update whose targets are partly gone replaces those that are left; with none left it becomes an add. A merge is a compare-and-set:
    if any of its sources is gone it is refused as a whole. A new entry starts with empty usage unless ``inherit_usage`` (de-duplication:
    the same knowledge in new words), which sums the usage of the entries it replaces.
    """
    space = state.space(namespace)
    targets = tuple(dict.fromkeys(op.targets)) if op.kind is not OpKind.ADD else ()
    present = tuple(target for target in targets if target in space)
    problems = tuple(Problem("unknown_target", f"{target} is not in namespace {namespace!r}") for target in targets if target not in space)
    if op.kind is OpKind.NOOP:
        return Applied(state, None, (), ())
    if op.kind is OpKind.RETIRE:
        return Applied(_replaced(state, namespace, present, None) if present else state, None, present, problems)
    if not op.text.strip():
        return Applied(state, None, (), (*problems, Problem("empty_text", f"{op.kind.value} without text")))
    if op.kind is OpKind.MERGE and (problems or not present):
        return Applied(state, None, (), (*problems, Problem("merge_refused", "a source is gone")))
    if op.kind is OpKind.UPDATE and not present:
        problems = (*problems, Problem("update_became_add", "no target is left"))
    written = Experience(
        id=f"x{state.revision + 1:08d}-{op_index}",
        namespace=namespace,
        text=op.text,
        generation_id=author.generation_id,
        op_index=op_index,
        author_version=author.version,
        step=author.step,
        episode_ids=author.episode_ids,
        parents=present,
    )
    return Applied(_replaced(state, namespace, present, written, inherit_usage), written, present, problems)


def _replaced(state: BankState, namespace: str, gone: Sequence[str], written: Experience | None, inherit_usage: bool = False) -> BankState:
    space = dict(state.space(namespace))
    usage = dict(state.usage)
    lost = [usage.pop(old) for old in gone if old in usage]
    for old in gone:
        del space[old]
    if written is not None:
        space[written.id] = written
        if inherit_usage and lost:
            usage[written.id] = Usage(sum(u.shown for u in lost), sum(u.succeeded for u in lost), max(u.last_shown_step for u in lost))
    spaces = {name: entries for name, entries in state.spaces.items() if name != namespace}
    if space:
        spaces[namespace] = space
    return BankState(spaces, usage, state.revision + 1)


def observe(state: BankState, shown: Sequence[tuple[str, bool]], *, step: int) -> BankState:
    """The state after finished episodes were counted: one pair (experience id, success) per episode and entry it read.

    Ids that are no longer in the bank are skipped (their generation is still credited, elsewhere). Revision + 1 if anything was counted.
    """
    usage = dict(state.usage)
    counted = False
    for experience_id, success in shown:
        if state.find(experience_id) is None:
            continue
        old = usage.get(experience_id, Usage())
        usage[experience_id] = Usage(old.shown + 1, old.succeeded + int(success), max(old.last_shown_step, step))
        counted = True
    return BankState(state.spaces, usage, state.revision + 1) if counted else state


def utility(usage: Usage) -> float:
    """Success rate of the episodes that read the entry, with one success and one failure added (so an unseen entry has 0.5)."""
    return (usage.succeeded + 1) / (usage.shown + 2)


def plan_eviction(state: BankState, namespace: str, *, capacity: int, policy: Eviction) -> tuple[str, ...]:
    """Ids to retire so that the namespace holds at most ``capacity`` >= 1 entries. The newest entry always stays; ties go by age."""
    ids = list(state.space(namespace))
    excess = len(ids) - capacity
    if excess <= 0:
        return ()
    candidates = ids[:-1]
    if policy is Eviction.LRU:
        candidates.sort(key=lambda i: max(state.usage.get(i, Usage()).last_shown_step, state.space(namespace)[i].step))
    elif policy is Eviction.UTILITY:
        candidates.sort(key=lambda i: utility(state.usage.get(i, Usage())))
    return tuple(candidates[:excess])
