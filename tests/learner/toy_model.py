"""A two-matrix causal model with the interface of the transformer, so that the learner's tests compile in a fraction of a second."""

import jax
import jax.numpy as jnp
import numpy as np

from crl_jax.records import Completion, Finish, Provenance, TokenLog, TrainSample

VOCAB, WIDTH = 11, 8
BUCKETS = {"row_buckets": (8,), "length_buckets": (12,), "token_buckets": (6,)}


def init(seed: int = 0, dtype=jnp.float32) -> dict:
    rng = np.random.default_rng(seed)
    shapes = {"embed": (VOCAB, WIDTH), "mix": (2 * WIDTH, WIDTH), "scale": (WIDTH,)}
    return {name: jnp.asarray(rng.normal(0, 0.7, shape), dtype) for name, shape in shapes.items()}


def hidden_states(config, params, tokens, positions, *, segments=None, prefixes=None, read=None, how=None):
    """tanh of (this token, mean of all tokens so far) times a matrix; padding contributes nothing. One sequence per row."""
    assert segments is None
    assert prefixes is None
    del config, how
    x = jnp.where((positions >= 0)[..., None], params["embed"][tokens], 0.0)
    history = jnp.cumsum(x, axis=1) / jnp.maximum(positions + 1, 1)[..., None]
    hidden = jnp.tanh(jnp.concatenate([x, history], -1) @ params["mix"]) * params["scale"]
    return hidden if read is None else jnp.take_along_axis(hidden, read[..., None], axis=1), None


def unembed(config, params, hidden):
    del config
    return (hidden @ params["embed"].T).astype(jnp.float32)


def sample(rng: np.random.Generator, prompt: int, reply: int, advantage: float, states: tuple[int, ...] = ()) -> TrainSample:
    """A prompt, a reply of ``reply`` tokens with plausible behaviour log-probs, one observation token, and a second reply of one token."""
    log = TokenLog.empty().append_context([int(t) for t in rng.integers(0, VOCAB, prompt)], Provenance.PROMPT)
    for n in (reply, 1):
        ids = tuple(int(t) for t in rng.integers(0, VOCAB, n))
        logps = tuple(float(x) for x in rng.uniform(-3.0, -1.5, n))
        log = log.append_completion(Completion(ids, logps, (0,) * n, states or (0,) * n, Finish.STOP))
        log = log.append_context([1], Provenance.OBSERVATION)
    return TrainSample(log, advantage)


def samples(count: int, seed: int = 0) -> list[TrainSample]:
    rng = np.random.default_rng(seed)
    return [sample(rng, 2 + i % 3, 1 + i % 4, float(rng.normal())) for i in range(count)]


def copy(tree):
    return jax.tree.map(jnp.copy, tree)
