"""The action trie: its paths are exactly the given actions."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crl_jax.serving.constraint import COMPLETE, ROOT, ActionTrie

STOP = 9


def paths(trie: ActionTrie, state: int = ROOT) -> set[tuple[int, ...]]:
    found = set()
    for token, following in zip(trie.allowed[state], trie.next_state[state], strict=True):
        if token >= 0:
            rest = {()} if following == COMPLETE else paths(trie, int(following))
            found |= {(int(token), *tail) for tail in rest}
    return found


@given(st.lists(st.lists(st.integers(0, 8), max_size=4), min_size=1, max_size=12))
@settings(max_examples=60, deadline=None)
def test_paths_from_the_root_are_exactly_the_actions(actions):
    ended = [(*a, STOP) for a in actions]
    trie = ActionTrie.build(ended)
    assert paths(trie) == set(ended)
    assert trie.allowed.dtype == trie.next_state.dtype == np.int32
    assert (trie.allowed[0] == -1).all()


def test_advance_follows_an_action_and_refuses_others():
    trie = ActionTrie.build([(1, 2, STOP), (1, 3, STOP)])
    state = trie.advance(ROOT, 1)
    assert trie.advance(trie.advance(state, 3), STOP) == COMPLETE
    assert trie.advance(0, 5) == 0
    with pytest.raises(ValueError, match="not allowed"):
        trie.advance(ROOT, 2)


@pytest.mark.parametrize("actions", [[], [()], [(1, -2)], [(1,), (1, 2)], [(1, 2), (1,)]])
def test_actions_that_cannot_be_told_apart_are_refused(actions):
    with pytest.raises(ValueError, match="action"):
        ActionTrie.build(actions)
