"""The device mesh.

Owns: the three axis names and how a mesh is made from devices. Promises: axis types are Auto, so plain ``jax.jit`` code with shardings on
its inputs is partitioned by the compiler. Does not: know models (``rules``) or start distributed processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

DATA, FSDP, TENSOR = "data", "fsdp", "tensor"
AXES = (DATA, FSDP, TENSOR)


def make_mesh(data: int, fsdp: int, tensor: int, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh over ``devices`` (JAX devices; default: all), data x fsdp x tensor.

    ``data`` replicates parameters, ``fsdp`` splits parameters and batch, ``tensor`` splits heads and MLP width. With every device of the
    platform in use the order follows the hardware's topology. Raises ValueError when the product is not the number of devices.
    """
    available = list(jax.devices() if devices is None else devices)
    needed = data * fsdp * tensor
    if needed != len(available):
        raise ValueError(
            f"mesh data={data} x fsdp={fsdp} x tensor={tensor} needs {needed} devices, {len(available)} given: "
            f"change one axis (for example data={max(1, len(available) // (fsdp * tensor))}) or pass `devices`"
        )
    types = (AxisType.Auto,) * 3
    if devices is None:
        return jax.make_mesh((data, fsdp, tensor), AXES, axis_types=types)
    return Mesh(np.asarray(available).reshape(data, fsdp, tensor), AXES, axis_types=types)
