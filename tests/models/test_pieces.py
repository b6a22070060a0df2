"""The bytes of tokens: joined, they are the text of what the tokenizer decodes."""

import pytest

from crl_jax.models.load import load_codec
from crl_jax.models.pieces import byte_level, pieces, sentence_piece
from crl_jax.models.tokenizer import ByteLevelBPE, PieceTokenizer

TEXT = "The café costs 3 € \n\n now, naïve 😀 ok"


def small_bpe() -> ByteLevelBPE:
    from crl_jax.models.pieces import _alphabet

    vocab = {character: i for i, character in enumerate(_alphabet())} | {"Th": 256, "<|end|>": 257}
    return ByteLevelBPE.build(vocab, [("T", "h")], {"<|end|>": 257})


def test_byte_level_pieces_join_to_the_utf8_of_the_text():
    tokenizer = small_bpe()
    table, ids = pieces(tokenizer), tokenizer.encode(TEXT)
    assert b"".join(table[i] for i in ids) == TEXT.encode()
    assert table[257] == b"", "a special token has no text"


def test_micro_pieces_are_their_text():
    tokenizer = load_codec("builtin:micro").tokenizer
    assert isinstance(tokenizer, PieceTokenizer)
    table = pieces(tokenizer)
    assert [piece.decode() for piece in table] == [tokenizer.decode([i]) for i in range(tokenizer.vocab_size)]


def test_spellings():
    assert byte_level("Ġhi") == b" hi"
    assert byte_level("\n\n") == b"\n\n", "an added token is plain text"
    assert (sentence_piece("▁the"), sentence_piece("<0x0A>")) == (b" the", b"\n")


def test_an_unknown_tokenizer_is_refused():
    with pytest.raises(ValueError, match="stop strings need a tokenizer of crl_jax"):
        pieces(object())  # type: ignore[arg-type]
