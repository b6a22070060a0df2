"""Log-probabilities and entropy of chosen tokens, at the temperature and under the constraint they were sampled with.

Owns: the one definition of a token's log-probability that the sampler's behaviour log-probs must agree with.
Promises: temperature divides the logits, before the softmax; constraint state 0 means the softmax over the whole vocabulary, a state
s > 0 the softmax over ``logits[allowed[s]]`` alone; arithmetic is float32; a token that its state does not allow scores NaN, so that
the step which trains it is refused.
``chunked_logps`` computes the same from hidden states without ever holding the logits of all tokens.
Does not: gather hidden states or shift tokens: ``logits[b, n]`` are the logits that ``ids[b, n]`` was drawn from.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

_EXCLUDED = -1e30  # stands for minus infinity where a gradient must stay finite


class TokenScores(NamedTuple):
    """Per token: ``logps`` = ln p(id) and ``entropy`` of the distribution it was drawn from, both in nats. Entropy carries no gradient."""

    logps: Float[Array, "B N"]
    entropy: Float[Array, "B N"]


def selected_logps(
    logits: Float[Array, "B N V"],
    ids: Int[Array, "B N"],
    temperature: float = 1.0,
    allowed: Int[Array, "S A"] | None = None,
    states: Int[Array, "B N"] | None = None,
) -> TokenScores:
    """Scores of ``ids`` under softmax(logits / temperature), restricted to ``allowed[states]`` where the state is not 0.

    ``allowed`` holds token ids padded with -1; its row 0 is not read. A constrained token costs O(A) on top of the full softmax.
    Raises ValueError for a temperature that is not positive (greedy sampling reports its log-probs at temperature 1: pass 1), or when
    only one of ``allowed`` and ``states`` is given.
    """
    if not temperature > 0:
        raise ValueError(f"temperature {temperature} must be positive; for greedy sampling, whose log-probs are reported at 1, pass 1.0")
    if (allowed is None) != (states is None):
        raise ValueError("give both `allowed` and `states` for constrained tokens, or neither")
    scaled = logits.astype(jnp.float32) / temperature
    chosen = jnp.take_along_axis(scaled, ids[..., None], axis=-1)[..., 0]
    full = _log_normaliser(scaled)
    if allowed is None or states is None:
        return TokenScores(chosen - full.log_z, full.entropy)

    options = allowed[states]
    legal = jnp.any(options == ids[..., None], axis=-1) | (states == 0)
    option_logits = jnp.take_along_axis(scaled, jnp.maximum(options, 0), axis=-1)
    within = _log_normaliser(jnp.where(options >= 0, option_logits, _EXCLUDED))
    logps = chosen - jnp.where(states > 0, within.log_z, full.log_z)
    return TokenScores(jnp.where(legal, logps, jnp.nan), jnp.where(states > 0, within.entropy, full.entropy))


def chunked_logps(
    unembed: Callable[[Float[Array, "B C D"]], Float[Array, "B C V"]],
    hidden: Float[Array, "B N D"],
    ids: Int[Array, "B N"],
    *,
    chunk: int,
    temperature: float = 1.0,
    allowed: Int[Array, "S A"] | None = None,
    states: Int[Array, "B N"] | None = None,
) -> TokenScores:
    """``selected_logps(unembed(hidden), ids, ...)`` with the logits of ``chunk`` tokens of every row alive at a time.

    The backward pass computes each chunk's logits again, so memory is O(B chunk V) in both directions, for one head product more. Chunks
    lie along N and not along B: the rows stay on their own data shard. A ``chunk`` of N or more keeps the logits and computes nothing
    twice; a chunk that does not divide N pads the last one. Raises ValueError for a chunk below 1, and like ``selected_logps``.
    """
    rows, n = ids.shape
    if chunk < 1:
        raise ValueError(f"chunk {chunk} must be at least 1 token per row")

    def scores(part: tuple[Array, Array, Array | None]) -> TokenScores:
        hidden, ids, states = part
        return selected_logps(unembed(hidden), ids, temperature, allowed, states)

    def split(x: Array) -> Array:
        width = ((0, 0), (0, -n % chunk)) + ((0, 0),) * (x.ndim - 2)
        padded: Array = jnp.pad(x, width)  # pyright: ignore[reportUnknownMemberType]
        return jnp.swapaxes(padded.reshape(rows, -1, chunk, *x.shape[2:]), 0, 1)

    def joined(x: Array) -> Array:
        return jnp.swapaxes(x, 0, 1).reshape(rows, -1)[:, :n]

    if chunk >= n:
        return scores((hidden, ids, states))
    again: Callable[[Any], TokenScores] = jax.checkpoint(scores)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    parts = cast(TokenScores, jax.lax.map(again, jax.tree.map(split, (hidden, ids, states))))  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
    return TokenScores(joined(parts.logps), joined(parts.entropy))


class _Normaliser(NamedTuple):
    log_z: Float[Array, "B N"]
    entropy: Float[Array, "B N"]


def _log_normaliser(logits: Float[Array, "B N K"]) -> _Normaliser:
    """ln sum exp(logits), with gradient, and the entropy E[ln Z - logit], without (a sum of small terms: ln Z - E[logit] cancels)."""
    log_z = jax.nn.logsumexp(logits, axis=-1)
    surprise = jax.lax.stop_gradient(log_z[..., None] - logits)
    return _Normaliser(log_z, jnp.sum(jnp.exp(-surprise) * surprise, axis=-1))
