"""The tiny model of the serving tests, what it must say (the uncached model, step by step), and a tokenizer whose ids are bytes."""

import contextlib
import functools

import jax
import numpy as np

from crl_jax.models import transformer
from crl_jax.serving.constraint import ActionTrie
from crl_jax.serving.engine import SlotEngine
from crl_jax.serving.sampler import EngineSampler

CONFIG = transformer.ModelConfig("tiny", 40, 16, 2, 4, 2, 8, 32, tie_embeddings=False)
LENGTH, STOP = 32, 7
TRIE = ActionTrie.build([(10, STOP), (11, 12, STOP), (11, 13, STOP), (14, STOP)])


@functools.cache
def weights(seed: int):
    params = transformer.init(CONFIG, jax.random.key(seed))
    params["head"]["kernel"] = params["head"]["kernel"] * 60  # clear winners
    return params


@functools.cache
def _forced():
    def logits(params, tokens, positions):
        return transformer.unembed(CONFIG, params, transformer.hidden_states(CONFIG, params, tokens, positions)[0])[0]

    return jax.jit(logits)


def teacher(params, ids) -> np.ndarray:
    """Logits [len(ids), V] of the uncached model."""
    n = len(ids)
    tokens = np.zeros((1, LENGTH), np.int32)
    tokens[0, :n] = ids
    return np.asarray(_forced()(params, tokens, np.where(np.arange(LENGTH) < n, np.arange(LENGTH), -1)[None]))[:n]


def greedy(params, prompt, n) -> list[int]:
    ids = list(prompt)
    for _ in range(n):
        ids.append(int(teacher(params, ids)[-1].argmax()))
    return ids[len(prompt) :]


def prompt(i: int, n: int) -> list[int]:
    return np.random.default_rng(i).integers(15, 40, n).tolist()


def engine(slots: int = 8) -> SlotEngine:
    return SlotEngine(CONFIG, max_slots=slots, max_length=LENGTH, trie=TRIE, row_buckets=(2,), chunk_buckets=(4, 16), max_steps=4)


@contextlib.asynccontextmanager
async def opened(engine, params, **options):
    sampler = EngineSampler(engine, params, **options)
    try:
        yield sampler
    finally:
        await sampler.aclose()
