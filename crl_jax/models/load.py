"""Models and tokenizers by the names a configuration uses.

Owns: the meaning of ``random``, ``builtin:NAME`` and a path. Promises: an unknown name is an error that lists the known ones; nothing is
downloaded. Does not: place parameters on a mesh.
"""

from __future__ import annotations

import pathlib

import jax
import jax.numpy as jnp

from crl_jax.models import transformer
from crl_jax.models.chat import chatml, micro_chat
from crl_jax.models.codec import ChatCodec
from crl_jax.models.config import ModelConfig
from crl_jax.models.gguf import load_smollm2, load_smollm2_tokenizer
from crl_jax.models.params import Params
from crl_jax.models.safetensors_io import load_params as read_params
from crl_jax.models.tokenizer import ByteLevelBPE, PieceTokenizer

MICRO_VOCAB = pathlib.Path(__file__).with_name("micro_vocab.txt")
MICRO_WEIGHTS = pathlib.Path(__file__).with_name("micro.safetensors")
BUILTIN = ("builtin:micro", "builtin:smollm2-135m")


def load_codec(name: str) -> ChatCodec:
    """Tokenizer and chat template of a builtin name, a ``.txt`` piece vocabulary (micro chat) or a saved byte-level BPE ``.json`` (ChatML).

    Raises ValueError for anything else.
    """
    if name == "builtin:micro":
        tokenizer = PieceTokenizer.load(MICRO_VOCAB)
        return ChatCodec(tokenizer, micro_chat(tokenizer))
    if name == "builtin:smollm2-135m":
        bpe = load_smollm2_tokenizer()
        return ChatCodec(bpe, chatml(bpe))
    path = pathlib.Path(name)
    if path.suffix == ".txt" and path.exists():
        pieces = PieceTokenizer.load(path)
        return ChatCodec(pieces, micro_chat(pieces))
    if path.suffix == ".json" and path.exists():
        saved = ByteLevelBPE.load(path)
        return ChatCodec(saved, chatml(saved))
    raise ValueError(f"tokenizer {name!r}: use one of {list(BUILTIN)}, a piece vocabulary (.txt) or a saved byte-level BPE (.json)")


def load_params(name: str, config: ModelConfig, *, seed: int) -> Params:
    """Float32 parameters of ``config``: fresh (``random``), a builtin name or a safetensors file."""
    if name == "random":
        return transformer.init(config, jax.random.key(seed))
    if name == "builtin:micro":
        return read_params(config, MICRO_WEIGHTS, dtype=jnp.float32)
    if name == "builtin:smollm2-135m":
        return jax.tree.map(jnp.asarray, load_smollm2())
    if pathlib.Path(name).exists():
        return read_params(config, name, dtype=jnp.float32)
    raise ValueError(f"weights {name!r}: use `random`, one of {list(BUILTIN)}, or the path of a safetensors file")
