"""One of the two models of a run: its learner, its sampler, and the version that ties them together.

Owns: the train state, the compiled step, publishing. Promises: ``version`` grows by one with every applied publish and never otherwise;
the sampler's weights are a copy, so a donated train step cannot delete them. Does not: decide when to learn or what from.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Int

from crl_jax.learner.batching import to_batch
from crl_jax.learner.lora import make_lora_step
from crl_jax.learner.objective import Objective
from crl_jax.learner.packing import pack_batch
from crl_jax.learner.placement import place_batch, state_shardings
from crl_jax.learner.state import LearnerState, init_state, require_progress
from crl_jax.learner.step import Sums, make_train_step
from crl_jax.models.forward import Execution
from crl_jax.models.lora import Lora, init_adapters
from crl_jax.records import TrainBatch, TrainSample
from crl_jax.serving.publisher import Published, Publisher, Serving
from crl_jax.serving.sampler import Sampler
from crl_jax.sharding.adapters import adapter_shardings
from crl_jax.sharding.mesh import DATA, FSDP
from crl_jax.sharding.reshard import make_copy
from crl_jax.sharding.rules import param_shardings

Packing = Literal["padded", "sequences", "prefixes"]

REFUSED_LIMIT = 5  # updates refused in a row before the run stops


@dataclasses.dataclass(frozen=True)
class Buckets:
    """The batch shapes a role compiles: rows, sequence lengths (tokens) and trained tokens per sequence.

    ``sequences``: how many sequences a packed row may hold; empty when rows are not packed.
    """

    rows: tuple[int, ...]
    lengths: tuple[int, ...]
    tokens: tuple[int, ...]
    sequences: tuple[int, ...] = ()
    share_prefixes: bool = False

    @staticmethod
    def of(*, rows: int, max_length: int, max_tokens: int, packing: Packing = "padded", row_length: int = 0, multiple: int = 1) -> Buckets:
        """Shapes for batches of ``rows`` samples.

        Unpacked: one row bucket; lengths at a half, three quarters and all of ``max_length``. Packed: rows of ``row_length`` tokens (0:
        ``max_length``), their number by doubling from ``multiple`` (micro-batches times data shards), 4, 16 or ``rows`` sequences each.
        Trained tokens by powers of two from 16.
        """
        tokens = [16]
        while tokens[-1] < min(max_tokens, max_length):
            tokens.append(tokens[-1] * 2)
        if packing == "padded":
            lengths = sorted({-(-max_length * part // 4 // 8) * 8 for part in (2, 3)} | {max_length})
            return Buckets((rows,), tuple(lengths), tuple(tokens))
        counts = [multiple]
        while counts[-1] < rows:
            counts.append(counts[-1] * 2)
        sequences = sorted({min(size, rows) for size in (4, 16, rows)})
        return Buckets(tuple(counts), (row_length or max_length,), tuple(tokens), tuple(sequences), packing == "prefixes")

    def batch(self, samples: Sequence[TrainSample]) -> TrainBatch:
        """The smallest batch that holds ``samples``. Raises ValueError when none does."""
        if not self.sequences:
            return to_batch(samples, row_buckets=self.rows, length_buckets=self.lengths, token_buckets=self.tokens)
        return pack_batch(
            samples,
            row_buckets=self.rows,
            length_buckets=self.lengths,
            sequence_buckets=self.sequences,
            token_buckets=self.tokens,
            share_prefixes=self.share_prefixes,
        )


class Role:
    """A learner and its sampler. Single-threaded except for the sampler, which serves any thread.

    With ``lora`` the state holds adapters only and ``base`` the frozen weights, which another role may share; adapters are published and
    merged on the serving side. ``serving``: how the sampler wants its weights (None: float32 where the learner has them). ``checksum``:
    whether each publish is compared with what the learner holds. ``published`` is the newest publish.
    """

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
        how: Execution | None = None,
        serving: Serving | None = None,
        checksum: bool = True,
        lora: Lora | None = None,
        adapter_seed: int = 0,
    ) -> None:
        self.name, self.model_config, self.sampler, self.buckets, self.mesh, self.version = name, model_config, sampler, buckets, mesh, 0
        shardings = param_shardings(model_config, mesh)
        base = jax.device_put(params, shardings)
        serving = serving or Serving(mesh)
        if lora is None:
            trained = make_copy(jnp.float32)(base)  # the step donates its state; the sampler keeps ``params``
            self.publisher = Publisher.of_weights(sampler, model_config, mesh, serving, checksum=checksum)
        else:
            trained = init_adapters(base, lora, jax.random.key(adapter_seed))
            shardings = adapter_shardings(trained, mesh)
            parts: dict[str, Any] = {"lora": lora, "base": base, "adapters": trained, "checksum": checksum}
            self.publisher = Publisher.of_adapters(sampler, model_config, mesh, serving, **parts)
        self.base, self.published = None if lora is None else base, Published(0, 0, {}, "")
        state = init_state(trained, optimizer)
        self.shardings = state_shardings(state, optimizer, shardings, mesh)
        self.state: LearnerState = jax.device_put(state, self.shardings)
        options: dict[str, Any] = {
            "temperature": temperature or 1.0,
            "allowed": allowed,
            "microbatches": microbatches,
            "how": how,
            "mesh": mesh,
            "shardings": self.shardings,
        }
        if lora is None:
            self._step = make_train_step(model_config, optimizer, objective, **options)
        else:
            self._step = functools.partial(make_lora_step(model_config, optimizer, objective, lora, **options), base)

    def update(self, samples: Sequence[TrainSample]) -> Sums:
        """One optimiser step on ``samples``. Raises TrainingDiverged after too many refused steps in a row."""
        self.state, sums = self._step(self.state, place_batch(self.buckets.batch(samples), self.mesh, (DATA, FSDP)))
        sums = jax.device_get(sums)
        require_progress(self.state, limit=REFUSED_LIMIT)
        return sums

    def publish(self) -> None:
        """Hand the current weights to the sampler as the next version."""
        self.published = self.publisher.publish(self.state.params, self.version + 1)
        self.version += 1

    def restore(self, state: LearnerState, version: int) -> None:
        """Continue from a saved state and serve its weights under the saved version."""
        self.state, self.version = jax.device_put(state, self.shardings), version
        brought = self.publisher.publish(self.state.params, version)
        if version:  # before the first publish of a run its record is empty, also in a process that resumes there
            self.published = brought
