"""Weights of a Hugging Face model folder, in both directions.

Owns: the names and the layout of its tensors ([out, in] there, [in, out] here), the index of a folder with several files, and the export.
Promises: every tensor of the folder is used or is an error; a folder that was exported and loaded again gives the same values; an export
appears whole or not at all. Does not: read ``config.json`` (``hf_config``) or tokenizers (``hf_tokenizer``).
"""

from __future__ import annotations

import functools
import json
import os
import pathlib
import re
import shutil
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from crl_jax.models.config import check_same_model
from crl_jax.models.hf_config import read_hf_config, to_hf_config
from crl_jax.models.params import Params, check_complete, flatten
from crl_jax.models.stream import Stored, tensor_pieces
from crl_jax.models.tensor_file import DTYPES, Outgoing, TensorFile, write_tensors
from crl_jax.models.transformer import ModelConfig, param_shapes

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
COPIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)
IGNORED = re.compile(r"(.*\.)?rotary_emb\.inv_freq")  # a constant that old checkpoints carry

_TOP = {"embed.table": "model.embed_tokens.weight", "final_norm.scale": "model.norm.weight", "head.kernel": "lm_head.weight"}
_LAYER = {
    "attn_norm.scale": "input_layernorm.weight",
    **{f"attn.{part}": f"self_attn.{part}_proj.weight" for part in "qkvo"},
    **{f"attn.{part}_bias": f"self_attn.{part}_proj.bias" for part in "qkv"},
    **{f"attn.{part}_norm.scale": f"self_attn.{part}_norm.weight" for part in "qk"},
    **{f"mlp.{part}": f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")},
}
_PRE_NORM = {"mlp_norm.scale": "post_attention_layernorm.weight"}
_SANDWICH = {  # the same name stands for another norm here
    "attn_post_norm.scale": "post_attention_layernorm.weight",
    "mlp_norm.scale": "pre_feedforward_layernorm.weight",
    "mlp_post_norm.scale": "post_feedforward_layernorm.weight",
}


def hf_name(name: str, config: ModelConfig) -> str:
    """The Hugging Face name of the parameter called ``name``. Raises KeyError for one that has none."""
    if name in _TOP:
        return _TOP[name]
    _, layer, rest = name.split(".", 2)
    norms = _SANDWICH if config.post_norms else _PRE_NORM
    return f"model.layers.{layer}.{(_LAYER | norms)[rest]}"


def is_matrix(name: str) -> bool:
    """Whether the parameter is stored transposed: all matrices but the embedding table."""
    return name == "head.kernel" or bool(re.fullmatch(r"layers\.\d+\.(attn\.[qkvo]|mlp\.(gate|up|down))", name))


def stored_hf(folder: str | os.PathLike[str], config: ModelConfig) -> dict[str, Stored]:
    """The parameters of ``config`` in ``folder``, unread. A tensor without a place keeps its own name, so the loader refuses it.

    Raises FileNotFoundError when there are no safetensors files or one that the index names is missing.
    """
    tensors: dict[str, TensorFile] = {name: file for file in _files(pathlib.Path(folder)) for name in file.entries}
    ours: dict[str, str] = {hf_name(name, config): name for name in flatten(param_shapes(config))}
    if config.tie_embeddings:
        tensors.pop("lm_head.weight", None)  # the embedding table again
    found: dict[str, Stored] = {}
    for name, file in tensors.items():
        if not IGNORED.fullmatch(name):
            target = ours.get(name, name)
            transposed = is_matrix(target)
            entry = file.entries[name]
            shape = entry.shape[::-1] if transposed else entry.shape
            found[target] = Stored(shape, functools.partial(tensor_pieces, file, name, transposed), DTYPES.get(entry.dtype))
    return found


def export_hf(
    config: ModelConfig,
    params: Params,
    folder: str | os.PathLike[str],
    *,
    dtype: Any = jnp.bfloat16,
    source: str | os.PathLike[str] | None = None,
    file_bytes: int = 5_000_000_000,
) -> None:
    """Write ``params`` as a Hugging Face model folder that ``transformers`` loads; ``folder`` must not exist.

    ``source`` is the folder the model came from: its config.json is kept (with the new type) and its tokenizer files are copied. Without
    it the config.json is made from ``config`` and there is no tokenizer. Files hold at most ``file_bytes`` of data (more for one larger
    tensor); several get an index. Raises FileExistsError, and ValueError when ``source`` describes another model, a value does not fit
    ``dtype``, or an array is spread over several processes.
    """
    target = pathlib.Path(folder)
    if target.exists():
        raise FileExistsError(f"{target} exists: export to a new folder")
    flat = flatten(params)
    check_complete(flat, flatten(param_shapes(config)), source=f"model `{config.name}`")
    fields = _config_fields(config, np.dtype(dtype).name, None if source is None else pathlib.Path(source))
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    temporary.mkdir(parents=True)
    outgoing = [_outgoing(name, leaf, config, np.dtype(dtype)) for name, leaf in flat.items()]
    write_files(temporary, outgoing, file_bytes)
    (temporary / "config.json").write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
    if source is not None:
        for name in COPIED:
            if (file := pathlib.Path(source) / name).is_file():
                shutil.copyfile(file, temporary / name)
    temporary.rename(target)


def _files(folder: pathlib.Path) -> Iterator[TensorFile]:
    """The files of a folder: those of its index, else the single one."""
    index = folder / INDEX
    if index.is_file():
        for name in sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())):
            if not (folder / name).is_file():
                raise FileNotFoundError(f"{folder / name} is missing, {INDEX} names it: copy the whole model folder")
            yield TensorFile(folder / name)
    elif (folder / SINGLE).is_file():
        yield TensorFile(folder / SINGLE)
    else:
        raise FileNotFoundError(f"{folder} has neither {SINGLE} nor {INDEX}: convert the checkpoint to safetensors first")


def _outgoing(name: str, leaf: Any, config: ModelConfig, dtype: np.dtype[Any]) -> Outgoing:
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        raise ValueError(f"parameter {name} is spread over several processes: gather it (multihost_utils.process_allgather) first")

    def values() -> np.ndarray:
        array = np.asarray(jax.device_get(leaf))
        with np.errstate(over="ignore"):  # an overflow is the error below
            cast = array.astype(dtype)
        if not np.isfinite(cast.astype(np.float32)).all():
            raise ValueError(f"parameter {name} has values that are not finite as {dtype}: export as bfloat16 or float32")
        return cast.T if is_matrix(name) else cast

    shape = tuple(leaf.shape)
    return Outgoing(hf_name(name, config), shape[::-1] if is_matrix(name) else shape, dtype, values)


def write_files(folder: pathlib.Path, tensors: Sequence[Outgoing], file_bytes: int) -> None:
    """Write tensors, named as in ``hf_name``, to one file, or to several and an index when they have more than ``file_bytes`` of data."""
    groups: list[list[Outgoing]] = [[]]
    for tensor in tensors:
        if groups[-1] and sum(t.nbytes for t in groups[-1]) + tensor.nbytes > file_bytes:
            groups.append([])
        groups[-1].append(tensor)
    if len(groups) == 1:
        write_tensors(folder / SINGLE, groups[0])
        return
    names = [f"model-{i:05d}-of-{len(groups):05d}.safetensors" for i in range(1, len(groups) + 1)]
    for name, group in zip(names, groups, strict=True):
        write_tensors(folder / name, group)
    index = {
        "metadata": {"total_size": sum(t.nbytes for t in tensors)},
        "weight_map": {t.name: name for name, group in zip(names, groups, strict=True) for t in group},
    }
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _config_fields(config: ModelConfig, dtype: str, source: pathlib.Path | None) -> dict[str, Any]:
    if source is None:
        return to_hf_config(config, dtype=dtype)
    check_same_model(config, read_hf_config(source), source=f"{source}")
    fields = json.loads((source / "config.json").read_text(encoding="utf-8"))
    return fields | {("dtype" if "dtype" in fields else "torch_dtype"): dtype}
