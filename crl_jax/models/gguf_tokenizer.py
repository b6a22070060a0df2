"""The tokenizer inside a GGUF file.

Owns: turning the vocabulary, merges and pre-tokenizer name of a file with a byte-level BPE into a tokenizer definition. Promises: a
pre-tokenizer it does not know is an error, never another one's rules. Does not: read SentencePiece vocabularies (Gemma): those need the
model folder's tokenizer.json.
"""

from __future__ import annotations

from typing import Any

from crl_jax.models.gguf import GGUFFile

CONTROL, USER_DEFINED = 3, 4  # GGUF token types
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _split(digits: str) -> dict[str, Any]:
    """Split into words, ``digits`` digits at a time, before the bytes are mapped to characters."""
    return {
        "type": "Sequence",
        "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": _WORDS % digits}, "behavior": "Isolated", "invert": False},
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
        ],
    }


_SINGLE_DIGITS = {
    "type": "Sequence",
    "pretokenizers": [
        {"type": "Digits", "individual_digits": True},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    ],
}
# name in the file -> (normalizer, pre-tokenizer, whether a word that is in the vocabulary is taken whole, without its merges)
PRE_TOKENIZERS: dict[str, tuple[dict[str, Any] | None, dict[str, Any], bool]] = {
    "smollm": (None, _SINGLE_DIGITS, False),
    "qwen2": ({"type": "NFC"}, _split(""), False),
    "llama-bpe": (None, _split("{1,3}"), True),
}


def gguf_tokenizer_definition(file: GGUFFile) -> dict[str, Any]:
    """The content of an equivalent tokenizer.json. Raises ValueError for a vocabulary that is not byte-level BPE or has unknown rules."""
    model, pre = file.field("tokenizer.ggml.model"), file.field("tokenizer.ggml.pre", "default")
    if model != "gpt2" or pre not in PRE_TOKENIZERS:
        raise ValueError(
            f"{file.path} has a `{model}` vocabulary with pre-tokenizer `{pre}`: only byte-level BPE with one of {sorted(PRE_TOKENIZERS)} "
            "is read from GGUF; set the tokenizer to a Hugging Face folder with this model's tokenizer.json"
        )
    normalizer, pre_tokenizer, whole_words = PRE_TOKENIZERS[pre]
    tokens, types = file.field("tokenizer.ggml.tokens"), file.field("tokenizer.ggml.token_type")
    added = [
        {
            "id": i,
            "content": token,
            "special": kind == CONTROL,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
        }
        for i, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in (CONTROL, USER_DEFINED)
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": whole_words,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": list(file.field("tokenizer.ggml.merges")),
        },
    }
