"""Parameters from a file straight onto the devices, one tensor at a time.

Owns: ``Stored`` (a parameter that is still in a file) and putting the pieces of each on the devices that hold them. Promises: all names
and shapes are checked before the first byte of data is read; besides what the devices hold, host memory has at most this process's part
of one parameter and one block of the file. Does not: know what files are called or how they name tensors (``hf_weights``, ``gguf``,
``safetensors_io``), or rules of partition (``sharding.rules``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Sharding

from crl_jax.models.params import Params, check_complete, flatten, unflatten
from crl_jax.models.tensor_file import TensorFile
from crl_jax.models.transformer import ModelConfig, param_shapes

ALIGNMENT = 64  # bytes; XLA on CPU adopts a buffer that starts at a multiple of this, and copies any other
Piece = tuple[tuple[slice, ...], np.ndarray]
"""Values and where they belong in the parameter: one slice with start and stop per dimension."""


class Stored(NamedTuple):
    """A parameter in a file: its shape in the model's layout, its values in pieces that cover it once, and the type they are stored as
    (None: what a reader makes of them, float32).
    """

    shape: tuple[int, ...]
    pieces: Callable[[], Iterable[Piece]]
    dtype: Any = None


def load_stored(stored: Mapping[str, Stored], config: ModelConfig, *, dtype: Any, shardings: Params | None = None, source: str) -> Params:
    """The parameters of ``config`` as ``dtype`` (None: each as stored); ``stored`` maps every dotted name to where its values are.

    ``shardings`` has a Sharding per parameter (``sharding.rules.param_shardings``); None puts everything on the default device. Raises
    ValueError naming every missing, unexpected or misshapen parameter of ``source``.
    """
    expected = flatten(param_shapes(config))
    check_complete(stored, expected, source=source)
    places = dict.fromkeys(expected) if shardings is None else flatten(shardings)
    return unflatten({name: place(stored[name], dtype or stored[name].dtype or np.float32, places[name]) for name in expected})


def place(stored: Stored, dtype: Any, sharding: Sharding | None) -> jax.Array:
    """One parameter on its devices; returns when the transfer is done, so that its host memory is free again."""
    if sharding is None:
        buffer = _aligned(stored.shape, np.dtype(dtype))
        _fill({tuple((0, n) for n in stored.shape): buffer}, stored)
        return jax.block_until_ready(jax.device_put(buffer))
    where = {
        device: tuple(part.indices(size)[:2] for part, size in zip(index, stored.shape, strict=True))
        for device, index in sharding.addressable_devices_indices_map(stored.shape).items()
        if index is not None
    }
    buffers = {bounds: _aligned(tuple(stop - start for start, stop in bounds), np.dtype(dtype)) for bounds in set(where.values())}
    _fill(buffers, stored)
    shards = [jax.device_put(buffers[bounds], device) for device, bounds in where.items()]
    return jax.block_until_ready(jax.make_array_from_single_device_arrays(stored.shape, sharding, shards))


def tensor_pieces(file: TensorFile, name: str, transposed: bool = False) -> Iterator[Piece]:
    """Tensor ``name`` of a safetensors file in blocks of rows; ``transposed`` for a matrix stored as [out, in]."""
    for first, rows in file.rows(name):
        across = tuple(slice(0, n) for n in rows.shape[1:])
        along = (slice(first, first + len(rows)),) if rows.ndim else ()
        yield ((*across, *along), rows.T) if transposed else ((*along, *across), rows)


def _fill(buffers: Mapping[tuple[tuple[int, int], ...], np.ndarray], stored: Stored) -> None:
    """Copy every piece to the buffers it overlaps, cast to their type; keys are the bounds (start, stop) of each buffer."""
    for where, values in stored.pieces():
        for bounds, buffer in buffers.items():
            starts = [max(part.start, low) for part, (low, _) in zip(where, bounds, strict=True)]
            stops = [min(part.stop, high) for part, (_, high) in zip(where, bounds, strict=True)]
            if all(start < stop for start, stop in zip(starts, stops, strict=True)):
                spans = list(zip(starts, stops, where, bounds, strict=True))
                target = tuple(slice(start - low, stop - low) for start, stop, _, (low, _) in spans)
                buffer[target] = values[tuple(slice(start - part.start, stop - part.start) for start, stop, part, _ in spans)]


def _aligned(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """An uninitialised array that starts at a multiple of ``ALIGNMENT`` bytes."""
    nbytes = int(np.prod(shape)) * dtype.itemsize
    raw = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + nbytes].view(dtype).reshape(shape)
