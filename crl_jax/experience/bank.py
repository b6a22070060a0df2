"""The experience bank as a value: a state, and functions from an operation to the next state.

Owns: what every operation does to the entries (method: add, update, return, votes; merge and retire are the manager's own), ids, usage
and transfer counters. Promises: pure and deterministic, so a log of operations replays to the same state; every read and write is scoped
by namespace; an operation never deletes knowledge without inserting its replacement in the same change (``RETIRE``, which no model can
emit, drops entries, and so does a vote below zero); bad input is a `Problem` to count, never an exception. Does not: embed, search,
store, choose what is evicted (``eviction``), or know the time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import immutables

from crl_jax.experience.space import Space
from crl_jax.records import BankOp, Experience, OpKind, Usage


class Author(NamedTuple):
    """Who wrote an operation: the generation, its weight version, the actor step, the episodes it was distilled from and whether they
    succeeded (None: several, or none)."""

    generation_id: str
    version: int
    step: int
    episode_ids: tuple[str, ...] = ()
    outcome: bool | None = None


class Problem(NamedTuple):
    """Something an operation asked for that the bank did not do. ``code`` is the name of the counter."""

    code: str
    detail: str


class Guided(NamedTuple):
    """One finished episode and one entry it had read; an empty ``experience_id`` stands for an episode that had read none.

    ``reader`` is the namespace of the episode's task, which is not that of the entry when experience crosses families.
    """

    experience_id: str
    success: bool
    episode_id: str = ""
    reader: str = ""
    reward: float = 0.0


class Tally(NamedTuple):
    """Episodes, and those of them that succeeded."""

    episodes: int = 0
    succeeded: int = 0


@dataclasses.dataclass(frozen=True)
class BankState:
    """All entries by namespace (in the order they were written), their usage, and the number of changes so far.

    ``transfer`` counts guided episodes by (namespace of the reader, namespace of the entry), and free ones by (namespace, "").
    """

    spaces: Mapping[str, Space] = dataclasses.field(default_factory=dict[str, Space])
    usage: immutables.Map[str, Usage] = dataclasses.field(default_factory=immutables.Map[str, Usage])  # of live entries only
    transfer: Mapping[tuple[str, str], Tally] = dataclasses.field(default_factory=dict[tuple[str, str], Tally])
    revision: int = 0

    def space(self, namespace: str) -> Space:
        """The entries of one namespace in the order they were written; empty if there are none."""
        return self.spaces.get(namespace, _EMPTY)

    def find(self, experience_id: str) -> Experience | None:
        """The live entry with this id in any namespace."""
        for space in self.spaces.values():
            if (entry := space.get(experience_id)) is not None:
                return entry
        return None

    def __len__(self) -> int:
        return sum(len(space) for space in self.spaces.values())


_EMPTY = Space()


class Applied(NamedTuple):
    """What one operation did: the next state, the entry it wrote, the ids it removed, and what it could not do."""

    state: BankState
    written: Experience | None
    retired: tuple[str, ...]
    problems: tuple[Problem, ...]


def apply(
    state: BankState, op: BankOp, *, namespace: str, author: Author, op_index: int = 0, inherit_usage: bool = False, decay: float = 1.0
) -> Applied:
    """The state after one operation; the revision rises by one exactly when something changed.

    An update whose targets are partly gone replaces those that are left; with none left it becomes an add. A merge is a compare-and-set:
    if any of its sources is gone it is refused as a whole. A new entry starts with empty usage unless ``inherit_usage`` (de-duplication:
    the same knowledge in new words), which sums the usage of the entries it replaces (recent counts as of the newest of their steps: older
    ones fade by ``decay`` for every step between). A vote moves every target by one; a target whose
    votes fall below zero is retired.
    """
    space = state.space(namespace)
    targets = tuple(dict.fromkeys(op.targets)) if op.kind is not OpKind.ADD else ()
    present = tuple(target for target in targets if target in space)
    problems = tuple(Problem("unknown_target", f"{target} is not in namespace {namespace!r}") for target in targets if target not in space)
    if op.kind is OpKind.NOOP:
        return Applied(state, None, (), ())
    if op.kind is OpKind.RETIRE:
        return Applied(_replaced(state, namespace, present, None) if present else state, None, present, problems)
    if op.kind in (OpKind.UPVOTE, OpKind.DOWNVOTE):
        return _voted(state, namespace, present, 1 if op.kind is OpKind.UPVOTE else -1, problems)
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
        outcome=author.outcome,
    )
    return Applied(_replaced(state, namespace, present, written, decay if inherit_usage else None), written, present, problems)


def _replaced(state: BankState, namespace: str, gone: Sequence[str], written: Experience | None, decay: float | None = None) -> BankState:
    space = state.space(namespace).replaced(gone, written)
    usage = state.usage.mutate()
    lost = [usage.pop(old) for old in gone if old in usage]
    if written is not None and decay is not None and lost:
        usage[written.id] = _together(lost, decay)
    spaces = {name: entries for name, entries in state.spaces.items() if name != namespace or len(space)}
    if len(space):
        spaces[namespace] = space
    return dataclasses.replace(state, spaces=spaces, usage=usage.finish(), revision=state.revision + 1)


def _together(parts: Sequence[Usage], decay: float) -> Usage:
    last = max(u.last_shown_step for u in parts)
    faded = [decay ** (last - u.last_shown_step) for u in parts]
    return Usage(
        sum(u.shown for u in parts),
        sum(u.succeeded for u in parts),
        last,
        sum(u.recent_shown * left for u, left in zip(parts, faded, strict=True)),
        sum(u.recent_succeeded * left for u, left in zip(parts, faded, strict=True)),
        sum(u.votes for u in parts),
    )


def _voted(state: BankState, namespace: str, targets: Sequence[str], change: int, problems: tuple[Problem, ...]) -> Applied:
    if not targets:
        return Applied(state, None, (), (*problems, Problem("vote_without_target", "no target is left")))
    voted = {i: dataclasses.replace(u, votes=u.votes + change) for i, u in ((i, state.usage.get(i, Usage())) for i in targets)}
    fallen = tuple(i for i, usage in voted.items() if usage.votes < 0)
    counted = dataclasses.replace(state, usage=state.usage.update(voted), revision=state.revision + 1)
    if not fallen:
        return Applied(counted, None, (), problems)
    return Applied(dataclasses.replace(_replaced(counted, namespace, fallen, None), revision=counted.revision), None, fallen, problems)


def observe(state: BankState, guided: Sequence[Guided], *, step: int, decay: float = 1.0) -> BankState:
    """The state after finished episodes were counted: one item per episode and entry it read, one per episode that read none.

    An entry's recent counts are multiplied by ``decay`` for every step since it was shown last, then the episode is added. Ids that are no
    longer in the bank are skipped (their generation is still credited, elsewhere). Revision + 1 if anything was counted.
    """
    transfer = dict(state.transfer)
    usage = state.usage.mutate()
    counted = False
    for item in guided:
        entry = state.find(item.experience_id) if item.experience_id else None
        if item.experience_id and entry is None:
            continue
        pair = (item.reader, entry.namespace if entry else "")
        old = transfer.get(pair, Tally())
        transfer[pair] = Tally(old.episodes + 1, old.succeeded + int(item.success))
        if entry is not None:
            usage[entry.id] = _seen(usage.get(entry.id, Usage()), item.success, step, decay)
        counted = True
    if not counted:
        return state
    return dataclasses.replace(state, usage=usage.finish(), transfer=transfer, revision=state.revision + 1)


def _seen(old: Usage, success: bool, step: int, decay: float) -> Usage:
    faded = decay ** max(0, step - old.last_shown_step) if old.shown else 0.0
    return Usage(
        old.shown + 1,
        old.succeeded + int(success),
        max(old.last_shown_step, step),
        old.recent_shown * faded + 1.0,
        old.recent_succeeded * faded + float(success),
        old.votes,
    )


def utility(usage: Usage, *, decay: float = 1.0, age: int = 0) -> float:
    """Posterior mean of success of the episodes that read the entry, from a uniform prior (so an unseen entry has 0.5).

    With ``decay`` below 1 the evidence fades: by ``decay`` for each of the ``age`` steps since the entry was shown last.
    """
    faded = decay**age
    return (usage.recent_succeeded * faded + 1) / (usage.recent_shown * faded + 2)
