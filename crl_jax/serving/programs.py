"""The compiled programs of the slot engine, as pure functions on arrays: ``extend`` and ``generate``, and four that copy cache rows.

Owns: the decode state (a KV cache of S slots and, per slot, everything needed to go on sampling) and how one dispatch changes it.
Promises: a slot's tokens do not depend on other slots; positions past a slot's length may hold stale keys but are never attended to; the
cache and the fields of slots that a dispatch does not name are unchanged; the state is donated, so the caller must use only the state
that comes back.
Does not: choose batch shapes, know sessions, or copy anything to the host.

Invariant of a slot: ``length`` tokens are in the cache; ``last`` is the next token to feed (sampled, or the end of a prompt) and is not
in it yet; ``budget`` tokens may still be sampled (0 = finished or waiting for input). Only ``generate`` samples, so the first token of a
completion is computed in the same way as every other, whoever filled the cache.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jaxtyping import Array, Bool, Float, Int

from crl_jax.models import transformer
from crl_jax.models.cache import KVCache, Layout, doubling_blocks, read_row, write_row
from crl_jax.serving.constraint import COMPLETE, UNCONSTRAINED
from crl_jax.serving.sampling import RowParams, sample
from crl_jax.serving.stop_strings import REACHED

HEADER = 13  # int32 columns of a packed row before the stop ids: see pack order in ``unpack_rows``
PER_TOKEN = 5  # int32 columns of a result per token: see ``pack_result``


class SlotFields(NamedTuple):
    """Per-slot values; ``params`` holds how to sample, ``text`` the state of the stop strings; ``stops`` is -1 padded."""

    length: Int[Array, " S"]
    last: Int[Array, " S"]
    budget: Int[Array, " S"]
    text: Int[Array, " S"]
    params: RowParams
    stops: Int[Array, "S M"]


class DecodeState(NamedTuple):
    """Everything a dispatch reads and replaces."""

    cache: Any  # transformer.KVCache with batch S
    slots: SlotFields


class Tables(NamedTuple):
    """The action trie and the stop strings on the device; None where the engine has none."""

    allowed: Int[Array, "S A"] | None = None
    next_state: Int[Array, "S A"] | None = None
    text: Int[Array, "T V"] | None = None  # state of the stop strings after a token, see ``stop_strings``


class Program(NamedTuple):
    """What is static in the programs: the model, where the cache lives (None: wherever the inputs are), and how it is arranged."""

    config: transformer.ModelConfig
    cache_sharding: NamedSharding | None
    max_stop_ids: int
    max_forbidden_ids: int
    cache_dtype: Any = jnp.float32
    cache_layout: Layout = "whole"


def init_state(program: Program, max_slots: int, max_length: int) -> DecodeState:
    """Empty slots: nothing in the cache, nothing to sample."""
    ints, floats = jnp.zeros(max_slots, jnp.int32), jnp.zeros(max_slots, jnp.float32)
    stops, forbidden = (jnp.full((max_slots, n), -1, jnp.int32) for n in (program.max_stop_ids, program.max_forbidden_ids))
    params = RowParams(floats, jnp.ones(max_slots, jnp.float32), floats, ints, ints, ints, ints, forbidden)
    slots = SlotFields(ints, ints, ints, ints, params, stops)
    blocks = doubling_blocks(max_length) if program.cache_layout == "blocks" else None
    by_token = program.cache_layout == "tokens"
    cache = transformer.init_cache(program.config, max_slots, max_length, program.cache_dtype, blocks=blocks, by_token=by_token)
    state = DecodeState(cache, slots)
    if program.cache_sharding is not None:
        replicated = NamedSharding(program.cache_sharding.mesh, jax.sharding.PartitionSpec())
        state = DecodeState(jax.device_put(cache, program.cache_sharding), jax.device_put(slots, replicated))
    return jax.tree.map(jnp.copy, state)  # distinct buffers: a donated buffer may appear only once


def row_columns(program: Program) -> int:
    """Columns of a packed row before its tokens."""
    return HEADER + program.max_stop_ids + program.max_forbidden_ids


def unpack_rows(program: Program, packed: Int[Array, "R W"]) -> tuple[Int[Array, " R"], Int[Array, " R"], SlotFields, Int[Array, "R C"]]:
    """(slot, n, fields, tokens) of a packed batch; columns: slot, start, n, budget, counter, constraint state, stop string state, seed,
    top_k, bits of temperature, top_p and min_p, last, stop ids, forbidden ids, tokens.

    ``fields.length`` is the start (the tokens already in the cache).
    """
    slot, start, n, budget, counter, trie, text, seed, top_k, temperature, top_p, min_p, last = (packed[:, i] for i in range(HEADER))
    stops, forbidden, tokens = jnp.split(packed[:, HEADER:], (program.max_stop_ids, row_columns(program) - HEADER), axis=1)
    real = functools.partial(jax.lax.bitcast_convert_type, new_dtype=jnp.float32)
    params = RowParams(real(temperature), real(top_p), real(min_p), top_k, seed, counter, trie, forbidden)
    return slot, n, SlotFields(start, last, budget, text, params, stops), tokens


def pack_result(
    ids: Int[Array, "R K"],
    valid: Bool[Array, "R K"],
    counter: Int[Array, " R"],
    logps: Float[Array, "R K"],
    sampling_logps: Float[Array, "R K"],
    states: Int[Array, "R K"],
) -> Int[Array, "R 5K+1"]:
    """One int32 array to copy back: ids | valid | tokens sampled so far in the request | bits of the two float32 log-probs | constraint
    states.
    """
    bits = (jax.lax.bitcast_convert_type(x, jnp.int32) for x in (logps, sampling_logps))
    return jnp.concatenate([ids, valid.astype(jnp.int32), counter[:, None], *bits, states], axis=1)


@functools.partial(jax.jit, static_argnames=("program", "dense"), donate_argnames=("state",))
@jax.named_scope("prefill")
def extend(program: Program, params: Any, state: DecodeState, packed: Int[Array, "R W"], dense: bool) -> DecodeState:
    """Appends up to C tokens to each named slot and sets its fields.

    A row with budget 0 is a part of an input that goes on in a later dispatch. Padding rows have a slot number past the end. ``dense``
    promises that row i is slot i (R = S), which saves gathering cache rows.
    """
    slot, n, fields, tokens = unpack_rows(program, packed)
    column = jnp.arange(tokens.shape[1])
    positions = jnp.where(column < n[:, None], fields.length[:, None] + column, -1)
    _, cache = transformer.hidden_states(program.config, params, tokens, positions, cache=state.cache, slots=None if dense else slot)
    return _store(program, state, cache, fields._replace(length=fields.length + n), slot)


@functools.partial(jax.jit, static_argnames=("program", "width", "dense"), donate_argnames=("state",))
@jax.named_scope("decode")
def generate(
    program: Program,
    params: Any,
    state: DecodeState,
    tables: Tables,
    slot: Int[Array, " R"],
    steps: Int[Array, ""],
    width: int,
    dense: bool,
) -> tuple[DecodeState, Int[Array, "R 5K+1"]]:
    """Up to ``steps`` <= ``width`` tokens for each named slot; each row stops exactly at its stop id or budget, and the loop ends when
    all have.

    Padding rows have a slot number past the end; with ``dense`` row i is slot i, and rows not to be stepped have that number instead.
    """
    total = state.slots.length.shape[0]
    asked = slot < total
    fields = state.slots if dense else jax.tree.map(lambda a: a[jnp.minimum(slot, total - 1)], state.slots)
    held = fields.budget
    fields = fields._replace(budget=jnp.where(asked, held, 0))

    def unfinished(carry: Any) -> Bool[Array, ""]:
        i, _, fields, _ = carry
        return (i < steps) & jnp.any(fields.budget > 0)

    def step(carry: Any) -> Any:
        i, cache, fields, sampled = carry
        active = fields.budget > 0
        positions = jnp.where(active, fields.length, -1)[:, None]
        hidden, cache = transformer.hidden_states(
            program.config, params, fields.last[:, None], positions, cache=cache, slots=None if dense else slot
        )
        logits = transformer.unembed(program.config, params, hidden[:, 0], decoding=True)
        token, logp, sampling_logp = sample(logits, fields.params, tables.allowed)
        new = (token, active, logp, sampling_logp, fields.params.state)
        sampled = tuple(column.at[:, i].set(value) for column, value in zip(sampled, new, strict=True))
        return i + 1, cache, _after_token(fields._replace(length=fields.length + active), token, active, tables), sampled

    kinds = (jnp.int32, bool, jnp.float32, jnp.float32, jnp.int32)
    start = (jnp.int32(0), state.cache, fields, tuple(jnp.zeros((slot.shape[0], width), kind) for kind in kinds))
    _, cache, fields, (ids, valid, *rest) = jax.lax.while_loop(unfinished, step, start)
    result = pack_result(ids, valid, fields.params.counter, *rest)
    return _store(program, state, cache, fields, jnp.where(asked, slot, total)), result


@functools.partial(jax.jit, static_argnames=("program",), donate_argnames=("state",))
def insert(program: Program, prefix: DecodeState, state: DecodeState, slot: Int[Array, ""]) -> DecodeState:
    """Copies the single slot of ``prefix`` into ``slot``; the prefix is left intact."""
    return jax.tree.map(lambda whole, row: whole.at[slot].set(row[0]), state, prefix)


@functools.partial(jax.jit, static_argnames=("program",), donate_argnames=("state",))
def fork(program: Program, state: DecodeState, source: Int[Array, " R"], packed: Int[Array, "R W"]) -> DecodeState:
    """Copies the cache row ``source[i]`` into the slot of row i of ``packed`` (its own slot: it stays as it is) and sets its fields.

    The rows' starts say how many tokens of the copy count. Padding rows have a slot number past the end.
    """
    slot, _, fields, _ = unpack_rows(program, packed)
    cache = jax.tree.map(lambda leaf: leaf.at[slot].set(leaf[source], mode="drop"), state.cache)
    return _store(program, state, cache, fields, slot)


@functools.partial(jax.jit, static_argnames=("length",))
def save(state: DecodeState, slot: Int[Array, ""], length: int) -> KVCache:
    """The first ``length`` positions of the cache row ``slot``."""
    return read_row(state.cache, slot, length)


@functools.partial(jax.jit, static_argnames=("program",), donate_argnames=("state",))
def load(program: Program, state: DecodeState, slot: Int[Array, ""], row: KVCache) -> DecodeState:
    """The state with ``row`` (from ``save``) in the cache of ``slot``; the slot's fields stay as they are."""
    cache = write_row(state.cache, slot, row)
    if program.cache_sharding is not None:
        cache = jax.lax.with_sharding_constraint(cache, program.cache_sharding)
    return state._replace(cache=cache)


def _after_token(fields: SlotFields, token: Int[Array, " R"], sampled: Bool[Array, " R"], tables: Tables) -> SlotFields:
    """The fields after ``token`` was sampled in the rows where ``sampled``."""
    params = fields.params
    finished = jnp.any(fields.stops == token[:, None], axis=1)
    trie, text = params.state, fields.text
    if tables.text is not None:
        text = tables.text[text, token].astype(jnp.int32)
        finished |= text == REACHED
    if tables.allowed is not None and tables.next_state is not None:
        column = jnp.argmax(tables.allowed[trie] == token[:, None], axis=1)
        following = tables.next_state[trie, column]
        constrained = trie != UNCONSTRAINED
        finished |= constrained & (following == COMPLETE)
        trie = jnp.where(sampled & constrained & (following != COMPLETE), following, trie)
    return fields._replace(
        last=jnp.where(sampled, token, fields.last),
        budget=jnp.where(sampled, jnp.where(finished, 0, fields.budget - 1), fields.budget),
        text=jnp.where(sampled & ~finished, text, fields.text),
        params=params._replace(counter=params.counter + sampled, state=trie),
    )


def _store(program: Program, state: DecodeState, cache: Any, fields: SlotFields, index: Int[Array, " R"]) -> DecodeState:
    """The new state: ``fields`` written at ``index`` (a number past the end writes nothing)."""
    if program.cache_sharding is not None:
        cache = jax.lax.with_sharding_constraint(cache, program.cache_sharding)
    return DecodeState(cache, jax.tree.map(lambda whole, row: whole.at[index].set(row, mode="drop"), state.slots, fields))
