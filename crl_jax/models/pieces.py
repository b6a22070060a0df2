"""The bytes of each token of a tokenizer.

Owns: the two spellings of bytes that tokenizers use: byte-level BPE's alphabet of 256 printable characters, and SentencePiece's ``▁`` for
a space with ``<0xNN>`` for single bytes. Promises: for tokens that are not special, the bytes of a sequence of ids, joined, are the UTF-8
text of its decoding (but for a space that some tokenizers drop at the very beginning). Special tokens have no bytes.
"""

from __future__ import annotations

import functools
import re

from crl_jax.models.hf_tokenizer import HFTokenizer
from crl_jax.models.tokenizer import ByteLevelBPE, PieceTokenizer, Tokenizer

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def pieces(tokenizer: Tokenizer) -> tuple[bytes, ...]:
    """``pieces(t)[i]`` are the bytes of id i. Raises ValueError for a tokenizer whose tokens are not known."""
    if isinstance(tokenizer, PieceTokenizer):
        return tuple(tokenizer.decode([i]).encode() for i in range(tokenizer.vocab_size))
    if not isinstance(tokenizer, ByteLevelBPE | HFTokenizer):
        raise ValueError(f"the bytes of the tokens of {type(tokenizer).__name__} are not known: stop strings need a tokenizer of crl_jax")
    special = frozenset(tokenizer.special.values())
    tokens = ["" if i in special else tokenizer.token(i) for i in range(tokenizer.vocab_size)]
    spell = sentence_piece if any("▁" in token for token in tokens) else byte_level  # byte-level BPE spells that character with others
    return tuple(map(spell, tokens))


def byte_level(token: str) -> bytes:
    """Bytes of a token written in byte-level BPE's alphabet, or of an added token, which is plain text."""
    alphabet = _alphabet()
    return bytes(alphabet[c] for c in token) if all(c in alphabet for c in token) else token.encode()


def sentence_piece(token: str) -> bytes:
    """Bytes of a SentencePiece token."""
    byte = _BYTE.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace("▁", " ").encode()


@functools.cache
def _alphabet() -> dict[str, int]:
    """Character -> byte: printable bytes stand for themselves, the others for the characters from 256 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(rest)}
