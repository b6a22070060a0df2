"""Every arrangement of the cache gives the same tokens, over the edges of its blocks, in turns, forks and rows that move."""

import asyncio
import functools

import numpy as np
import pytest
from tiny_model import CONFIG, GREEDY, opened, prompt, weights

from crl_jax.records import SamplingParams
from crl_jax.serving.engine import SlotEngine

TURNS = [
    [prompt(0, 120), prompt(1, 9), prompt(2, 130)],
    [[*prompt(0, 120), 16], prompt(4, 20), prompt(5, 100)],
    [prompt(6, 150), prompt(7, 40), prompt(8, 60)],
]


@functools.cache
def replies(layout: str):
    """What three conversations over two slots say, and the counters."""
    engine = SlotEngine(CONFIG, max_slots=2, max_length=300, row_buckets=(), chunk_buckets=(128,), max_steps=4, cache_layout=layout)
    how = [GREEDY(6), SamplingParams(6, temperature=0.7, top_k=9, seed=1), GREEDY(6)]

    async def main():
        async with opened(engine, weights(0)) as sampler:
            sessions, said = [await sampler.open() for _ in TURNS], []
            for turn in zip(*TURNS, strict=True):
                said += await asyncio.gather(*(sampler.generate(*request) for request in zip(sessions, turn, how, strict=True)))
            return said, sampler.stats()

    return asyncio.run(main())


@pytest.mark.parametrize("layout", ["blocks", "tokens"])
def test_the_arrangement_changes_no_token(layout):
    got, stats = replies(layout)
    expected, _ = replies("whole")
    assert [c.ids for c in got] == [c.ids for c in expected]
    np.testing.assert_allclose(np.concatenate([c.logps for c in got]), np.concatenate([c.logps for c in expected]), atol=1e-4)
    assert stats["restored_tokens"] > 0
    assert stats["move_dispatches"] > 0
    assert stats["recomputed_tokens"] == 0
