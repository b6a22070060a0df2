"""Sessions that start with the same prompt, on the compiled engine: computed once, each with the tokens it would have had alone."""

import asyncio
import functools

import jax
import numpy as np
import pytest

from crl_jax.models import transformer
from crl_jax.models.transposed import transposed
from crl_jax.records import SamplingParams
from crl_jax.serving.engine import SlotEngine
from crl_jax.serving.sampler import EngineSampler

CONFIG = transformer.ModelConfig("tiny", 40, 16, 2, 4, 2, 8, 32, tie_embeddings=False)
PROMPT, OTHER = [3, 9, 4, 17, 5, 8, 20, 6, 11, 30], [3, 9, 4, 17, 5, 8, 20, 6, 12, 7, 31]
REQUESTS = [(PROMPT, SamplingParams(6, seed=n)) for n in range(4)] + [
    (PROMPT, SamplingParams(6, temperature=0.0)),
    (OTHER, SamplingParams(4, seed=1)),
]


@functools.cache
def weights():
    return transposed(transformer.init(CONFIG, jax.random.key(0)))


async def complete(requests):
    """Completions of requests that arrive together, and the sampler's counters."""
    sampler = EngineSampler(SlotEngine(CONFIG, max_slots=8, max_length=32, row_buckets=(2,), chunk_buckets=(4, 16), max_steps=4), weights())
    try:
        sessions = [await sampler.open() for _ in requests]
        done = await asyncio.gather(*(sampler.generate(s, ids, params) for s, (ids, params) in zip(sessions, requests, strict=True)))
        return done, sampler.stats()
    finally:
        await sampler.aclose()


def test_a_shared_prompt_is_computed_once_and_changes_no_token():
    together, stats = asyncio.run(complete(REQUESTS))
    alone = [asyncio.run(complete([request]))[0][0] for request in REQUESTS]
    assert stats["shared_tokens"] == 4 * (len(PROMPT) - 1) + 8  # five sessions, one computed, and the beginning of the other prompt
    assert stats["prefilled_tokens"] == len(PROMPT) + 4 + len(OTHER) - 8  # the last id of each is fed by itself
    assert [c.ids for c in together] == [c.ids for c in alone]
    assert len({c.ids for c in together[:4]}) > 1, "seeds make the branches differ"
    for shared, own in zip(together, alone, strict=True):
        assert shared.logps == pytest.approx(own.logps, abs=1e-5)
        assert np.isfinite(shared.logps).all()
