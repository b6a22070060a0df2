"""Models, weights and tokenizers by the names a configuration uses.

Owns: the meaning of ``random``, ``builtin:NAME``, a preset's name and a path (a Hugging Face folder, a GGUF file, a file of our own).
Promises: an unknown name is an error that lists the known ones; weights go straight to where they are to be; nothing is downloaded.
Does not: choose shardings.
"""

from __future__ import annotations

import functools
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp

from crl_jax.models import transformer
from crl_jax.models.chat import chatml, micro_chat
from crl_jax.models.codec import ChatCodec
from crl_jax.models.config import ModelConfig, check_same_model
from crl_jax.models.gguf import GGUFFile, gguf_config, stored_gguf
from crl_jax.models.gguf_tokenizer import gguf_tokenizer_definition
from crl_jax.models.hf_config import read_hf_config
from crl_jax.models.hf_tokenizer import HFTokenizer
from crl_jax.models.hf_weights import stored_hf
from crl_jax.models.jinja_chat import TemplateRenderer, template_codec
from crl_jax.models.params import Params
from crl_jax.models.presets import PRESETS, preset
from crl_jax.models.safetensors_io import load_params as read_params
from crl_jax.models.smollm2 import load_smollm2, load_smollm2_tokenizer
from crl_jax.models.stream import load_stored
from crl_jax.models.tokenizer import ByteLevelBPE, PieceTokenizer

MICRO_VOCAB = pathlib.Path(__file__).with_name("micro_vocab.txt")
MICRO_WEIGHTS = pathlib.Path(__file__).with_name("micro.safetensors")
BUILTIN = ("builtin:micro", "builtin:smollm2-135m")
_open_gguf = functools.lru_cache(maxsize=1)(GGUFFile)  # config, weights and tokenizer are asked for in turn; parsing takes seconds


def load_config(name: str, *, vocab_size: int | None = None) -> ModelConfig:
    """The shape of a preset (with ``vocab_size``, when given, as the size of its vocabulary), a Hugging Face folder or a GGUF file.

    A checkpoint's vocabulary is its own: ``vocab_size`` does not change it. Raises ValueError for anything else.
    """
    path = pathlib.Path(name)
    if name in PRESETS:
        return preset(name, vocab_size=vocab_size)
    if path.is_dir():
        return read_hf_config(path)
    if path.suffix == ".gguf" and path.exists():
        return gguf_config(_open_gguf(path))
    raise ValueError(f"unknown model preset `{name}`: use one of {sorted(PRESETS)}, a Hugging Face model folder or a GGUF file")


def load_codec(name: str) -> ChatCodec:
    """Tokenizer and chat template of a builtin name, a Hugging Face folder or GGUF file (with its own template), a ``.txt`` piece
    vocabulary (micro chat) or a saved byte-level BPE ``.json`` (ChatML).

    Raises ValueError for anything else, and for a template that cannot be used (see ``jinja_chat``).
    """
    path = pathlib.Path(name)
    if name == "builtin:micro" or (path.suffix == ".txt" and path.exists()):
        pieces = PieceTokenizer.load(MICRO_VOCAB if name == "builtin:micro" else path)
        return ChatCodec(pieces, micro_chat(pieces))
    if name == "builtin:smollm2-135m" or (path.suffix == ".json" and path.exists()):
        bpe = load_smollm2_tokenizer() if name == "builtin:smollm2-135m" else ByteLevelBPE.load(path)
        return ChatCodec(bpe, chatml(bpe))
    if path.is_dir():
        return _hf_codec(path)
    if path.suffix == ".gguf" and path.exists():
        return _gguf_codec(_open_gguf(path))
    raise ValueError(
        f"tokenizer {name!r}: use one of {list(BUILTIN)}, a Hugging Face model folder, a GGUF file, a piece vocabulary (.txt) or a saved "
        "byte-level BPE (.json)"
    )


def load_params(name: str, config: ModelConfig, *, seed: int, dtype: Any = jnp.float32, shardings: Params | None = None) -> Params:
    """Parameters of ``config`` as ``dtype``: fresh (``random``), of a builtin name, a Hugging Face folder, a GGUF or a safetensors file.

    They are put on ``shardings`` (a Sharding per parameter; None: the default device) one at a time. Raises ValueError when the weights
    are those of another model.
    """
    path = pathlib.Path(name)
    if name == "random":
        return _fresh(config, seed, dtype, shardings)
    if name == "builtin:micro":
        return read_params(config, MICRO_WEIGHTS, dtype=dtype, shardings=shardings)
    if name == "builtin:smollm2-135m":
        return load_smollm2(dtype=dtype, shardings=shardings)
    if path.is_dir():
        check_same_model(config, read_hf_config(path), source=name)
        return load_stored(stored_hf(path, config), config, dtype=dtype, shardings=shardings, source=name)
    if path.suffix == ".gguf" and path.exists():
        file = _open_gguf(path)
        check_same_model(config, gguf_config(file), source=name)
        return load_stored(stored_gguf(file, config), config, dtype=dtype, shardings=shardings, source=name)
    if path.exists():
        return read_params(config, path, dtype=dtype, shardings=shardings)
    raise ValueError(f"weights {name!r}: use `random`, one of {list(BUILTIN)}, a Hugging Face model folder, a GGUF or a safetensors file")


def _fresh(config: ModelConfig, seed: int, dtype: Any, shardings: Params | None) -> Params:
    def make(key: jax.Array) -> Params:
        return jax.tree.map(lambda leaf: leaf.astype(dtype), transformer.init(config, key))

    run = make if shardings is None else jax.jit(make, out_shardings=shardings)  # one device: not worth a compilation
    return run(jax.random.key(seed))


def _hf_codec(folder: pathlib.Path) -> ChatCodec:
    def read(name: str) -> dict[str, Any]:
        path = folder / name
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}

    settings = read("tokenizer_config.json")
    own = folder / "chat_template.jinja"
    template = own.read_text(encoding="utf-8") if own.is_file() else settings.get("chat_template")
    if isinstance(template, list):  # several named ones
        template = next((entry["template"] for entry in template if entry["name"] == "default"), None)
    if not template:
        raise ValueError(f"{folder} has no chat template: it is a base model; put a chat_template.jinja into the folder")
    tokenizer = HFTokenizer.load(folder, markup=template)
    tokens = {key: _content(value) for key, value in settings.items() if key.endswith("_token") and value}
    stops = read("generation_config.json").get("eos_token_id", [])
    renderer = TemplateRenderer(template, tokens, name=f"{folder}")
    return template_codec(tokenizer, renderer, stop_ids=[stops] if isinstance(stops, int) else stops or [])


def _content(token: Any) -> str:
    """A special token is stored as its text, or as an object with it."""
    return token["content"] if isinstance(token, dict) else str(token)


def _gguf_codec(file: GGUFFile) -> ChatCodec:
    template = file.field("tokenizer.chat_template")
    if not template:
        raise ValueError(f"{file.path} has no chat template: it is a base model; set the tokenizer to a folder that has one")
    definition = gguf_tokenizer_definition(file)
    names = file.field("tokenizer.ggml.tokens")
    ids = {f"{key}_token": file.field(f"tokenizer.ggml.{key}_token_id") for key in ("bos", "eos")}
    renderer = TemplateRenderer(template, {key: names[i] for key, i in ids.items() if i is not None}, name=f"{file.path}")
    return template_codec(HFTokenizer(definition, markup=template), renderer)
