"""Models in GGUF files: llama, qwen2, qwen3 and gemma3.

Owns: reading the sizes of such a file, its tensors by name, and undoing its layout (quantisation, transposition, the row order of q and k
in llama files, the 1 that gemma files add to norm weights). Promises: every tensor is used or is an error; tensors are read and
dequantised in blocks when they are asked for. Does not: need llama.cpp, or read tokenizers (``gguf_tokenizer``).

Weights of a quantised file are the quantised ones, expanded: training starts from a quantised model.
"""

from __future__ import annotations

import functools
import os
import pathlib
import re
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from crl_jax.models.config import ModelConfig, RopeScaling
from crl_jax.models.hf_config import FAMILIES
from crl_jax.models.hf_weights import is_matrix
from crl_jax.models.layers import stretch
from crl_jax.models.stream import Piece, Stored

ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3": "gemma3_text"}
LOCAL_EVERY, LOCAL_THETA = 6, 10_000.0  # of Gemma 3, whose files need not say them: every sixth layer is global
GEMMA3_27B_LAYERS = 62  # the one size whose queries are scaled by (d_model / heads)^-0.5, which the file does not say either
BLOCK_ROWS = 256
_TOP = {"token_embd.weight": "embed.table", "output_norm.weight": "final_norm.scale", "output.weight": "head.kernel"}
_LAYER = {
    "attn_norm.weight": "attn_norm.scale",
    **{f"attn_{part}.weight": f"attn.{part}" for part in "qkv"},
    **{f"attn_{part}.bias": f"attn.{part}_bias" for part in "qkv"},
    **{f"attn_{part}_norm.weight": f"attn.{part}_norm.scale" for part in "qk"},
    "attn_output.weight": "attn.o",
    "post_attention_norm.weight": "attn_post_norm.scale",
    "ffn_norm.weight": "mlp_norm.scale",
    **{f"ffn_{part}.weight": f"mlp.{part}" for part in ("gate", "up", "down")},
    "post_ffw_norm.weight": "mlp_post_norm.scale",
}
ROPE_FACTORS = "rope_freqs.weight"  # what the rotary frequencies are divided by: llama3 scaling, written out


class GGUFFile:
    """An open GGUF file of a supported architecture. It is mapped into memory; its pages can be dropped at any time."""

    def __init__(self, path: str | os.PathLike[str]):
        """Raises ImportError without the `gguf` package, FileNotFoundError, and ValueError for an unsupported architecture."""
        try:
            import gguf
        except ImportError as error:
            raise ImportError("reading GGUF files needs the `gguf` package: pip install 'crl-jax[models]'") from error
        self.path = pathlib.Path(path)
        self._dequantize = gguf.quants.dequantize
        self._reader: Any = gguf.GGUFReader(self.path)
        self.architecture = str(self.field("general.architecture"))
        if self.architecture not in ARCHITECTURES:
            raise ValueError(f"{path} has architecture `{self.architecture}`: supported are {sorted(ARCHITECTURES)}")
        self.tensors = {tensor.name: tensor for tensor in self._reader.tensors}

    def field(self, key: str, default: Any = None) -> Any:
        """The value of a metadata key; ``default`` when the file has none."""
        found = self._reader.fields.get(key)
        return default if found is None else found.contents()

    def values(self, name: str, start: int = 0, stop: int | None = None) -> Float[np.ndarray, "..."]:
        """Rows of a tensor, dequantised to float32; matrices are [out, in]."""
        tensor = self.tensors[name]
        return self._dequantize(tensor.data[start:stop], tensor.tensor_type).astype(np.float32, copy=False)


def gguf_config(file: GGUFFile, *, name: str | None = None) -> ModelConfig:
    """The model of a GGUF file, called ``name`` (default: the file's name without its ending).

    Raises ValueError for a missing size or a rotary scaling that is neither linear nor that of Llama 3.
    """

    def get(key: str, default: Any = None) -> Any:
        value = file.field(f"{file.architecture}.{key}", default)
        if value is None:
            raise ValueError(f"{file.path} has no `{file.architecture}.{key}`: convert the model again with a current converter")
        return value

    family = FAMILIES[ARCHITECTURES[file.architecture]]
    gemma = file.architecture == "gemma3"
    layers, d_model, heads = int(get("block_count")), int(get("embedding_length")), int(get("attention.head_count"))
    head_dim = int(get("attention.key_length", d_model // heads))
    theta = float(get("rope.freq_base", 10_000.0))
    local = tuple(i for i in range(layers) if (i + 1) % LOCAL_EVERY) if gemma else ()
    return ModelConfig(
        name=name or file.path.stem,
        vocab_size=int(file.tensors["token_embd.weight"].shape[1]),
        d_model=d_model,
        n_layers=layers,
        n_heads=heads,
        n_kv_heads=int(get("attention.head_count_kv", heads)),
        head_dim=head_dim,
        d_ff=int(get("feed_forward_length")),
        rope_theta=theta,
        rope_scaling=_scaling(file, theta, head_dim),
        norm_eps=_short(get("attention.layer_norm_rms_epsilon")),
        tie_embeddings="output.weight" not in file.tensors,
        max_positions=int(get("context_length")),
        window=int(get("attention.sliding_window")) if local else 0,
        local_layers=local,
        local_rope_theta=float(get("rope.freq_base_swa", LOCAL_THETA)) if local else None,
        embed_scale=d_model**0.5 if gemma else 1.0,
        query_scale=(d_model // heads if layers == GEMMA3_27B_LAYERS else head_dim) ** -0.5 if gemma else None,
        activation="gelu_tanh" if gemma else "silu",
        **family.switches,
    )


def stored_gguf(file: GGUFFile, config: ModelConfig) -> dict[str, Stored]:
    """The parameters of ``config`` in ``file``, unread. Raises ValueError for a tensor the model has no place for."""
    names = {parameter_name(name): name for name in file.tensors if name != ROPE_FACTORS}
    permuted = file.architecture == "llama"

    def stored(ours: str, theirs: str) -> Stored:
        shape = tuple(int(n) for n in file.tensors[theirs].shape)  # fastest dimension first: [in, out], as ours
        if ours == "embed.table":
            shape = shape[::-1]
        head_dim = config.head_dim if permuted and ours.endswith(("attn.q", "attn.k")) else 0
        offset = config.norm_offset if ours.endswith(".scale") else 0.0
        return Stored(shape, functools.partial(_pieces, file, theirs, is_matrix(ours), head_dim, offset))

    return {ours: stored(ours, theirs) for ours, theirs in names.items()}


def parameter_name(gguf_name: str) -> str:
    """Our dotted name for a GGUF tensor name. Raises ValueError for a tensor the model has no place for."""
    if gguf_name in _TOP:
        return _TOP[gguf_name]
    found = re.fullmatch(r"blk\.(\d+)\.(.+)", gguf_name)
    if found is None or found[2] not in _LAYER:
        raise ValueError(f"GGUF tensor `{gguf_name}` has no place in the model: add it to the name table or use another file")
    return f"layers.{found[1]}.{_LAYER[found[2]]}"


def unpermute(rows: Float[np.ndarray, "out in"], head_dim: int) -> Float[np.ndarray, "out in"]:
    """Undo the row order of q and k in llama files: it interleaves the two halves of each head, for a RoPE that rotates adjacent pairs."""
    out, width = rows.shape
    return rows.reshape(out // head_dim, head_dim // 2, 2, width).swapaxes(1, 2).reshape(out, width)


def _pieces(file: GGUFFile, name: str, transposed: bool, head_dim: int, offset: float) -> Iterator[Piece]:
    """Blocks of rows; whole heads when their rows have to be put back in order (``head_dim`` > 0)."""
    shape = tuple(int(n) for n in file.tensors[name].shape[::-1])
    if len(shape) == 1:
        yield (slice(0, shape[0]),), file.values(name) - np.float32(offset)
        return
    step = max(1, BLOCK_ROWS // head_dim) * head_dim if head_dim else BLOCK_ROWS
    for first in range(0, shape[0], step):
        rows = file.values(name, first, first + step)
        rows = unpermute(rows, head_dim) if head_dim else rows
        along, across = slice(first, first + len(rows)), slice(0, shape[1])
        yield ((across, along), rows.T) if transposed else ((along, across), rows)


def _scaling(file: GGUFFile, theta: float, head_dim: int) -> RopeScaling | None:
    """Linear scaling is in the metadata; that of Llama 3 is a tensor of divisors, which must be those of the rule."""
    kind = file.field(f"{file.architecture}.rope.scaling.type", "none")
    if ROPE_FACTORS in file.tensors:
        divisors = file.values(ROPE_FACTORS)
        scaling = RopeScaling("llama3", factor=float(divisors.max()))
        if not np.allclose(divisors, _llama3_divisors(theta, head_dim, scaling), rtol=1e-4):
            raise ValueError(f"{file.path}: its rotary divisors are not those of Llama 3 (factor {scaling.factor}): not supported")
        return scaling
    if kind == "linear":
        return RopeScaling("linear", float(file.field(f"{file.architecture}.rope.scaling.factor")))
    if kind != "none":
        raise ValueError(f"{file.path}: rotary scaling `{kind}` is not supported: only linear and that of Llama 3 are")
    return None


def _llama3_divisors(theta: float, head_dim: int, scaling: RopeScaling) -> Float[np.ndarray, " half"]:
    frequency = np.float32(theta) ** (-np.arange(head_dim // 2, dtype=np.float32) * 2 / head_dim)
    return frequency / np.asarray(stretch(jnp.asarray(frequency), scaling))


def _short(value: Any) -> float:
    """The decimal number that a float32 of the file was written from: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))
