"""Parameter files: exact round trips, smaller storage types, refusal of incomplete files."""

import dataclasses
import struct

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from crl_jax.models.params import flatten
from crl_jax.models.presets import TINY
from crl_jax.models.safetensors_io import load_params, save_params
from crl_jax.models.transformer import init

UNTIED = dataclasses.replace(TINY, tie_embeddings=False, qkv_bias=True, qk_norm=True)


@pytest.mark.parametrize("config", [TINY, UNTIED], ids=["tied", "untied"])
def test_R15_every_parameter_survives_the_file(config, tmp_path):
    params = init(config, jax.random.key(3))
    save_params(params, tmp_path / "p.safetensors")
    loaded = load_params(config, tmp_path / "p.safetensors")
    assert jax.tree.structure(loaded) == jax.tree.structure(params)
    jax.tree.map(np.testing.assert_array_equal, loaded, params)
    assert [p.name for p in tmp_path.iterdir()] == ["p.safetensors"]


@pytest.mark.parametrize(("dtype", "error"), [(jnp.bfloat16, 2**-8), (np.float16, 2**-10)])
def test_storage_type(dtype, error, tmp_path):
    params = init(TINY, jax.random.key(3))
    save_params(params, tmp_path / "p.safetensors", dtype=dtype)
    loaded = load_params(TINY, tmp_path / "p.safetensors")
    assert {leaf.dtype for leaf in jax.tree.leaves(loaded)} == {jnp.dtype("float32")}
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=error, atol=1e-6), loaded, params)
    assert load_params(TINY, tmp_path / "p.safetensors", dtype=None)["embed"]["table"].dtype == dtype


def test_R15_a_deleted_or_added_tensor_is_named(tmp_path):
    path = tmp_path / "p.safetensors"
    save_params(init(TINY, jax.random.key(3)), path)
    tensors = load_file(path)
    save_file({k: v for k, v in tensors.items() if k != "layers.0.attn.k"}, path)
    with pytest.raises(ValueError, match=r"missing: layers\.0\.attn\.k"):
        load_params(TINY, path)
    save_file({**tensors, "layers.0.attn.k_bias": np.zeros(16, np.float32)}, path)
    with pytest.raises(ValueError, match=r"unexpected: layers\.0\.attn\.k_bias"):
        load_params(TINY, path)


@pytest.mark.parametrize(
    "header",
    [
        b"[]",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"a": null}',
        b'{"a": {"dtype": {}, "shape": [1], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, -4]}}',
        b'{"a": {"dtype": "F32", "shape": [1, 2], "data_offsets": [0, 4]}}',
    ],
)
def test_a_header_that_cannot_be_is_a_value_error(header, tmp_path):
    path = tmp_path / "p.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 8)
    with pytest.raises(ValueError, match="no safetensors header"):
        load_params(TINY, path)


def test_a_value_that_overflows_is_refused(tmp_path):
    params = jax.tree.map(lambda a: a * 1e6, init(TINY, jax.random.key(3)))
    with pytest.raises(ValueError, match="bfloat16"):
        save_params(params, tmp_path / "p.safetensors", dtype=np.float16)
    assert list(tmp_path.iterdir()) == []


def test_flat_names():
    assert {"embed.table", "layers.1.attn.q", "layers.0.mlp.down", "final_norm.scale"} <= flatten(init(TINY, jax.random.key(0))).keys()
