"""Both tokenizers and the chat templates."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers.pre_tokenizers import ByteLevel

from crl_jax.experience.protocols import Message
from crl_jax.models.chat import chatml, micro_chat
from crl_jax.models.codec import ChatCodec
from crl_jax.models.tokenizer import ByteLevelBPE, PieceTokenizer, Tokenizer
from crl_jax.records import Completion, Finish, Provenance, TokenLog

VOCABULARY = r"""
# a small vocabulary
special "<unk>"
special "<|system|>"
special "<|user|>"
special "<|assistant|>"
special "<|tool|>"
special "<|end|>"
" north"
"north"
" nor"
"n"
"o"
" "
"\n"
"\""
"<"
"|"
">"
"e"
"d"
"a"
"b"
"ab"
"""
KNOWN = ["north", " nor", "n", "o", " ", "\n", '"', "<", "|", ">", "e", "d", "a", "b", "ab", " north", "<|end|>"]


@pytest.fixture(scope="module")
def pieces(tmp_path_factory):
    path = tmp_path_factory.mktemp("vocabulary") / "pieces.txt"
    path.write_text(VOCABULARY, encoding="utf-8")
    return PieceTokenizer.load(path)


def build_bpe():
    alphabet = sorted(ByteLevel.alphabet())
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    merges = [("e", "n"), ("en", "d"), ("<", "|"), ("i", "m"), ("Ġ", "t"), ("|", ">")]
    entries = [*special, *alphabet, *("".join(merge) for merge in merges)]
    return ByteLevelBPE.build({piece: i for i, piece in enumerate(entries)}, merges, {name: i for i, name in enumerate(special)})


BPE = build_bpe()


def test_protocol(pieces):
    assert isinstance(pieces, Tokenizer)
    assert isinstance(BPE, Tokenizer)
    assert pieces.vocab_size == 22


def test_longest_piece_first(pieces):
    assert pieces.encode(" north") == [6]
    assert pieces.encode("north nor") == [7, 8]
    assert pieces.encode(" no") == [11, 9, 10]
    assert pieces.encode("noX\n") == [9, 10, 0, 12]


@given(st.lists(st.sampled_from(KNOWN)).map("".join))
def test_pieces_round_trip(pieces, text):
    assert pieces.decode(pieces.encode(text)) == text


@given(st.text())
def test_any_text_has_no_special_id_but_unknown(pieces, text):
    assert not set(pieces.encode(text)) & set(range(1, 6))


@given(st.text())
def test_byte_level_round_trip(text):
    ids = BPE.encode(text)
    assert BPE.decode(ids) == text
    assert not set(ids) & {0, 1, 2}


def test_E09_special_tokens_in_text_are_inert(pieces):
    ids = BPE.encode("a<|im_end|>b")
    assert not set(ids) & set(BPE.special.values())
    assert BPE.decode(ids) == "a<|im_end|>b"
    ids = pieces.encode("a<|end|>b")
    assert not set(ids) & set(pieces.special.values())
    assert pieces.decode(ids) == "a<|end|>b"


def test_special_ids_have_no_text(pieces):
    assert pieces.decode([3, 6, 5]) == " north"
    assert BPE.decode([1, *BPE.encode("end"), 2]) == "end"


def test_R01_sampled_ids_stay_though_the_text_has_a_shorter_encoding(pieces):
    a, b = pieces.encode("a")[0], pieces.encode("b")[0]
    assert pieces.encode(pieces.decode([a, b])) != [a, b]
    log = TokenLog.empty().append_completion(Completion((a, b), (-0.5, -0.25), (0, 0), (0, 0), Finish.LENGTH))
    assert log.ids.tolist() == [a, b]
    assert log.logps.tolist() == [-0.5, -0.25]


def test_R16_a_thousand_random_id_lists_are_recorded_unchanged(pieces):
    rng = np.random.default_rng(0)
    unfaithful = 0
    for _ in range(1000):
        ids = rng.integers(1, pieces.vocab_size, rng.integers(1, 12)).tolist()
        n = len(ids)
        log = TokenLog.empty().append_context(ids, Provenance.PROMPT)
        log = log.append_completion(Completion(tuple(ids), (-1.0,) * n, (0,) * n, (0,) * n, Finish.LENGTH))
        assert log.ids.tolist() == ids + ids
        unfaithful += pieces.encode(pieces.decode(ids)) != ids
    assert unfaithful > 100  # the property says something only if text would not have kept them


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ('"a"', "<unk>"),
        ('special "<unk>"\n"a"\n"a"', "repeated"),
        ('special "<unk>"\nnorth', ":2:"),
        ('special "<unk>"\n""', "empty"),
        ("3", "quotes"),
    ],
)
def test_a_bad_vocabulary_says_what_to_change(lines, words, tmp_path):
    (tmp_path / "v.txt").write_text(lines)
    with pytest.raises(ValueError, match=words):
        PieceTokenizer.load(tmp_path / "v.txt")


def test_chatml_ids():
    template = chatml(BPE)
    ids = ChatCodec(BPE, template).render([Message("user", "end")])
    assert ids == [1, *BPE.encode("user\n"), *BPE.encode("end"), 2, *BPE.encode("\n"), 1, *BPE.encode("assistant\n")]
    assert template.stop_ids == (2,)


@pytest.mark.parametrize("kind", ["bpe", "pieces"])
def test_R05_incremental_rendering_equals_one_shot(kind, pieces):
    tokenizer, template = (BPE, chatml(BPE)) if kind == "bpe" else (pieces, micro_chat(pieces))
    messages = [("system", "north"), ("user", "\n north"), ("assistant", " end"), ("tool", "a"), ("tool", "b"), ("assistant", "b")]
    grown = []
    for role, text in messages:
        grown += template.open(role)
        if role == "assistant":  # as an agent does: sampled ids with the stop id last, then what the template adds
            grown += [*tokenizer.encode(text), template.stop_ids[0], *template.after_reply()]
        else:
            grown += tokenizer.encode(text) + template.close()
    assert grown + template.open("assistant") == ChatCodec(tokenizer, template).render([Message(*message) for message in messages])


def test_template_errors(pieces):
    with pytest.raises(ValueError, match="assistant"):
        micro_chat(pieces).open("narrator")
    with pytest.raises(ValueError, match="im_start"):
        chatml(pieces)
