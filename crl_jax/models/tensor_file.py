"""Safetensors files read and written in pieces.

Owns: the header of a safetensors file, reading rows of one tensor, writing tensor after tensor. Promises: at most one block of rows of a
tensor is in memory while reading, and one tensor while writing; a file that was cut short is refused when it is opened. Does not: know
what the tensors mean, or map files into memory (mapped pages count as memory of the process).

Format: 8 bytes little-endian length of the header, a JSON object name -> {dtype, shape, data_offsets}, then the bytes of all tensors.
"""

from __future__ import annotations

import json
import math
import os
import pathlib
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

DTYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(jnp.bfloat16),
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
BLOCK_BYTES = 1 << 20  # a block is transposed and cast while it is in the cache of the processor


class Entry(NamedTuple):
    """One tensor of a file: its type, its shape, and where its bytes are (from the start of the file)."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class TensorFile:
    """The tensors of one safetensors file. The file is opened for each read, so nothing has to be closed."""

    def __init__(self, path: str | os.PathLike[str]):
        """Reads the header. Raises FileNotFoundError, and ValueError for a file that is no safetensors file or is cut short."""
        self.path = pathlib.Path(path)
        size = self.path.stat().st_size
        with self.path.open("rb") as file:
            length = struct.unpack("<Q", file.read(8))[0] if size >= 8 else size
            if length + 8 > size:
                raise ValueError(f"{self.path} is no safetensors file or is cut short ({size} bytes): copy it again")
            raw = file.read(length)
        try:
            self.entries = _entries(json.loads(raw), length + 8)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ValueError(f"{self.path} has no safetensors header ({type(error).__name__}: {error}): copy it again") from error
        needed = max((entry.stop for entry in self.entries.values()), default=0)
        if needed > size:
            raise ValueError(f"{self.path} is cut short ({size} of {needed} bytes): copy it again")

    def rows(self, name: str) -> Iterator[tuple[int, np.ndarray]]:
        """``(first row, rows)`` from the first to the last row, in blocks of about ``BLOCK_BYTES``. A scalar or vector is one block.

        Raises ValueError for a type other than float32, float16 and bfloat16.
        """
        entry = self.entries[name]
        if entry.dtype not in DTYPES:
            raise ValueError(f"tensor {name} of {self.path} is stored as {entry.dtype}: only {sorted(DTYPES)} are read (no quantised ones)")
        dtype = DTYPES[entry.dtype]
        with self.path.open("rb") as file:
            file.seek(entry.start)
            if len(entry.shape) < 2:
                yield 0, np.frombuffer(file.read(entry.stop - entry.start), dtype).reshape(entry.shape)
                return
            width = int(np.prod(entry.shape[1:]))
            step = max(1, BLOCK_BYTES // (width * dtype.itemsize))
            for first in range(0, entry.shape[0], step):
                count = min(step, entry.shape[0] - first)
                block = np.frombuffer(file.read(count * width * dtype.itemsize), dtype)
                yield first, block.reshape(count, *entry.shape[1:])


def _entries(header: dict[str, Any], begin: int) -> dict[str, Entry]:
    """The tensors in a header whose data begin at byte ``begin``. Raises for what a header cannot say."""
    found = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        (start, stop), shape = entry["data_offsets"], tuple(entry["shape"])
        if not (isinstance(entry["dtype"], str) and all(type(n) is int and n >= 0 for n in (*shape, start, stop))):
            raise ValueError(f"tensor {name} is {entry}")
        dtype = DTYPES.get(entry["dtype"])
        if dtype is not None and stop - start != math.prod(shape) * dtype.itemsize:  # a reader would go on into the next tensor
            raise ValueError(f"tensor {name} of shape {shape} has {stop - start} bytes of {entry['dtype']}")
        found[name] = Entry(entry["dtype"], shape, begin + start, begin + stop)
    return found


class Outgoing(NamedTuple):
    """One tensor to be written; ``values`` is called when its turn comes."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    values: Callable[[], np.ndarray]

    @property
    def nbytes(self) -> int:
        """Size of the data in bytes."""
        return int(np.prod(self.shape)) * self.dtype.itemsize


def write_tensors(path: str | os.PathLike[str], tensors: Sequence[Outgoing]) -> None:
    """Write ``tensors`` to ``path`` in the given order, one at a time.

    Raises ValueError when a value has another shape or type than announced, or a type that is not float32, float16 or bfloat16.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        if tensor.dtype not in _NAMES:
            raise ValueError(f"tensor {tensor.name} has type {tensor.dtype}: store it as one of {[str(d) for d in _NAMES]}")
        header[tensor.name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        offset += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors:
            values = np.ascontiguousarray(tensor.values())
            if values.shape != tensor.shape or values.dtype != tensor.dtype:
                raise ValueError(f"tensor {tensor.name} is {values.dtype}{values.shape}, announced as {tensor.dtype}{tensor.shape}")
            values.reshape(-1).view(np.uint8).tofile(file)
