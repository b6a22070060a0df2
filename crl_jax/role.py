"""One of the two models of a run: its learner, its sampler, and the version that ties them together.

Owns: the train state, the compiled step, publishing. Promises: ``version`` grows by one with every applied publish and never otherwise;
the sampler's weights are a copy, so a donated train step cannot delete them; the processes of a job, each with samples of its own, make
one update together, that of all samples in one process. Does not: decide when to learn or what from.
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

from crl_jax.learner.batching import empty_batch, to_batch
from crl_jax.learner.lora import make_lora_step
from crl_jax.learner.objective import Objective
from crl_jax.learner.packing import pack_batch
from crl_jax.learner.placement import first_state, place_batch, put, state_shardings
from crl_jax.learner.state import LearnerState, init_state, require_progress
from crl_jax.learner.step import Sums, make_train_step
from crl_jax.models.forward import Execution
from crl_jax.models.lora import Lora, init_adapters
from crl_jax.processes import Processes
from crl_jax.records import TrainBatch, TrainSample
from crl_jax.scopes import scope
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

    @staticmethod
    def joint(several: Sequence[Buckets]) -> Buckets:
        """The one shape that holds every batch whose own shape is one of ``several`` (`exactly`)."""
        each = [[getattr(one, field.name) for one in several] for field in dataclasses.fields(Buckets)]
        return Buckets(*(max(values) for values in each))

    def exactly(self, batch: TrainBatch) -> Buckets:
        """The shape of ``batch``, alone."""
        (rows, length), (sequences, tokens) = batch.tokens.shape, batch.mask.shape
        return Buckets((rows,), (length,), (tokens,), (sequences // rows,) if self.sequences else (), self.share_prefixes)

    def batch(self, samples: Sequence[TrainSample]) -> TrainBatch:
        """The smallest batch that holds ``samples``; of no samples the smallest there is, all padding. Raises ValueError when none does."""
        if not samples:
            return self._padding()
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

    def _padding(self) -> TrainBatch:
        rows, length, tokens = min(self.rows), min(self.lengths), min(self.tokens)
        if not self.sequences:
            return empty_batch(rows, length, rows, tokens)
        sequences, nothing = rows * min(self.sequences), np.full((rows, length), -1, np.int32)
        source = np.zeros((sequences, tokens), np.int32)
        packed = empty_batch(rows, length, sequences, tokens)._replace(source_index=source, segments=nothing)
        return packed._replace(prefixes=nothing.copy()) if self.share_prefixes else packed


class Role:
    """A learner and its sampler. Single-threaded except for the sampler, which serves any thread.

    With ``lora`` the state holds adapters only and ``base`` the frozen weights, which another role may share; adapters are published and
    merged on the serving side. ``serving``: how the sampler wants its weights (None: float32 where the learner has them). ``checksum``:
    whether each publish is compared with what the learner holds. ``published`` is the newest publish. ``processes``: those of the job;
    all of them update, publish and restore together.
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
        processes: Processes | None = None,
    ) -> None:
        self.name, self.model_config, self.sampler, self.buckets, self.mesh, self.version = name, model_config, sampler, buckets, mesh, 0
        shardings = param_shardings(model_config, mesh)
        self._processes = processes or Processes.alone()
        base = put(params, shardings)
        serving, meet = serving or Serving(mesh), self._processes.meet if self._processes.count > 1 else None
        if lora is None:
            trained = make_copy(jnp.float32)(base)  # the step donates its state; the sampler keeps ``params``
            self.publisher = Publisher.of_weights(sampler, model_config, mesh, serving, checksum=checksum, meet=meet)
        else:
            trained = init_adapters(base, lora, jax.random.key(adapter_seed))
            shardings = adapter_shardings(trained, mesh)
            parts: dict[str, Any] = {"lora": lora, "base": base, "adapters": trained, "checksum": checksum, "meet": meet}
            self.publisher = Publisher.of_adapters(sampler, model_config, mesh, serving, **parts)
        self.base, self.published = None if lora is None else base, Published(0, 0, {}, "")
        state = jax.eval_shape(functools.partial(init_state, optimizer=optimizer), trained)
        self.shardings = state_shardings(state, optimizer, shardings, mesh)
        self.state: LearnerState = first_state(trained, optimizer, self.shardings)
        options: dict[str, Any] = {
            "temperature": temperature or 1.0,
            "allowed": allowed,
            "microbatches": microbatches,
            "how": how,
            "mesh": mesh,
            "shardings": self.shardings,
            "label": f"{name}_step",
        }
        self._given: tuple[Any, ...] = () if lora is None else (base,)
        self._step: Any = (
            make_train_step(model_config, optimizer, objective, **options)
            if lora is None
            else make_lora_step(model_config, optimizer, objective, lora, **options)
        )
        self._programs: dict[Buckets, Any] = {}

    def update(self, samples: Sequence[TrainSample]) -> Sums:
        """One optimiser step on ``samples``, and those of the job's other processes: a process may have none, not all of them.

        Raises TrainingDiverged after too many refused steps in a row.
        """
        with scope(f"{self.name}_step"):
            mine = self._batch(samples)
            batch = place_batch(mine, self.mesh, (DATA, FSDP))
            self.state, sums = self._program(self.buckets.exactly(mine), batch)(*self._given, self.state, batch)
            sums = jax.device_get(sums)
        require_progress(self.state, limit=REFUSED_LIMIT)
        return sums

    def publish(self) -> None:
        """Hand the current weights to the sampler as the next version."""
        with scope("publish", self.name):
            self.published = self.publisher.publish(self.state.params, self.version + 1)
        self.version += 1

    def restore(self, state: LearnerState, version: int) -> None:
        """Continue from a saved state and serve its weights under the saved version."""
        self.state, self.version = put(state, self.shardings), version
        brought = self.publisher.publish(self.state.params, version)
        if version:  # before the first publish of a run its record is empty, also in a process that resumes there
            self.published = brought

    def _program(self, shape: Buckets, batch: TrainBatch) -> Any:
        """The compiled step. Several processes wait until each has compiled it: what they compute together does not wait that long."""
        if self._processes.count == 1:
            return self._step
        if shape not in self._programs:
            self._programs[shape] = self._step.lower(*self._given, self.state, batch).compile()
            self._processes.meet(f"the {self.name}'s compiled step")
        return self._programs[shape]

    def _batch(self, samples: Sequence[TrainSample]) -> TrainBatch:
        """This process's rows, in the shape that holds every process's."""
        batch = self.buckets.batch(samples)
        if self._processes.count == 1:
            return batch
        mine = self.buckets.exactly(batch)
        shapes = self._processes.gather(dataclasses.astuple(mine), f"the {self.name}'s batch")
        shape = Buckets.joint([Buckets(tuple(r), tuple(t), tuple(n), tuple(p), share) for r, t, n, p, share in shapes])
        return batch if shape == mine else shape.batch(samples)
