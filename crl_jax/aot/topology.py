"""TPU slices by name, as devices one can compile for but not run on.

Owns: the names (``v5p:4x4x4``), the table of chips with their limits and speeds, and the device mesh over a described slice.
Promises: a name that parses has known limits; nothing here looks for real TPUs. Does not: compile (``programs``) or judge (``roofline``).

Speeds are the vendor's published figures per chip (Cloud TPU documentation, pages of v5e, v5p and v6e; read November 2026).
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from crl_jax.errors import UserError
from crl_jax.sharding.mesh import AXES, TENSOR

INSTALL = "pip install -e '.[aot]'"
GIB = 2**30


class AotError(UserError):
    """The compiler or the topology cannot be used; the message says what to do."""


@dataclasses.dataclass(frozen=True)
class Chip:
    """One chip. ``hbm_bytes`` is what the compiler lets a program use, a little less than what is sold.

    ``ici_bytes_s``: a ring along one axis of the torus, both directions together. ``dcn_bytes_s``: the chip's share of its host's network.
    """

    name: str
    dimensions: int
    hbm_bytes: int
    flops_s: float  # bfloat16
    hbm_bytes_s: float
    ici_bytes_s: float
    dcn_bytes_s: float


CHIPS = {
    chip.name: chip
    for chip in (
        Chip("v5e", 2, int(15.75 * GIB), 197e12, 819e9, 2 * 50e9, 3.125e9),
        Chip("v5p", 3, int(95.74 * GIB), 459e12, 2765e9, 2 * 100e9, 6.25e9),
        Chip("v6e", 2, int(31.25 * GIB), 918e12, 1638e9, 2 * 100e9, 12.5e9),
    )
}


@dataclasses.dataclass(frozen=True)
class Topology:
    """``slices`` equal tori of ``shape`` chips."""

    chip: Chip
    shape: tuple[int, ...]
    slices: int = 1

    @property
    def name(self) -> str:
        """As it is written on the command line."""
        base = f"{self.chip.name}:{'x'.join(map(str, self.shape))}"
        return base if self.slices == 1 else f"{self.slices}*{base}"

    @property
    def chips(self) -> int:
        """Chips of all slices."""
        return self.slices * math.prod(self.shape)


def parse_topology(name: str) -> Topology:
    """``v5e:4x4``, ``v5p:4x4x4``; ``2*v5e:4x4`` for two slices joined by the data-centre network.

    Raises ValueError that says how a name looks, which chips are known, or what shape the chip's torus needs.
    """
    match = re.fullmatch(r"(?:(\d+)\*)?([a-z0-9]+):(\d+(?:x\d+)*)", name.strip())
    if match is None:
        raise ValueError(f"topology {name!r}: write CHIP:SHAPE, e.g. v5p:4x4x4 or v5e:4x4, and 2*v5e:4x4 for two slices")
    slices, chip_name, shape = int(match[1] or 1), match[2], tuple(int(part) for part in match[3].split("x"))
    if chip_name not in CHIPS:
        raise ValueError(f"topology {name!r}: unknown chip `{chip_name}`, use one of {sorted(CHIPS)}")
    chip = CHIPS[chip_name]
    if len(shape) != chip.dimensions or min(shape) < 1 or slices < 1:
        example = "x".join(["4"] * chip.dimensions)
        raise ValueError(
            f"topology {name!r}: {chip.name} slices have {chip.dimensions} dimensions of 1 or more, e.g. {chip.name}:{example}"
        )
    return Topology(chip, shape, slices)


def describe_devices(topology: Topology) -> list[Any]:
    """The slice's devices, without hardware. Raises AotError when libtpu is missing or fails, ValueError for a shape that it refuses."""
    from jax.experimental import topologies

    if importlib.util.find_spec("libtpu") is None:
        raise AotError(f"compiling for {topology.name} needs the TPU compiler (package `libtpu`), no TPU: {INSTALL}")
    options = {"num_slices": topology.slices} if topology.slices > 1 else {}
    base = dataclasses.replace(topology, slices=1).name
    try:
        devices = list(topologies.get_topology_desc(platform="tpu", topology_name=base, **options).devices)
    except jax.errors.JaxRuntimeError as error:
        if "INVALID_ARGUMENT" in str(error):
            example = "x".join(["4"] * topology.chip.dimensions)
            raise ValueError(
                f"topology {topology.name}: there is no such slice, use the shape of one that exists, e.g. {topology.chip.name}:{example} "
                f"({str(error).splitlines()[0]})"
            ) from error
        raise AotError(f"the TPU compiler refuses topology {topology.name}: {str(error).splitlines()[0]}") from error
    if len(devices) != topology.chips:
        raise AotError(
            f"{topology.name} has {topology.chips} chips, the compiler sees {len(devices)} devices: one device per chip is needed"
        )
    return devices


def topology_mesh(devices: Sequence[Any], topology: Topology, data: int, fsdp: int, tensor: int) -> Mesh:
    """data x fsdp x tensor over the slice, axes laid along the torus; several slices split ``data`` (its traffic is the least).

    Raises ValueError when the product is not the number of chips or the slices do not divide ``data``.
    """
    from jax.experimental import mesh_utils

    if data * fsdp * tensor != topology.chips:
        raise ValueError(
            f"mesh data={data} x fsdp={fsdp} x tensor={tensor} is {data * fsdp * tensor} chips, {topology.name} has {topology.chips}: "
            f"set e.g. mesh.data={max(1, topology.chips // (fsdp * tensor))} (or 0 for all that are left)"
        )
    if data % topology.slices:
        raise ValueError(f"mesh.data={data} must be a multiple of the {topology.slices} slices of {topology.name}: they split that axis")
    inner, options = (data // topology.slices, fsdp, tensor), {"devices": list(devices), "allow_split_physical_axes": True}
    try:
        if topology.slices > 1:
            grid = mesh_utils.create_hybrid_device_mesh(inner, (topology.slices, 1, 1), **options)
        else:
            grid = mesh_utils.create_device_mesh(inner, **options)
    except NotImplementedError as error:
        raise ValueError(
            f"mesh data={data} x fsdp={fsdp} x tensor={tensor} cannot be laid on {topology.name}: use products of the torus's sides "
            f"({str(error).splitlines()[0]})"
        ) from error
    return Mesh(np.asarray(grid), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def replica_mesh(mesh: Mesh, topology: Topology) -> Mesh:
    """The mesh of one serving replica, as many chips as ``mesh`` has along tensor: the first ones of ``mesh``.

    The compiler refuses a program for a part of a two-dimensional slice, because its network routes whole slices only: there it is the mesh
    of a slice of its own of that size. Raises like ``describe_devices``.
    """
    chips = mesh.shape[TENSOR]
    part = mesh.devices[:1, :1]
    if topology.chip.dimensions == 2 and 1 < chips < topology.chips:
        height = 2 ** (int(math.log2(chips)) // 2)  # as square as there are such slices: 2x2, 2x4, 4x4
        own = Topology(topology.chip, (height, chips // height))
        part = np.asarray(describe_devices(own)).reshape(1, 1, chips)
    return Mesh(part, mesh.axis_names, axis_types=mesh.axis_types)
