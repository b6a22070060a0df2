"""The slot engine as a JetStream engine: ``engine_api.Engine`` of google-jetstream 0.2.2, plus what reinforcement learning needs.

Owns: the mapping between JetStream's calls and the slot engine's programs. JetStream has ``prefill`` (one prompt to a prefix),
``insert`` (a prefix into a slot) and ``generate`` (the next token of every slot). Added here: ``extend`` (append new turns to slots in
place, batched), several exact steps per ``generate``, and per token its log-probability and constraint state, as further columns of
``ResultTokens.data``.
Promises: all of them change the same decode state, so they may be mixed. A prefix is a decode state with one slot whose last prompt
token is not in the cache yet; the first ``generate`` after ``insert`` therefore samples the first new token.
Does not: use JetStream's Driver, which kills the whole process on any error in its threads; ``EngineSampler`` drives this class instead.
The Driver does work on it, in a process of its own.

Importing this module imports JetStream: import it where it is wanted, not at the top of other modules.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from flax import struct
from jax.sharding import Mesh

from crl_jax.models import transformer
from crl_jax.records import SamplingParams
from crl_jax.serving import programs
from crl_jax.serving.engine import Emitted, Row, SlotEngine, bucket, read_result
from crl_jax.serving.jetstream_import import import_jetstream

engine_api: Any = import_jetstream()
_PREFILL_LENGTHS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)  # what JetStream 0.2.2 pads prompts to


@struct.dataclass
class SampledTokens(engine_api.ResultTokens):  # type: ignore[misc]
    """``ResultTokens`` with more columns: bits of the two float32 log-probs, then the constraint states, one of each per token.

    The tokens of a slot in one dispatch take the place of JetStream's speculative tokens: the valid ones come first. ``rows`` are the
    requested rows.
    """

    rows: tuple[int, ...] = struct.field(pytree_node=False, default=())

    def convert_to_numpy(self) -> SampledTokens:
        return self.replace(data=np.asarray(self.data))

    def fetch(self) -> list[Emitted]:
        """One ``Emitted`` per requested row."""
        return read_result(np.asarray(self.data), self.rows)


class JetStreamEngine(SlotEngine, engine_api.Engine):  # type: ignore[misc]
    """See the module. ``defaults`` are the sampling parameters of sequences that come through ``insert`` (JetStream has none per request);
    ``tokenizer`` is an object with JetStream's tokenizer methods, needed by its Driver only."""

    def __init__(
        self,
        config: transformer.ModelConfig,
        *,
        max_slots: int,
        max_length: int,
        defaults: SamplingParams | None = None,
        tokenizer: Any = None,
        mesh: Mesh | None = None,
        **options: Any,
    ) -> None:
        super().__init__(config, max_slots=max_slots, max_length=max_length, mesh=mesh, **options)
        self.defaults = defaults or SamplingParams(max_new_tokens=max_length, temperature=0.0)
        self._tokenizer = tokenizer
        self._jetstream_mesh = mesh or Mesh(np.array(jax.local_devices()[:1]), ("tensor",))

    # ------------------------------------------------------------------------------------------------ JetStream's interface

    def load_params(self, params: Any) -> Any:
        """The parameters themselves: they are made elsewhere and passed to every call."""
        return params

    def prefill(
        self, *, params: Any, existing_prefix: programs.DecodeState | None = None, padded_tokens: jax.Array, true_length: int
    ) -> programs.DecodeState:
        """The prefix of ``padded_tokens[:true_length]``, after ``existing_prefix`` if given (which is left intact).

        Raises ValueError when it leaves no room for one token, or the engine splits its rows over replicas.
        """
        if self.split_rows:
            raise ValueError("one prompt cannot be split over replicas: prefill on an engine built with split_rows=False")
        tokens = np.asarray(padded_tokens).reshape(-1)[:true_length].tolist()
        if existing_prefix is None:
            prefix, start = programs.init_state(self._program, 1, self.max_length), 0
        else:
            prefix = jax.tree.map(jax.numpy.copy, existing_prefix)
            start = int(prefix.slots.length[0])
            tokens = [int(prefix.slots.last[0]), *tokens]
        end = start + len(tokens)
        if not tokens or end >= self.max_length:
            raise ValueError(f"a prompt of {end} tokens must have at least 1 and leave room within max_length={self.max_length}")
        largest = self.chunk_buckets[-1]
        for at in range(0, len(tokens) - 1, largest):
            chunk = tokens[at : min(at + largest, len(tokens) - 1)]
            prefix = self._append(params, prefix, chunk, start + at)
        return prefix._replace(slots=self._ready(end - 1, tokens[-1], self.max_length - end))

    def insert(self, prefix: programs.DecodeState, decode_state: programs.DecodeState, slot: int) -> programs.DecodeState:
        """The state with ``prefix`` in ``slot``; donates ``decode_state``."""
        return programs.insert(self._program, prefix, decode_state, np.int32(slot))

    def generate(
        self, params: Any, decode_state: programs.DecodeState, slots: Sequence[int] | None = None, steps: int = 1
    ) -> tuple[programs.DecodeState, SampledTokens]:
        """JetStream's call (all slots, one token), and with ``slots`` and ``steps`` the slot engine's."""
        return super().generate(params, decode_state, slots, steps)

    def get_prefix_destination_sharding(self) -> Any:
        """Where a prefix goes when prefill and generate run apart: this engine's own placement."""
        if self._program.cache_sharding is None:
            return jax.sharding.SingleDeviceSharding(self._jetstream_mesh.devices.flat[0])
        return jax.sharding.NamedSharding(self._jetstream_mesh, jax.sharding.PartitionSpec())

    def get_tokenizer(self) -> Any:
        """JetStream's tokenizer metadata. It names no file: ``build_tokenizer`` returns the object given at construction."""
        return import_jetstream("jetstream.engine.tokenizer_pb2").TokenizerParameters(path="", extra_ids=0)

    def build_tokenizer(self, metadata: Any) -> Any:
        if self._tokenizer is None:
            raise ValueError("JetStreamEngine was built without a tokenizer: pass tokenizer=... to use it with JetStream's Driver")
        return self._tokenizer

    @property
    def max_concurrent_decodes(self) -> int:
        return self.max_slots

    @property
    def samples_per_slot(self) -> int:
        return 1

    @property
    def max_prefill_length(self) -> int:
        """The largest of JetStream's padded lengths within ``max_length``."""
        return max((n for n in _PREFILL_LENGTHS if n <= self.max_length), default=self.max_length)

    @property
    def mesh(self) -> Mesh:
        return self._jetstream_mesh

    @property
    def colocated_cpus(self) -> list[Any] | None:
        return None

    # ------------------------------------------------------------------------------------------------ mapping

    def _result(self, data: jax.Array, order: tuple[int, ...]) -> SampledTokens:
        k = data.shape[1] // programs.PER_TOKEN
        return SampledTokens(data, (0, k), (k, 2 * k), (2 * k, 2 * k + 1), 1, order)

    def _append(self, params: Any, prefix: programs.DecodeState, tokens: list[int], start: int) -> programs.DecodeState:
        """Writes tokens into the single slot of ``prefix``."""
        begin = programs.row_columns(self._program)
        packed = np.zeros((1, begin + bucket(len(tokens), self.chunk_buckets)), np.int32)
        packed[0, 1:3] = start, len(tokens)
        packed[0, begin : begin + len(tokens)] = tokens
        return programs.extend(self._program, params, prefix, packed, True)

    def _ready(self, length: int, last: int, room: int) -> programs.SlotFields:
        """The fields of one slot that is to sample with the defaults after ``last``."""
        budget = min(self.defaults.max_new_tokens, room)
        row = Row(0, length, [], last, budget, self.defaults, state=self.first_state(self.defaults))
        packed, order = self.pack([row], 0)
        return programs.unpack_rows(self._program, jax.numpy.asarray(packed[order[0]][None]))[2]
