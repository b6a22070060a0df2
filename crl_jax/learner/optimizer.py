"""AdamW with a learning-rate schedule and global-norm clipping.

Owns: the schedule and the gradient transformation. Promises: moments are float32 whatever the parameter dtype, so their dtypes never
change; the schedule is as long as the run that asked for it; a refused step does not advance it. Does not: read configuration.
"""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

ScheduleKind = Literal["constant", "linear", "cosine"]


def make_schedule(kind: ScheduleKind, peak: float, *, steps: int, warmup_steps: int = 0) -> optax.Schedule:
    """Learning rate of update n (from 0): linear warm-up that reaches ``peak`` at n = ``warmup_steps``, then ``kind`` to n = ``steps``.

    ``linear`` and ``cosine`` fall to 0 at ``steps``, the number of updates of this run. Raises ValueError unless 0 <= warmup_steps < steps.
    """
    if not 0 <= warmup_steps < steps:
        raise ValueError(f"warmup_steps {warmup_steps} must be at least 0 and below the run's {steps} steps")
    body: optax.Schedule
    if kind == "constant":
        body = optax.constant_schedule(peak)
    elif kind == "linear":
        body = optax.linear_schedule(peak, 0.0, steps - warmup_steps)
    else:
        body = optax.cosine_decay_schedule(peak, steps - warmup_steps)
    if warmup_steps == 0:
        return body
    return optax.join_schedules([optax.linear_schedule(0.0, peak, warmup_steps), body], [warmup_steps])


def make_optimizer(
    schedule: optax.Schedule | float,
    *,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    clip_norm: float = 1.0,
) -> optax.GradientTransformation:
    """Clip the global norm of the gradient to ``clip_norm`` (0 = off), then AdamW. Vectors (norm scales, biases) are not decayed."""
    adamw = optax.adamw(schedule, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay, mask=_matrices)
    clip = optax.clip_by_global_norm(clip_norm) if clip_norm > 0 else optax.identity()
    return _in_float32(optax.chain(clip, adamw))


def _matrices(params: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


def _in_float32(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """``inner`` seeing float32 only: the moments of half-precision parameters would change dtype at the first float32 gradient."""

    def cast(tree: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), tree)

    def init(params: Any) -> optax.OptState:
        return inner.init(cast(params))

    def update(updates: Any, state: optax.OptState, params: Any = None) -> tuple[Any, optax.OptState]:
        return inner.update(cast(updates), state, cast(params))

    return optax.GradientTransformation(init, update)
