"""Parameters to and from one safetensors file.

Owns: the file layout (dotted parameter names, one tensor each). Promises: a file is complete or refused by name; writing is atomic.
Does not: convert foreign layouts (``gguf``) or shard (``sharding.rules``).
"""

from __future__ import annotations

import functools
import os
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from crl_jax.models.config import ModelConfig
from crl_jax.models.params import Params, flatten
from crl_jax.models.stream import Stored, load_stored, tensor_pieces
from crl_jax.models.tensor_file import DTYPES, TensorFile


def save_params(params: Params, path: str | os.PathLike[str], *, dtype: Any = None) -> None:
    """Write ``params`` to ``path`` through a temporary file and a rename.

    ``dtype`` (for example ``jnp.bfloat16`` or ``np.float16``) is the stored type; None keeps each array's own. Raises ValueError when a
    value becomes infinite in ``dtype``.
    """
    target = pathlib.Path(path)
    flat: dict[str, np.ndarray] = {}
    for name, leaf in flatten(params).items():
        array = np.asarray(jax.device_get(leaf))
        with np.errstate(over="ignore"):  # an overflow is the error below
            stored = array if dtype is None else array.astype(jnp.dtype(dtype))
        if stored.dtype != array.dtype and not np.isfinite(stored.astype(np.float32)).all():
            raise ValueError(f"parameter {name} does not fit {stored.dtype}: store it as bfloat16 or float32")
        flat[name] = np.ascontiguousarray(stored)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    target.parent.mkdir(parents=True, exist_ok=True)
    save_file(flat, temporary)
    os.replace(temporary, target)


def load_params(config: ModelConfig, path: str | os.PathLike[str], *, dtype: Any = jnp.float32, shardings: Params | None = None) -> Params:
    """Read the parameters of ``config`` from ``path`` as ``dtype`` (None: each as stored), one tensor at a time.

    ``shardings`` has a Sharding per parameter; None puts everything on the default device. Raises FileNotFoundError for a missing file and
    ValueError naming every missing, unexpected or misshapen tensor.
    """
    file = TensorFile(path)
    stored = {
        name: Stored(entry.shape, functools.partial(tensor_pieces, file, name), DTYPES.get(entry.dtype))
        for name, entry in file.entries.items()
    }
    return load_stored(stored, config, dtype=dtype, shardings=shardings, source=f"{path}")
