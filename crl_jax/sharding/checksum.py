"""Sums that tell whether two trees of parameters hold the same bits, wherever they lie.

Owns: the sum of a leaf and how the sums of its parts over a mesh are joined and compared.
Promises: exact and independent of order and placement: integer arithmetic modulo 2^32, each element mixed with its index in the whole leaf.
One changed element always changes the sum; elements in other places (a permutation, a transposition of the values) change it but for one
chance in about 2^32. Every device reads its own memory, so each copy of a leaf is checked by itself. Does not: move anything, or protect
against malice.
"""

from __future__ import annotations

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

_STEP, _FACTOR = 0x9E3779B1, 0x85EBCA6B  # odd, so multiplying by them loses nothing (golden ratio; the first constant of MurmurHash3)
_WORDS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


class ChecksumMismatch(RuntimeError):
    """Weights on the serving side are not those of the learner."""


def make_sums(where: Params, dtype: Any = None) -> Callable[[Params], UInt32[Array, "N L"]]:
    """``sums(params)``, compiled: for each of the N devices of the mesh the sum of its part of each of the L leaves.

    ``where`` is the tree with a NamedSharding at each leaf (at a ``Transposed`` one that of its stored array), all on one mesh with the
    axes of ``sharding.mesh``. Values are cast to ``dtype`` first (None: as they are): float32 masters then have the sums of a bf16 copy.
    """
    specs = jax.tree.map(lambda one: one.spec, where)
    mesh = jax.tree.leaves(where)[0].mesh
    flat = flatten(specs)

    def per_device(params: Params) -> UInt32[Array, "1 L"]:
        leaves = flatten(params)
        return jnp.stack([_part_sum(leaves[name], spec, dtype) for name, spec in flat.items()])[None]

    return jax.jit(jax.shard_map(per_device, mesh=mesh, in_specs=(specs,), out_specs=PartitionSpec(AXES), check_vma=False))


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
    values = leaf.stored if isinstance(leaf, Transposed) else leaf
    values = values if dtype is None else values.astype(dtype)
    word = _WORDS[values.dtype.itemsize]
    mixed = jax.lax.bitcast_convert_type(values, word).astype(jnp.uint32)
    stride = _STEP
    for dim in range(values.ndim) if isinstance(leaf, Transposed) else reversed(range(values.ndim)):
        axes = spec[dim] if dim < len(spec) else None
        start = jnp.uint32(0) if axes is None else jax.lax.axis_index(axes).astype(jnp.uint32) * jnp.uint32(values.shape[dim])
        parts = 1 if axes is None else jax.lax.axis_size(axes)
        mixed += (jax.lax.broadcasted_iota(jnp.uint32, values.shape, dim) + start) * jnp.uint32(stride)
        stride = stride * values.shape[dim] * parts % 2**32
    mixed = (mixed ^ (mixed >> 16)) * jnp.uint32(_FACTOR)
    mixed ^= mixed >> 13
    rows = jnp.sum(mixed, axis=0, dtype=jnp.uint32)  # first over rows: as fast as memory is read on CPU, all at once is not
    return jnp.sum(rows, dtype=jnp.uint32)
