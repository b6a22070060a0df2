"""One optimiser step, as one compiled function.

Owns: scoring the trained tokens, micro-batching, the update, and refusing it. Promises: the update does not depend on
``microbatches`` or on the mesh (one denominator for the whole step); a step whose loss or gradient is not finite, or that has nothing
to train on, changes nothing but the skip counters; the state is donated. Does not: loop over epochs: to pass over a batch twice, call
it twice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from crl_jax.learner.objective import Objective
from crl_jax.learner.state import LearnerState
from crl_jax.losses.aggregate import aggregate, aggregate_count, masked_sum
from crl_jax.losses.kl import kl_estimate
from crl_jax.losses.logprobs import TokenScores, chunked_logps
from crl_jax.losses.mismatch import Mismatch, mismatch, mismatch_sums, over_parts
from crl_jax.records import Sum, TrainBatch

Sums = dict[str, Sum]
TrainStep = Callable[[LearnerState, TrainBatch], tuple[LearnerState, Sums]]


LOGIT_BYTES = 64 * 2**20  # of float32 logits alive per device, where ``logit_chunk`` leaves it to the step
SPLIT_LOGIT_BYTES = 256 * 2**20  # the same where the head is split over fsdp: each chunk fetches it and sums its gradient over the network


class Model(Protocol):
    """What the step needs of a model; the module ``crl_jax.models.transformer`` is one."""

    def hidden_states(
        self,
        config: Any,
        params: Any,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        /,
        *,
        segments: Int[Array, "B T"] | None,
        prefixes: Int[Array, "B T"] | None,
        read: Int[Array, "B M"],
        how: Any,
    ) -> tuple[Any, Any]:
        """Hidden states ``[B, M, D]`` at the positions ``read``, and the cache (unused here); see ``models.forward``."""
        ...

    def unembed(self, config: Any, params: Any, hidden: Float[Array, "S N D"], /) -> Float[Array, "S N V"]:
        """Logits of hidden states, float32."""
        ...


def score_tokens(
    model: Model,
    model_config: Any,
    params: Any,
    batch: TrainBatch,
    *,
    temperature: float,
    allowed: Int[Array, "S A"] | None,
    how: Any = None,
    logit_chunk: int | None = None,
    logit_bytes: int = LOGIT_BYTES,
) -> TokenScores:
    """Log-prob and entropy ``[S, N]`` of the trained tokens: a token is scored from the hidden state at ``source_index`` of its row.

    Only those states are computed by the last layer and unembedded, ``logit_chunk`` tokens per sequence at a time (None: as many as
    keep the logits below ``logit_bytes`` on all devices together).
    """
    rows = batch.tokens.shape[0]
    source = jnp.maximum(batch.token_index - 1, 0) if batch.source_index is None else batch.source_index
    hidden, _ = model.hidden_states(
        model_config,
        params,
        batch.tokens,
        batch.positions,
        segments=batch.segments,
        prefixes=batch.prefixes,
        read=source.reshape(rows, -1),
        how=how,
    )
    ids = jnp.take_along_axis(batch.tokens, batch.token_index.reshape(rows, -1), axis=1).reshape(source.shape)

    def unembed(hidden: Float[Array, "S C D"]) -> Float[Array, "S C V"]:
        return model.unembed(model_config, params, hidden)

    hidden = hidden.reshape(*source.shape, -1)
    return chunked_logps(
        unembed,
        hidden,
        ids,
        chunk=_chunk(unembed, hidden, logit_bytes) if logit_chunk is None else logit_chunk,
        temperature=temperature,
        allowed=allowed,
        states=None if allowed is None else batch.states,
    )


def _chunk(unembed: Callable[[Any], Any], hidden: Float[Array, "S N D"], logit_bytes: int) -> int:
    """The most tokens per sequence whose float32 logits take at most ``logit_bytes``."""
    vocabulary = jax.eval_shape(unembed, hidden).shape[-1]
    return max(1, min(hidden.shape[1], logit_bytes // (4 * vocabulary * hidden.shape[0])))


def logit_bytes_on(mesh: Mesh) -> int:
    """Float32 logits alive on all devices of ``mesh`` together: rows are split over data and fsdp, the vocabulary over tensor."""
    return mesh.size * (SPLIT_LOGIT_BYTES if mesh.shape.get("fsdp", 1) > 1 else LOGIT_BYTES)


def make_train_step(
    model_config: Any,
    optimizer: optax.GradientTransformation,
    objective: Objective,
    *,
    temperature: float,
    allowed: Int[np.ndarray, "S A"] | None,
    microbatches: int = 1,
    how: Any = None,
    logit_chunk: int | None = None,
    mesh: Mesh | None = None,
    shardings: LearnerState | None = None,
    model: Model | None = None,
    label: str = "train_step",
) -> TrainStep:
    """``step(state, batch) -> (state, sums)``, compiled once per batch shape. The passed ``state`` is deleted: keep only the returned one.

    ``temperature`` is the one the tokens were sampled at (1 for greedy), ``allowed`` the constraint's table or None. ``microbatches``
    must divide the rows. ``how`` runs the layers (``models.forward.Execution``: rematerialisation, scan, compute type, attention) and
    ``logit_chunk`` bounds the logits alive (``score_tokens``). With ``mesh`` the state leaves with ``shardings``
    (``placement.state_shardings``) and the sums replicated. ``label`` names the operations in a profiler trace.

    Sums, over trained tokens unless said otherwise: ``loss`` (count of the aggregation), ``ratio``, ``clip_fraction``,
    ``kl_behaviour`` (k3 estimate of KL(behaviour || policy), nats), ``logp_gap`` and ``ess`` (``losses.mismatch``; all three
    meaningless for ``supervised``), ``entropy`` (nats), ``advantage_abs``; per step: ``logp_gap_max`` (nats), ``grad_norm`` (final
    gradient, before clipping), ``tokens``, ``refused``. A refused step empties all of them but ``tokens`` and ``refused``, so that its
    NaNs do not spoil running totals.
    Raises ValueError when ``microbatches`` does not divide the rows (at the first call).
    """
    if (mesh is None) != (shardings is None):
        raise ValueError("give both `mesh` and `shardings`, or neither")
    if mesh is not None and any(kind != AxisType.Auto for kind in mesh.axis_types):
        raise ValueError(
            f"mesh axes {mesh.axis_names} must be of AxisType.Auto: the compiler places everything but the state and the batch"
        )
    network = _transformer() if model is None else model
    logit_bytes = LOGIT_BYTES if mesh is None else logit_bytes_on(mesh)
    table = None if allowed is None else jnp.asarray(allowed)

    def loss_of(params: Any, batch: TrainBatch, denominator: Array) -> tuple[Array, tuple[Sums, Mismatch]]:
        scores = score_tokens(
            network,
            model_config,
            params,
            batch,
            temperature=temperature,
            allowed=table,
            how=how,
            logit_chunk=logit_chunk,
            logit_bytes=logit_bytes,
        )
        token = objective.token_loss(scores.logps, batch.behaviour_logps, batch.advantages, batch.mask)
        total = aggregate(token.loss, batch.mask, objective.aggregation, normaliser=objective.normaliser)
        sums = {
            "loss": total,
            "ratio": masked_sum(token.ratio, batch.mask),
            "clip_fraction": masked_sum(token.clipped.astype(jnp.float32), batch.mask),
            "kl_behaviour": masked_sum(kl_estimate(batch.behaviour_logps, scores.logps, "k3"), batch.mask),
            "entropy": masked_sum(scores.entropy, batch.mask),
            "advantage_abs": masked_sum(jnp.abs(batch.advantages), batch.mask),
        }
        apart = mismatch(scores.logps, batch.behaviour_logps, batch.mask)
        return total.total / denominator, jax.lax.stop_gradient((sums, apart))

    @jax.named_scope(label)
    def step(state: LearnerState, batch: TrainBatch) -> tuple[LearnerState, Sums]:
        count = aggregate_count(batch.mask, objective.aggregation)
        loss, (sums, apart), grads = _accumulate(loss_of, state.params, batch, jnp.maximum(count, 1), microbatches)
        norm = optax.tree.norm(grads)
        good = jnp.isfinite(loss) & jnp.isfinite(norm) & (count > 0)
        sums |= mismatch_sums(apart) | {"grad_norm": Sum(norm, jnp.ones((), jnp.int32))}
        sums = {name: Sum(*(jnp.where(good, part, jnp.zeros_like(part)) for part in value)) for name, value in sums.items()}
        sums["tokens"] = Sum(jnp.sum(batch.mask), jnp.ones((), jnp.int32))
        sums["refused"] = Sum(1 - good.astype(jnp.int32), jnp.ones((), jnp.int32))
        return _apply(optimizer, state, grads, good), sums

    if mesh is None:
        return jax.jit(step, donate_argnums=0)
    everywhere = NamedSharding(mesh, PartitionSpec())
    return jax.jit(step, donate_argnums=0, out_shardings=(shardings, everywhere))


def _accumulate(
    loss_of: Callable[[Any, TrainBatch, Array], tuple[Array, tuple[Sums, Mismatch]]],
    params: Any,
    batch: TrainBatch,
    denominator: Array,
    microbatches: int,
) -> tuple[Array, tuple[Sums, Mismatch], Any]:
    """Loss, sums and float32 gradient of the whole batch, one micro-batch in memory at a time."""
    value_and_grad = jax.value_and_grad(loss_of, has_aux=True)
    if microbatches == 1:
        (loss, measured), grads = value_and_grad(params, batch, denominator)
        return loss, measured, jax.tree.map(lambda grad: grad.astype(jnp.float32), grads)
    rows = batch.tokens.shape[0]
    if rows % microbatches:
        raise ValueError(f"{microbatches} micro-batches do not divide {rows} rows: choose row buckets that are multiples of `microbatches`")

    def body(grads: Any, part: TrainBatch) -> tuple[Any, tuple[Array, tuple[Sums, Mismatch]]]:
        (loss, measured), new = value_and_grad(params, part, denominator)
        return jax.tree.map(lambda total, grad: total + grad.astype(jnp.float32), grads, new), (loss, measured)

    # micro-batch m takes rows m, m + M, ...: rows stay on their own data shard, where a contiguous split would move them
    # (a packed row takes its sequences along)
    def split(leaf: Array) -> Array:
        by_row = leaf.reshape(rows // microbatches, microbatches, leaf.shape[0] // rows, *leaf.shape[1:])
        return jnp.swapaxes(by_row, 0, 1).reshape(microbatches, -1, *leaf.shape[1:])

    parts = jax.tree.map(split, batch)
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), params)
    grads, (losses, (sums, apart)) = jax.lax.scan(body, zeros, parts)
    return jnp.sum(losses), (jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), sums), over_parts(apart)), grads


def _apply(optimizer: optax.GradientTransformation, state: LearnerState, grads: Any, good: Array) -> LearnerState:
    """The next state; where ``good`` is False every parameter and moment keeps its old value."""
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    params, opt_state = jax.tree.map(lambda new, old: jnp.where(good, new, old), (params, opt_state), (state.params, state.opt_state))
    refused = 1 - good.astype(jnp.int32)
    return LearnerState(params, opt_state, state.step + 1 - refused, state.skipped + refused, (state.skipped_in_row + 1) * refused)


def _transformer() -> Model:
    from crl_jax.models import transformer  # here, so that a caller with its own model does not load the default one

    return transformer
