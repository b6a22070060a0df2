"""Weights from the learner's mesh to the sampler's.

Owns: the serving mesh (the learner's devices as replicas of ``tensor`` chips each), which of its replicas are this process's, and the
compiled copy between the two placements.
Promises: the result shares no buffer with the input, so the learner may donate its state; values are cast, never changed otherwise. Does
not: know versions or samplers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding

from crl_jax.models.config import ModelConfig
from crl_jax.models.params import Params
from crl_jax.models.transposed import transposed
from crl_jax.sharding.mesh import AXES, TENSOR
from crl_jax.sharding.rules import param_shardings


def serving_mesh(mesh: Mesh, tensor: int) -> Mesh:
    """The devices of ``mesh``, in its order, as replicas of ``tensor`` devices: a replica holds all weights.

    Raises ValueError when ``tensor`` does not divide the devices.
    """
    if tensor < 1 or mesh.size % tensor:
        raise ValueError(f"serve_tensor={tensor} does not divide the {mesh.size} devices of the role's mesh: use a divisor of {mesh.size}")
    return Mesh(mesh.devices.reshape(-1, 1, tensor), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def own_part(mesh: Mesh) -> Mesh:
    """The replicas of a serving mesh that lie on this process's devices: all of it when there is one process.

    Raises ValueError when a replica lies on the devices of several processes, or this one has none.
    """
    if jax.process_count() == 1:
        return mesh
    rows = [row for row in mesh.devices if any(device.process_index == jax.process_index() for device in row.flat)]
    if not rows or any(device.process_index != jax.process_index() for row in rows for device in row.flat):
        local = jax.local_device_count()
        raise ValueError(
            f"each process samples on its own {local} devices, and a copy of the weights on {mesh.shape[TENSOR]} does not lie within "
            f"them: set serve_tensor to a divisor of {local}"
        )
    return Mesh(np.stack(rows), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def on_own_part(params: Params, own: Mesh) -> Params:
    """What this process holds of ``params``, which lie on a serving mesh, as arrays on ``own`` (`own_part`); nothing is copied."""

    def part(leaf: Any) -> Any:
        if leaf.is_fully_addressable:
            return leaf
        shards = [shard.data for shard in leaf.addressable_shards]
        return jax.make_array_from_single_device_arrays(leaf.shape, NamedSharding(own, leaf.sharding.spec), shards)

    return jax.tree.map(part, params)


def make_reshard(config: ModelConfig, target: Mesh, dtype: Any) -> Callable[[Params], Params]:
    """``reshard(params) -> params`` on ``target`` in ``dtype``, compiled; ``target`` has the devices of the input's mesh in the same order.

    Raises ValueError when the model does not fit ``target``.
    """

    return jax.jit(lambda params: cast(params, dtype), out_shardings=param_shardings(config, target))


Layout = Callable[[Params], Params]


def serving_layout(mesh: Mesh) -> Layout:
    """How parameters are arranged for decoding on ``mesh``: transposed on one CPU (``models.transposed``), elsewhere as they are."""
    return transposed if mesh.size == 1 and mesh.devices.flat[0].platform == "cpu" else unchanged


def unchanged(params: Params) -> Params:
    """The parameters as they are."""
    return params


def make_copy(dtype: Any, layout: Layout = unchanged) -> Callable[[Params], Params]:
    """``copy(params) -> params`` in ``dtype`` and ``layout``, each where it is."""
    return jax.jit(lambda params: layout(cast(params, dtype)))


def cast(params: Params, dtype: Any) -> Params:
    """Copies of the parameters in ``dtype`` (None: each in its own), for use inside a compiled program: never the argument's buffers."""

    def copied(leaf: Any) -> Any:
        return jnp.copy(leaf) if dtype is None or leaf.dtype == jnp.dtype(dtype) else leaf.astype(dtype)

    return jax.tree.map(copied, params)
