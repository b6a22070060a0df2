"""One of the two models of a run: its learner, its sampler, and the version that ties them together.

Owns: the train state, the compiled step, publishing. Promises: ``version`` grows by one with every applied publish and never otherwise;
the sampler's weights are a copy, so a donated train step cannot delete them. Does not: decide when to learn or what from.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Int

from crl_jax.learner.batching import to_batch
from crl_jax.learner.objective import Objective
from crl_jax.learner.placement import place_batch, state_shardings
from crl_jax.learner.state import LearnerState, init_state, require_progress
from crl_jax.learner.step import Sums, make_train_step
from crl_jax.records import TrainSample
from crl_jax.serving.sampler import Sampler
from crl_jax.sharding.mesh import DATA, FSDP
from crl_jax.sharding.rules import param_shardings

REFUSED_LIMIT = 5  # updates refused in a row before the run stops


@dataclasses.dataclass(frozen=True)
class Buckets:
    """The batch shapes a role compiles: rows, sequence lengths (tokens) and trained tokens per row."""

    rows: tuple[int, ...]
    lengths: tuple[int, ...]
    tokens: tuple[int, ...]

    @staticmethod
    def of(*, rows: int, max_length: int, max_tokens: int) -> Buckets:
        """One row bucket; lengths at a half, three quarters and all of ``max_length``; trained tokens by powers of two from 16."""
        lengths = sorted({-(-max_length * part // 4 // 8) * 8 for part in (2, 3)} | {max_length})
        tokens = [16]
        while tokens[-1] < min(max_tokens, max_length):
            tokens.append(tokens[-1] * 2)
        return Buckets((rows,), tuple(lengths), tuple(tokens))


class Role:
    """A learner and its sampler. Single-threaded except for the sampler, which serves any thread."""

    def __init__(
        self,
        name: str,
        *,
        model_config: Any,
        params: Any,
        optimizer: optax.GradientTransformation,
        objective: Objective,
        sampler: Sampler,
        buckets: Buckets,
        temperature: float,
        allowed: Int[np.ndarray, "S A"] | None,
        mesh: jax.sharding.Mesh,
        microbatches: int = 1,
        remat: bool = False,
    ) -> None:
        self.name, self.model_config, self.sampler, self.buckets, self.mesh, self.version = name, model_config, sampler, buckets, mesh, 0
        shardings = param_shardings(model_config, mesh)
        self._copy = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))
        state = init_state(
            self._copy(jax.device_put(params, shardings)), optimizer
        )  # the step donates its state; the sampler keeps ``params``
        self.shardings = state_shardings(state, optimizer, shardings, mesh)
        self.state: LearnerState = jax.device_put(state, self.shardings)
        self._step = make_train_step(
            model_config,
            optimizer,
            objective,
            temperature=temperature or 1.0,
            allowed=allowed,
            microbatches=microbatches,
            remat=remat,
            mesh=mesh,
            shardings=self.shardings,
        )

    def update(self, samples: Sequence[TrainSample]) -> Sums:
        """One optimiser step on ``samples``. Raises TrainingDiverged after too many refused steps in a row."""
        buckets = self.buckets
        batch = to_batch(samples, row_buckets=buckets.rows, length_buckets=buckets.lengths, token_buckets=buckets.tokens)
        self.state, sums = self._step(self.state, place_batch(batch, self.mesh, (DATA, FSDP)))
        sums = jax.device_get(sums)
        require_progress(self.state, limit=REFUSED_LIMIT)
        return sums

    def publish(self) -> None:
        """Hand the current weights to the sampler as the next version."""
        self.version += 1
        self.sampler.publish(self._copy(self.state.params), self.version)

    def restore(self, state: LearnerState, version: int) -> None:
        """Continue from a saved state and serve its weights under the saved version."""
        self.state, self.version = jax.device_put(state, self.shardings), version
        self.sampler.publish(self._copy(self.state.params), version)
