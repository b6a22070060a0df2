"""A tiny model for tests of serving, what it must say (the uncached model on whole sequences: teacher forcing), and requests to it."""

import contextlib
import functools

import jax
import numpy as np
import pytest

from crl_jax.models import transformer
from crl_jax.records import Completion, SamplingParams
from crl_jax.serving.constraint import ActionTrie
from crl_jax.serving.engine import SlotEngine
from crl_jax.serving.sampler import EngineSampler

CONFIG = transformer.ModelConfig("tiny", 40, 16, 2, 4, 2, 8, 32, tie_embeddings=False)
LENGTH, STOP = 32, 7
TRIE = ActionTrie.build([(10, STOP), (11, 12, STOP), (11, 13, STOP), (14, STOP)])
PIECES = [bytes([97 + i % 26]) * (1 + i // 26) for i in range(40)]  # a, b, ... z, aa, bb, ...
GREEDY = functools.partial(SamplingParams, temperature=0.0)


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


def check_logps(params, prompt, completion: Completion, temperature=1.0) -> None:
    """The log-probs a learner can recompute, and the lengths of all columns (R07)."""
    n = len(completion.ids)
    assert n == len(completion.logps) == len(completion.versions) == len(completion.states) == len(completion.sampling_logps)
    logits = teacher(params, [*prompt, *completion.ids])[len(prompt) - 1 : -1] / temperature
    for row, token, logp, state in zip(logits, completion.ids, completion.logps, completion.states, strict=True):
        support = np.arange(len(row)) if state == 0 else TRIE.allowed[state][TRIE.allowed[state] >= 0]
        assert token in support
        exact = row[token] - np.log(np.exp(row[support].astype(np.float64)).sum())
        assert logp == pytest.approx(exact, abs=1e-4)


def engine(slots: int = 8, kind: type[SlotEngine] = SlotEngine, **options) -> SlotEngine:
    """The tiny engine; ``options`` change its sizes."""
    sizes = {"row_buckets": (2,), "chunk_buckets": (4, 16), "max_steps": 4}
    return kind(CONFIG, max_slots=slots, max_length=LENGTH, trie=TRIE, pieces=PIECES, **(sizes | options))


@contextlib.asynccontextmanager
async def opened(engine, params, **options):
    """A sampler over ``engine``, closed at the end."""
    sampler = EngineSampler(engine, params, **options)
    try:
        yield sampler
    finally:
        await sampler.aclose()


def prompt(i: int, n: int) -> list[int]:
    """``n`` ids that no action and no stop id has."""
    return np.random.default_rng(i).integers(15, 40, n).tolist()


def mixed(i: int) -> tuple[list[int], SamplingParams]:
    stops = (20, 21) if i % 3 == 0 else ()
    params = SamplingParams(
        max_new_tokens=1 + i % 7,
        temperature=(0.0, 1.0, 0.5)[i % 3],
        top_p=(1.0, 0.8)[i % 2],
        top_k=(0, 5)[i % 4 == 1],
        min_p=(0.0, 0.1)[i % 7 == 2],
        stop_ids=stops,
        stop_strings=("q", "ccd") if i % 4 == 2 else (),
        forbidden_ids=(3, 30 + i % 9) if i % 5 in (1, 2) else (),
        seed=i,
        constrained=i % 5 == 0,
    )
    system = prompt(1000, 9) if i % 6 < 2 else []  # some begin alike
    return system + prompt(i, 1 + i % 15), params
