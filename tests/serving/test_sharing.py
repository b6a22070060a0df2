"""Who waits for whom: worked examples, and random trees of prompts played to the end against everyone computing all of its own."""

import itertools
import random

import pytest

from crl_jax.serving.limits import Limits
from crl_jax.serving.prefill import padded_tokens
from crl_jax.serving.sharing import Fresh, levels, waits
from crl_jax.serving.slots import common


def limits(rows=(1, 16), chunks=(16, 64), min_shared=8) -> Limits:
    return Limits(16, 512, 4, 1000, row_buckets=rows, chunk_buckets=chunks, min_shared=min_shared)


def fresh(prompts, have=0):
    return [Fresh(p, len(p) - 1, have) for p in sorted(prompts)]


SYSTEM = list(range(100, 148))


def test_a_tree_of_prompts_is_computed_level_by_level():
    prompts = fresh([*SYSTEM, *tail, 9] for tail in (range(20), range(30, 50), range(60, 80)) for _ in range(3))
    shared = [0, *(min(common(a.ids, b.ids), a.end) for a, b in itertools.pairwise(prompts))]
    assert [level for level, _ in levels(prompts, shared, 4, 8)] == [0, 1, 1, 1, 2, 2, 1, 2, 2]
    assert [left for _, left in levels(prompts, shared, 4, 8)] == [68, 0, 0, 20, 0, 0, 20, 0, 0]
    assert [level for level, _ in levels(prompts, shared, 1, 8)] == [0, 1, 1, 1, 1, 1, 1, 1, 1], "one level: the system prompt only"
    assert waits(prompts, [], limits()) == [False] + [True] * 8


def test_nobody_waits_where_padding_makes_it_no_cheaper():
    prompts = fresh([*SYSTEM, i] for i in range(9))
    assert waits(prompts, [], limits(rows=(16,))) == [False] * 9
    assert waits(prompts, [], limits(rows=(1, 16))) == [False] + [True] * 8
    assert waits(fresh([[1, 2, 3, 4]] * 5), [], limits()) == [False] * 5, "too short to be worth a copy"
    assert waits([], [], limits()) == []


def test_a_chain_of_ever_longer_beginnings_is_not_followed_link_by_link():
    prompts = fresh([list(range(10 * n)) + [999] * (150 - 10 * n) for n in range(1, 15)])
    waiting = waits(prompts, [], limits(rows=(16,)))
    assert sum(waiting) in (0, 13)
    assert play(prompts, limits(rows=(16,))) <= padded_tokens([p.end for p in prompts], limits(rows=(16,)))


def play(prompts: list[Fresh], sizes: Limits) -> int:
    """Tokens computed, padding counted, until all inputs are there; whole inputs are computed in a round."""
    ids, cost, left, known = [p.ids for p in prompts], 0, list(range(len(prompts))), []
    for _ in range(100):
        if not left:
            return cost
        have = [max((common(ids[i][: len(ids[i]) - 1], k) for k in known), default=0) for i in left]
        have = [n if n >= sizes.min_shared else 0 for n in have]
        candidates = [Fresh(ids[i], len(ids[i]) - 1, n) for i, n in zip(left, have, strict=True)]
        late = waits(candidates, [], sizes)
        assert not late[0]
        now = [(i, c) for i, c, w in zip(left, candidates, late, strict=True) if not w]
        cost += padded_tokens([c.end - c.have for _, c in now], sizes)
        known += [ids[i][: c.end] for i, c in now]
        left = [i for i, w in zip(left, late, strict=True) if w]
    raise AssertionError("it does not end")


@pytest.mark.parametrize("seed", range(25))
def test_it_ends_and_costs_at_most_what_everyone_alone_would_cost(seed):
    rng = random.Random(seed)
    sizes = limits(rows=rng.choice([(1, 16), (16,), (4, 16)]), chunks=rng.choice([(16, 64), (8, 32, 256)]), min_shared=rng.choice([1, 8]))
    stems = [[rng.randrange(5) for _ in range(rng.randrange(60))] for _ in range(3)]
    prompts = []
    for _ in range(rng.randint(1, 16)):
        stem = rng.choice(stems)
        prompts.append(stem[: rng.randint(0, len(stem))] + [rng.randrange(5) for _ in range(rng.choice([1, 2, 30, 90]))])
    candidates = fresh(prompts)
    assert play(candidates, sizes) <= padded_tokens([c.end for c in candidates], sizes)
