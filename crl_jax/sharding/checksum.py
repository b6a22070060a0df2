"""Sums that tell whether two trees of parameters hold the same bits, wherever they lie.

Owns: the sum of a leaf and how the sums of its parts over a mesh are joined and compared.
Promises: exact and independent of order and placement: integer arithmetic modulo 2^32, each element mixed with its index in the whole leaf.
One changed element always changes the sum; elements in other places (a permutation, a transposition of the values) change it but for one
chance in about 2^32. Every device reads its own memory, so each copy of a leaf is checked by itself. Does not: move anything, or protect
against malice.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, UInt32

from crl_jax.models.params import Params, flatten
from crl_jax.models.transposed import Transposed
from crl_jax.sharding.mesh import AXES
from crl_jax.sharding.together import Meet, Together

_STEP, _FACTOR = 0x9E3779B1, 0x85EBCA6B  # odd, so multiplying by them loses nothing (golden ratio; the first constant of MurmurHash3)
_BLOCK = (
    2**16
)  # elements at a time: mixed bits then stay in the cache (XLA on CPU writes them out before it sums, at a quarter of the speed)
_WORDS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


class ChecksumMismatch(RuntimeError):
    """Weights on the serving side are not those of the learner."""


def make_sums(where: Params, dtype: Any = None, meet: Meet | None = None) -> Callable[[Params], UInt32[Array, "N L"]]:
    """``sums(params)``, from compiled programs: for each of the N devices of the mesh the sum of its part of each of the L leaves.

    ``where`` is the tree with a NamedSharding at each leaf (at a ``Transposed`` one that of its stored array), all on one mesh with the
    axes of ``sharding.mesh``. Values are cast to ``dtype`` first (None: as they are): float32 masters then have the sums of a bf16 copy.
    ``meet``: for a mesh of several processes.
    """
    flat: dict[str, NamedSharding] = flatten(where)
    mesh = jax.tree.leaves(where)[0].mesh

    @functools.cache
    def part(spec: PartitionSpec) -> Any:
        """Compiled once for each shape, where one program for all leaves would hold the same loop once for each leaf."""

        def per_device(leaf: Any) -> UInt32[Array, "1"]:
            return _part_sum(leaf, spec, dtype)[None]

        return jax.jit(jax.shard_map(per_device, mesh=mesh, in_specs=(spec,), out_specs=PartitionSpec(AXES), check_vma=False))

    # replicated, so that every process reads all
    stacked = jax.jit(lambda parts: jnp.stack(parts, axis=1), out_shardings=NamedSharding(mesh, PartitionSpec()))
    together = Together(stacked, meet, "the program that joins checksums")

    def sums(params: Params) -> UInt32[Array, "N L"]:
        leaves = flatten(params)
        return together([part(place.spec)(leaves[name]) for name, place in flat.items()])

    return sums


def join_sums(sums: UInt32[np.ndarray, "N L"], where: Params) -> dict[str, UInt32[np.ndarray, " copies"]]:
    """For each leaf one sum per copy that the mesh holds of it; copies in the mesh's order."""
    flat: Mapping[str, NamedSharding] = flatten(where)
    found: dict[str, np.ndarray] = {}
    for i, (name, place) in enumerate(flat.items()):
        used = {axis for part in place.spec for axis in ((part,) if isinstance(part, str) else part or ())}
        split = tuple(n for n, axis in enumerate(AXES) if axis in used)
        found[name] = sums[:, i].reshape(place.mesh.devices.shape).sum(axis=split, dtype=np.uint32).ravel()
    return found


def compare_sums(source: Mapping[str, np.ndarray], served: Mapping[str, np.ndarray]) -> str:
    """The checksum of the whole tree in hexadecimal, from what ``join_sums`` gave for both sides.

    Raises ChecksumMismatch naming every leaf of which one copy differs from the learner's first copy.
    """
    wrong: list[str] = []
    for name, sums in source.items():
        truth = sums[0]
        for side, copies in (("the learner's", sums), ("the served", served[name])):
            bad = [str(i) for i, value in enumerate(copies) if value != truth]
            if bad:
                wrong.append(f"{name} ({side} copy {', '.join(bad)} of {len(copies)})")
    if wrong:
        names = "; ".join(wrong[:8]) + (f"; and {len(wrong) - 8} more" if len(wrong) > 8 else "")
        raise ChecksumMismatch(
            f"published weights differ from the learner's: {names}. They are not in use. A device or its memory may be faulty: run again "
            "without it, or report the programs and versions (`crl doctor`)"
        )
    return f"{zlib.crc32(np.array([source[name][0] for name in sorted(source)], '<u4').tobytes()):08x}"


def _part_sum(leaf: Any, spec: PartitionSpec, dtype: Any) -> UInt32[Array, ""]:
    """The sum over this device's part of a leaf: mixed(bits + index * step), the index counted over the whole leaf as a plain matrix."""
    turned = isinstance(leaf, Transposed)
    values = leaf.stored if turned else leaf
    dims = range(values.ndim) if turned else range(values.ndim)[::-1]  # the plain matrix's last dimension first
    starts, strides, stride = dict[int, Any](), dict[int, int](), _STEP
    for dim in dims:
        axes = spec[dim] if dim < len(spec) else None
        parts = 1 if axes is None else jax.lax.axis_size(axes)
        starts[dim] = 0 if axes is None else jax.lax.axis_index(axes) * values.shape[dim]
        strides[dim] = stride
        stride = stride * values.shape[dim] * parts % 2**32

    def sums(block: Array, first: Any) -> UInt32[Array, "*columns"]:
        block = block if dtype is None else block.astype(dtype)
        mixed = jax.lax.bitcast_convert_type(block, _WORDS[block.dtype.itemsize]).astype(jnp.uint32)
        for dim in dims:
            start = jnp.asarray(starts[dim] + (first if dim == 0 else 0)).astype(jnp.uint32)
            mixed += (jax.lax.broadcasted_iota(jnp.uint32, block.shape, dim) + start) * jnp.uint32(strides[dim])
        mixed = (mixed ^ (mixed >> 16)) * jnp.uint32(_FACTOR)
        return jnp.sum(mixed ^ (mixed >> 13), axis=0, dtype=jnp.uint32)

    rows = values.shape[0]
    step = max(1, _BLOCK * rows // max(1, values.size))
    blocks = rows // step
    if blocks < 2:
        return jnp.sum(sums(values, 0), dtype=jnp.uint32)

    def add(i: Any, total: UInt32[Array, "*columns"]) -> UInt32[Array, "*columns"]:
        return total + sums(jax.lax.dynamic_slice_in_dim(values, i * step, step), i * step)

    total = jax.lax.fori_loop(0, blocks, add, jnp.zeros(values.shape[1:], jnp.uint32))
    if rows % step:
        total += sums(values[blocks * step :], blocks * step)
    return jnp.sum(total, dtype=jnp.uint32)
