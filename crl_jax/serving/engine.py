"""The slot engine: turns lists of rows into padded dispatches of the compiled programs.

Owns: batch shapes (row and chunk buckets), packing, and reading results back.
Promises: one small array in and one out per dispatch; results are fetched only when asked (``fetch``), so several dispatches can be
queued; engines with the same model and shapes share compiled programs.
Does not: know sessions or versions (see scheduler), nor JetStream (see jetstream_engine, which puts this engine behind that interface).
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Int

from crl_jax.models import transformer
from crl_jax.models.cache import Layout
from crl_jax.records import SamplingParams
from crl_jax.serving import programs
from crl_jax.serving.constraint import ROOT, UNCONSTRAINED, ActionTrie
from crl_jax.serving.limits import Limits
from crl_jax.serving.stop_strings import StopTable


@dataclasses.dataclass(frozen=True)
class Row:
    """Tokens to append to one slot, and how to go on from there. ``start`` tokens of it are in the cache already; ``last`` is the token to
    feed after ``tokens``; ``budget`` 0 means that more input follows, so nothing is sampled.

    ``counter`` is the number of tokens already sampled for this request, ``state`` the constraint state to sample in (0 = unconstrained)
    and ``text`` the state of its stop strings (0 = none). Of ``params.seed`` the low 31 bits are used.
    """

    slot: int
    start: int
    tokens: Sequence[int]
    last: int
    budget: int
    params: SamplingParams
    counter: int = 0
    state: int = UNCONSTRAINED
    text: int = 0


class Emitted(NamedTuple):
    """What one row sampled in one dispatch; four lists of equal length (possibly empty)."""

    ids: list[int]
    logps: list[float]
    sampling_logps: list[float]
    states: list[int]


@dataclasses.dataclass(frozen=True)
class Result:
    """A dispatch's output on the device. ``rows[i]`` is the row of ``data`` that belongs to the i-th requested row."""

    data: Any  # int32 [R, 5K+1], see programs.pack_result
    rows: tuple[int, ...]

    def fetch(self) -> list[Emitted]:
        """Waits for the dispatch and copies its one array to the host."""
        return read_result(np.asarray(self.data), self.rows)


def read_result(data: Int[np.ndarray, "R W"], rows: Sequence[int]) -> list[Emitted]:
    """The tokens of ``rows``, from the layout of ``programs.pack_result``."""
    k = data.shape[1] // programs.PER_TOKEN
    counts = data[:, k : 2 * k].sum(axis=1).tolist()
    ids, states = data[:, :k].tolist(), data[:, -k:].tolist()
    logps, sampling_logps = (np.ascontiguousarray(data[:, i : i + k]).view(np.float32).tolist() for i in (2 * k + 1, 3 * k + 1))
    return [Emitted(*(column[r][: counts[r]] for column in (ids, logps, sampling_logps, states))) for r in rows]


class SlotEngine:
    """``max_slots`` sequences of up to ``max_length`` tokens each.

    ``max_steps`` is the most tokens per slot in one ``generate`` dispatch; ``prefill_tokens`` the tokens of input, padding counted, that
    are computed between two of them (None: one full dispatch); ``cache_dtype`` the type of the cached keys and values and ``cache_layout``
    their arrangement (None: the fastest on these devices). ``pieces``, the bytes of each token (``models.pieces``), make stop strings
    possible, with ``stop_states`` states for all those in use at a time. With a mesh the cache is split over its ``tensor`` axis by kv
    heads (replicated when there is no such axis); the parameters are used as they are placed. ``split_rows`` splits the slots over the
    other axes (``sharding.reshard.serving_mesh``): each replica then computes its own slots only. Every dispatch is over all slots then,
    whatever ``row_buckets`` says: gathering some would move their caches between devices.
    """

    def __init__(
        self,
        config: transformer.ModelConfig,
        *,
        max_slots: int,
        max_length: int,
        trie: ActionTrie | None = None,
        row_buckets: Sequence[int] = (8, 32),
        chunk_buckets: Sequence[int] = (4, 12, 24, 48, 96, 192),
        max_steps: int = 8,
        max_stop_ids: int = 4,
        max_forbidden_ids: int = 8,
        pieces: Sequence[bytes] | None = None,
        stop_states: int = 64,
        prefill_tokens: int | None = None,
        mesh: Mesh | None = None,
        split_rows: bool = False,
        cache_dtype: Any = jnp.float32,
        cache_layout: Layout | None = None,
    ) -> None:
        if max_slots < 1 or max_length < 2:
            raise ValueError(f"max_slots={max_slots} must be >= 1 and max_length={max_length} >= 2")
        self.config = config
        self.max_slots = max_slots
        self.max_length = max_length
        self.max_steps = max_steps
        self.max_stop_ids = max_stop_ids
        self.trie = trie
        self.split_rows = split_rows
        self.row_buckets = (*sorted(b for b in row_buckets if b < max_slots and not split_rows), max_slots)
        self.chunk_buckets = tuple(sorted({min(c, max_length) for c in chunk_buckets}))
        self._mesh = mesh
        self.prefill_tokens = prefill_tokens or self.row_buckets[-1] * self.chunk_buckets[-1]
        self.stops = None if pieces is None else StopTable(_for_rows(pieces, config.vocab_size), stop_states)
        layout = cache_layout or _best_layout(mesh)
        self._program = programs.Program(
            config,
            _cache_sharding(config, mesh, max_slots if split_rows else 0, layout),
            max_stop_ids,
            max_forbidden_ids,
            cache_dtype,
            layout,
        )
        trie_tables = () if trie is None else (jnp.asarray(trie.allowed), jnp.asarray(trie.next_state))
        self._tables = programs.Tables(*trie_tables)
        self._stops_version = -1

    @property
    def program(self) -> programs.Program:
        """What is static in the engine's compiled programs."""
        return self._program

    def limits(self, host_bytes: int = 0) -> Limits:
        """What the scheduler must know, with ``host_bytes`` of room for cache rows on the host."""
        c, itemsize = self.config, jnp.dtype(self._program.cache_dtype).itemsize
        per_token = 2 * c.n_layers * c.n_kv_heads * c.head_dim * itemsize
        return Limits(
            self.max_slots,
            self.max_length,
            self.max_stop_ids,
            c.vocab_size,
            self._program.max_forbidden_ids,
            self.row_buckets,
            self.chunk_buckets,
            self.prefill_tokens,
            host_tokens=host_bytes // per_token,
        )

    def init_decode_state(self) -> programs.DecodeState:
        """A state with empty slots."""
        return programs.init_state(self._program, self.max_slots, self.max_length)

    def extend(self, params: Any, decode_state: programs.DecodeState, rows: Sequence[Row]) -> programs.DecodeState:
        """Appends each row's tokens to its slot. Each slot at most once; tokens at most the largest chunk. Donates ``decode_state``."""
        packed, _ = self.pack(rows, bucket(max(len(r.tokens) for r in rows), self.chunk_buckets))
        return programs.extend(self._program, params, decode_state, packed, packed.shape[0] == self.max_slots)

    def fork(self, decode_state: programs.DecodeState, sources: Sequence[int], rows: Sequence[Row]) -> programs.DecodeState:
        """Gives each row's slot the first ``start`` cached tokens of its source slot, which may be itself. Rows have no tokens. Donates
        ``decode_state``.
        """
        packed, order = self.pack(rows, 0)
        source = np.zeros(packed.shape[0], np.int32)
        source[list(order)] = list(sources)
        return programs.fork(self._program, decode_state, source, packed)

    def save(self, decode_state: programs.DecodeState, slot: int, length: int) -> transformer.KVCache:
        """A copy of the first ``length`` positions of ``slot`` (all of them if it has fewer), on its way to the host: see ``host_row``."""
        row = programs.save(decode_state, np.int32(slot), min(self.max_length, length))
        jax.tree.map(lambda x: x.copy_to_host_async(), row)
        return row

    def load(self, decode_state: programs.DecodeState, slot: int, row: transformer.KVCache) -> programs.DecodeState:
        """The state with ``row`` (of ``save``) in the cache of ``slot``. Donates ``decode_state``."""
        return programs.load(self._program, decode_state, np.int32(slot), row)

    def generate(
        self, params: Any, decode_state: programs.DecodeState, slots: Sequence[int] | None = None, steps: int = 1
    ) -> tuple[programs.DecodeState, Any]:
        """Samples up to ``steps`` tokens for each of ``slots`` (None: all). Donates ``decode_state``."""
        if not 1 <= steps <= self.max_steps:
            raise ValueError(f"steps={steps} is not in 1..max_steps={self.max_steps}")
        wanted = range(self.max_slots) if slots is None else slots
        size = bucket(len(wanted), self.row_buckets)
        dense = size == self.max_slots
        order = tuple(wanted) if dense else tuple(range(len(wanted)))
        index = np.full(size, self.max_slots, np.int32)
        index[list(order)] = list(wanted)
        width = 1 if slots is None and steps == 1 else self.max_steps
        if self.stops is not None and self._stops_version != self.stops.version:
            self._tables = self._tables._replace(text=jnp.asarray(self.stops.table))
            self._stops_version = self.stops.version
        state, data = programs.generate(self._program, params, decode_state, self._tables, index, np.int32(steps), width, dense)
        return state, self._result(data, order)

    def pack(self, rows: Sequence[Row], chunk: int) -> tuple[Int[np.ndarray, "R W"], tuple[int, ...]]:
        """The padded int32 batch of ``rows`` (columns of ``programs.unpack_rows``), ``chunk`` tokens wide, and where each row went."""
        size = bucket(len(rows), self.row_buckets)
        order = tuple(r.slot for r in rows) if size == self.max_slots else tuple(range(len(rows)))
        stops, forbidden = programs.HEADER, programs.HEADER + self.max_stop_ids
        begin = programs.row_columns(self._program)
        packed = np.zeros((size, begin + chunk), np.int32)
        packed[:, 0] = self.max_slots
        packed[:, stops:begin] = -1
        floats = packed.view(np.float32)
        for at, row in zip(order, rows, strict=True):
            p, n = row.params, len(row.tokens)
            packed[at, :9] = (row.slot, row.start, n, row.budget, row.counter, row.state, row.text, p.seed & 0x7FFFFFFF, p.top_k)
            floats[at, 9:12] = (p.temperature, p.top_p, p.min_p)
            packed[at, 12] = row.last
            packed[at, stops : stops + len(p.stop_ids)] = p.stop_ids
            packed[at, forbidden : forbidden + len(p.forbidden_ids)] = p.forbidden_ids
            packed[at, begin : begin + n] = row.tokens
        return packed, order

    def first_state(self, params: SamplingParams) -> int:
        """The constraint state a request starts in."""
        return ROOT if params.constrained else UNCONSTRAINED

    def _result(self, data: jax.Array, order: tuple[int, ...]) -> Any:
        """Wraps a dispatch's output; a subclass may use another type with the same ``fetch``."""
        return Result(data, order)


def bucket(size: int, buckets: Sequence[int]) -> int:
    """The smallest of the sorted ``buckets`` that holds ``size``. Raises ValueError when none does."""
    at = bisect.bisect_left(buckets, size)
    if at == len(buckets):
        raise ValueError(f"{size} is larger than the largest bucket {buckets[-1]}")
    return buckets[at]


def host_row(row: transformer.KVCache) -> transformer.KVCache:
    """``row`` (of ``save``) in the host's memory; waits for the copy."""
    return jax.tree.map(np.asarray, row)


def _for_rows(pieces: Sequence[bytes], vocab_size: int) -> list[bytes]:
    """``pieces`` for every row of the model's table, which may be longer than the tokenizer's. Raises ValueError when it is shorter."""
    if len(pieces) > vocab_size:
        raise ValueError(f"{len(pieces)} pieces for a model of {vocab_size} tokens: this tokenizer belongs to another model")
    return [*pieces, *[b""] * (vocab_size - len(pieces))]


def _best_layout(mesh: Mesh | None) -> Layout:
    """The arrangement of the cache that is fastest on the devices of ``mesh`` (None: the default one)."""
    platform = jax.default_backend() if mesh is None else mesh.devices.flat[0].platform
    if platform == "tpu":
        return "tokens"
    return "blocks" if platform == "cpu" and (mesh is None or mesh.size == 1) else "whole"


def _cache_sharding(config: transformer.ModelConfig, mesh: Mesh | None, rows: int, layout: Layout) -> NamedSharding | None:
    """Where a cache of ``rows`` rows to be split lies (0: rows are whole)."""
    if mesh is None:
        return None
    if "tensor" not in mesh.axis_names:
        return NamedSharding(mesh, PartitionSpec())
    parts = mesh.shape["tensor"]
    if config.n_kv_heads % parts:
        raise ValueError(f"mesh axis `tensor`={parts} does not divide n_kv_heads={config.n_kv_heads}: use a divisor of n_kv_heads")
    others = tuple(axis for axis in mesh.axis_names if axis != "tensor")
    if rows % (mesh.size // parts):
        raise ValueError(f"max_slots={rows} does not divide over {mesh.size // parts} replicas: use a multiple of {mesh.size // parts}")
    heads = (None, "tensor") if layout == "tokens" else ("tensor",)
    return NamedSharding(mesh, PartitionSpec(others if rows else None, *heads))
