"""Constrained actions: a trie over token ids, compiled to two tables that fit on a device.

Owns: turning a list of whole actions (each a token id sequence that ends with the stop id) into ``allowed`` and ``next_state``.
Promises: state 0 means "no constraint" and its row is unused; state 1 is the root; a path from the root spells exactly the given
actions, so the softmax over ``allowed[state]`` at each step is a distribution over the legal continuations.
Does not: know tokenizers, text, or how sampling works.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

UNCONSTRAINED = 0
ROOT = 1
COMPLETE = -1  # the value in ``next_state`` after an action's last id, and the padding of both tables


@dataclasses.dataclass(frozen=True, eq=False)
class ActionTrie:
    """Legal continuations per state. ``S`` states, at most ``A`` continuations each; -1 pads.

    ``allowed[s, a]`` is a token id that may be sampled in state s and ``next_state[s, a]`` the state after it (``COMPLETE`` after the
    stop id).
    """

    allowed: Int[np.ndarray, "S A"]
    next_state: Int[np.ndarray, "S A"]

    @staticmethod
    def build(action_ids: Sequence[Sequence[int]]) -> ActionTrie:
        """The trie of ``action_ids``; duplicates count once.

        Raises ValueError when there is no action, an action is empty or has a negative id, or one action is a beginning of another (then
        "complete" would be ambiguous: end every action with the stop id).
        """
        if not action_ids:
            raise ValueError("an action trie needs at least one action")
        children: list[dict[int, int]] = [{}, {}]
        for action in dict.fromkeys(tuple(int(i) for i in ids) for ids in action_ids):
            _insert(children, action)
        width = max(len(c) for c in children)
        allowed = np.full((len(children), width), -1, np.int32)
        next_state = np.full((len(children), width), COMPLETE, np.int32)
        for state, edges in enumerate(children):
            for column, token in enumerate(sorted(edges)):
                allowed[state, column] = token
                next_state[state, column] = edges[token]
        return ActionTrie(allowed, next_state)

    def advance(self, state: int, token: int) -> int:
        """The state after ``token`` in ``state``: ``COMPLETE`` at the end of an action, 0 from 0. Raises ValueError for a token that is
        not allowed.
        """
        if state == UNCONSTRAINED:
            return UNCONSTRAINED
        columns = np.flatnonzero(self.allowed[state] == token)
        if len(columns) == 0:
            raise ValueError(f"token {token} is not allowed in constraint state {state}")
        return int(self.next_state[state, columns[0]])


def _insert(children: list[dict[int, int]], action: tuple[int, ...]) -> None:
    """Adds one action's path to ``children`` (one dict of token -> next state per state)."""
    if not action or min(action) < 0:
        raise ValueError(f"an action is a non-empty sequence of ids >= 0, got {action}")
    state = ROOT
    for i, token in enumerate(action):
        last = i == len(action) - 1
        known = children[state].get(token)
        if known is None:
            if not last:
                children.append({})
            children[state][token] = COMPLETE if last else len(children) - 1
        elif last or known == COMPLETE:
            raise ValueError(f"action {action} begins another action, or another begins it: end every action with the stop id")
        state = children[state][token]
