"""What one model's training carries from step to step.

Owns: the state, its host copy, and the rule that stops a run which cannot make progress.
Promises: ``step`` counts applied updates and ``skipped`` refused ones, so attempts = step + skipped; a host copy shares no memory
with the state.
Does not: save files.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Int

from crl_jax.errors import UserError


class LearnerState(NamedTuple):
    """``params`` and ``opt_state`` are nested dicts / optax states of arrays; the counters are int32 scalars."""

    params: Any
    opt_state: Any
    step: Int[Array, ""]  # applied updates
    skipped: Int[Array, ""]  # refused updates: non-finite loss or gradient, or nothing to train on
    skipped_in_row: Int[Array, ""]  # refused since the last applied one


def init_state(params: Any, optimizer: optax.GradientTransformation) -> LearnerState:
    """A fresh state. The train step donates it: afterwards ``params`` here is deleted too, so pass a copy if you need the original."""
    return LearnerState(params, optimizer.init(params), *(jnp.zeros((), jnp.int32) for _ in range(3)))


def to_host(state: LearnerState) -> LearnerState:
    """The same values as NumPy arrays that own their memory: a thread may save them while later steps reuse the device buffers."""
    return jax.tree.map(lambda leaf: np.array(leaf, copy=True), jax.device_get(state))


class TrainingDiverged(UserError, RuntimeError):
    """Too many updates in a row were refused."""


def require_progress(state: LearnerState, *, limit: int) -> None:
    """Raises TrainingDiverged once ``limit`` updates in a row were refused. Waits for the step to finish (it reads the counter)."""
    in_row = int(state.skipped_in_row)
    if in_row >= limit:
        raise TrainingDiverged(
            f"{in_row} updates in a row were refused after step {int(state.step)} (non-finite loss or gradient, or no trained token): "
            "resume from an earlier checkpoint with a lower learning rate, or look at the advantages and log-probs of the last batches"
        )
