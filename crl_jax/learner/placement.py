"""Where the learner's arrays live: parameters and moments by given shardings, batches split over the data axes.

Owns: the shardings of a whole LearnerState, and putting state and batch on the mesh.
Promises: a moment lives where its parameter lives, everything else of the state (counters, schedule counts) is replicated over the mesh.
Does not: choose how a parameter is partitioned (``crl_jax.sharding``).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import optax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from crl_jax.learner.state import LearnerState, init_state
from crl_jax.records import TrainBatch


def state_shardings(state: LearnerState, optimizer: optax.GradientTransformation, param_shardings: Any, mesh: Mesh) -> LearnerState:
    """A LearnerState of shardings for ``state`` (arrays or ShapeDtypeStructs); ``param_shardings`` has the tree of ``state.params``."""
    everywhere: Any = NamedSharding(mesh, PartitionSpec())
    opt_state = optax.tree_utils.tree_map_params(
        optimizer,
        lambda _leaf, sharding: sharding,
        state.opt_state,
        param_shardings,
        transform_non_params=lambda _leaf: everywhere,
    )
    return LearnerState(param_shardings, opt_state, everywhere, everywhere, everywhere)


def put(tree: Any, shardings: Any) -> Any:
    """``tree`` with ``shardings``. In a job of several processes each of them has the whole tree, or has it in place already."""

    def placed(leaf: Any, sharding: NamedSharding) -> Any:
        if sharding.is_fully_addressable or (isinstance(leaf, jax.Array) and leaf.sharding == sharding):
            return jax.device_put(leaf, sharding)
        whole = np.asarray(leaf)
        return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])

    return jax.tree.map(placed, tree, shardings)


def first_state(params: Any, optimizer: optax.GradientTransformation, shardings: LearnerState) -> LearnerState:
    """The state before the first update, with ``shardings``; ``params`` are part of it and will be donated."""
    if jax.process_count() == 1:
        return jax.device_put(init_state(params, optimizer), shardings)
    # outside a compiled program arrays of several processes cannot be made
    return jax.jit(functools.partial(init_state, optimizer=optimizer), out_shardings=shardings)(params)


def place_batch(batch: TrainBatch, mesh: Mesh, data_axes: Sequence[str]) -> TrainBatch:
    """The batch split by rows over ``data_axes``. In a multi-process run every process passes its own rows, in process order.

    Raises ValueError when the rows do not divide evenly, when processes pass different shapes (on every process, not a hang or rows
    of zeros), or when the mesh gives a row to the devices of several processes.
    """
    if jax.process_count() > 1:
        _agree(batch)
    sharding = NamedSharding(mesh, PartitionSpec(tuple(data_axes)))
    rows = batch.tokens.shape[0] * jax.process_count()
    shards = _size(mesh, data_axes)
    if rows % shards:
        raise ValueError(
            f"{rows} rows do not divide over {shards} shards of mesh axes {tuple(data_axes)}: use row buckets that are multiples of it"
        )
    _require_own_rows(sharding, rows)
    return jax.tree.map(lambda leaf: jax.make_array_from_process_local_data(sharding, leaf), batch)


def _require_own_rows(sharding: NamedSharding, rows: int) -> None:
    """Else what one process has of a row would stand for what all have."""
    if jax.process_count() == 1:
        return
    places = sharding.addressable_devices_indices_map((rows,)).values()
    mine = {row for index in places if index is not None for row in range(*index[0].indices(rows))}
    if len(mine) * jax.process_count() != rows:
        raise ValueError(
            f"of {rows} rows {len(mine)} lie on the devices of process {jax.process_index()} of {jax.process_count()}: each process needs "
            "rows of its own, so use a tensor axis that divides the devices of one process, and devices in the order of processes"
        )


def _agree(batch: TrainBatch) -> None:
    mine = np.array([size for leaf in jax.tree.leaves(batch) for size in leaf.shape])
    everyones = multihost_utils.process_allgather(mine)
    if (everyones != mine).any():
        rows = sorted({int(shape[0]) for shape in everyones})
        raise ValueError(
            f"processes pass batches of different shapes (rows: {rows}): give every process the same buckets and as many rows, "
            "filled up with masked ones"
        )


def _size(mesh: Mesh, axes: Sequence[str]) -> int:
    size = 1
    for axis in axes:
        size *= mesh.shape[axis]
    return size
