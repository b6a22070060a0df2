"""Hugging Face folders: exact round trips with one file and several, refusals, and the raw file format against the safetensors library."""

import dataclasses
import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from crl_jax.models.hf_config import read_hf_config
from crl_jax.models.hf_weights import INDEX, export_hf, stored_hf
from crl_jax.models.load import load_codec, load_config, load_params
from crl_jax.models.params import flatten
from crl_jax.models.presets import TINY
from crl_jax.models.stream import load_stored
from crl_jax.models.tensor_file import Outgoing, TensorFile, write_tensors
from crl_jax.models.transformer import init

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"


def tensors_of(folder):
    return {name: leaf for path in sorted(folder.glob("*.safetensors")) for name, leaf in load_file(path).items()}


@pytest.mark.parametrize(
    ("family", "dtype"), [("llama", np.float32), ("qwen2", jnp.bfloat16), ("qwen3", np.float16), ("gemma3", jnp.bfloat16)]
)
@pytest.mark.parametrize("file_bytes", [10**9, 9000])
def test_R15_a_folder_loaded_and_exported_has_the_same_tensors(family, dtype, file_bytes, tmp_path):
    source = GOLDEN / family
    config = read_hf_config(source)
    params = load_stored(stored_hf(source, config), config, dtype=None, source=family)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(dtype)}
    export_hf(config, params, tmp_path / "out", dtype=dtype, source=source, file_bytes=file_bytes)
    before, after = tensors_of(source), tensors_of(tmp_path / "out")
    assert before.keys() == after.keys()
    for name in before:
        np.testing.assert_array_equal(before[name], after[name])
    files = sorted(p.name for p in (tmp_path / "out").glob("*.safetensors"))
    if file_bytes == 9000:
        assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
        assert sorted(set(json.loads((tmp_path / "out" / INDEX).read_text())["weight_map"].values())) == files
    else:
        assert files == ["model.safetensors"]
    assert read_hf_config(tmp_path / "out") == dataclasses.replace(config, name="out")
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_export_without_a_source_writes_a_config_and_with_one_copies_its_tokenizer(tmp_path):
    params = init(TINY, jax.random.key(0))
    export_hf(TINY, params, tmp_path / "plain", dtype=np.float32)
    assert read_hf_config(tmp_path / "plain") == dataclasses.replace(TINY, name="plain")
    jax.tree.map(np.testing.assert_array_equal, load_params(str(tmp_path / "plain"), TINY, seed=0), params)
    source = tmp_path / "source"
    shutil.copytree(GOLDEN / "chat" / "reasoning", source)
    shutil.copy(tmp_path / "plain" / "config.json", source)
    export_hf(TINY, params, tmp_path / "whole", dtype=jnp.bfloat16, source=source)
    assert (tmp_path / "whole" / "chat_template.jinja").read_bytes() == (source / "chat_template.jinja").read_bytes()
    assert json.loads((tmp_path / "whole" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert load_codec(str(tmp_path / "whole")).chat == load_codec(str(GOLDEN / "chat" / "reasoning")).chat
    with pytest.raises(FileExistsError, match="new folder"):
        export_hf(TINY, params, tmp_path / "whole")
    with pytest.raises(ValueError, match="rope_theta"):
        export_hf(dataclasses.replace(TINY, rope_theta=5e5), params, tmp_path / "other", source=source)


def test_export_refuses_what_does_not_fit(tmp_path):
    params = init(TINY, jax.random.key(0))
    params["final_norm"]["scale"] = params["final_norm"]["scale"] * 1e6
    with pytest.raises(ValueError, match=r"final_norm\.scale.*float16"):
        export_hf(TINY, params, tmp_path / "out", dtype=np.float16)
    assert not (tmp_path / "out").exists()
    del params["final_norm"]
    with pytest.raises(ValueError, match=r"missing: final_norm\.scale"):
        export_hf(TINY, params, tmp_path / "out")


@pytest.fixture
def folder(tmp_path):
    shutil.copytree(GOLDEN / "llama", tmp_path / "llama")
    return tmp_path / "llama"


def test_R15_K06_a_missing_or_foreign_tensor_is_named(folder):
    config = read_hf_config(folder)
    tensors = load_file(folder / "model.safetensors")
    up = tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"missing: layers\.1\.mlp\.up"):
        load_params(str(folder), config, seed=0)
    tensors |= {"model.layers.1.mlp.up_proj.weight": up, "model.layers.0.self_attn.sinks": np.zeros(4, np.float32)}
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"unexpected: model\.layers\.0\.self_attn\.sinks"):
        load_params(str(folder), config, seed=0)
    del tensors["model.layers.0.self_attn.sinks"]
    save_file(tensors | {"model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(4, np.float32)}, folder / "model.safetensors")
    load_params(str(folder), config, seed=0)
    with pytest.raises(ValueError, match=r"norm_eps=0\.1"):
        load_params(str(folder), dataclasses.replace(config, norm_eps=0.1), seed=0)


def test_broken_folders_say_what_to_do(folder):
    config = read_hf_config(folder)
    weights = folder / "model.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(data[:-1])
    with pytest.raises(ValueError, match="cut short"):
        load_params(str(folder), config, seed=0)
    weights.write_bytes(b"version https://git-lfs")
    with pytest.raises(ValueError, match="copy it again"):
        load_params(str(folder), config, seed=0)
    save_file({"model.norm.weight": np.zeros(32, np.int8)}, weights)
    with pytest.raises(ValueError, match="missing"):
        load_params(str(folder), config, seed=0)
    with pytest.raises(ValueError, match="I8"):
        list(TensorFile(weights).rows("model.norm.weight"))
    weights.unlink()
    with pytest.raises(FileNotFoundError, match="safetensors"):
        load_params(str(folder), config, seed=0)
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors"}}))
    with pytest.raises(FileNotFoundError, match="copy the whole"):
        load_params(str(folder), config, seed=0)


def test_the_raw_format_is_that_of_the_safetensors_library(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    arrays = {
        "matrix": rng.normal(size=(7, 5)).astype(np.float32),
        "half": rng.normal(size=(3, 4)).astype(jnp.bfloat16),
        "vector": rng.normal(size=6).astype(np.float16),
    }
    write_tensors(tmp_path / "ours", [Outgoing(name, a.shape, a.dtype, lambda a=a: a) for name, a in arrays.items()])
    for name, found in load_file(tmp_path / "ours").items():
        np.testing.assert_array_equal(found, arrays[name])
    save_file(arrays, tmp_path / "theirs")
    monkeypatch.setattr("crl_jax.models.tensor_file.BLOCK_BYTES", 50)  # two rows of the matrix at a time
    file = TensorFile(tmp_path / "theirs")
    assert [first for first, _ in file.rows("matrix")] == [0, 2, 4, 6]
    for name, array in arrays.items():
        np.testing.assert_array_equal(np.concatenate([rows for _, rows in file.rows(name)]), array)
    with pytest.raises(ValueError, match="announced"):
        write_tensors(tmp_path / "bad", [Outgoing("x", (2,), np.dtype(np.float32), lambda: np.zeros(3, np.float32))])


def test_names_of_models_and_weights():
    assert load_config("tiny", vocab_size=9).vocab_size == 9
    assert load_config(str(GOLDEN / "qwen3")).qk_norm
    fresh = load_params("random", TINY, seed=3, dtype=jnp.bfloat16)
    assert flatten(fresh)["layers.0.attn.q"].dtype == jnp.bfloat16
    for call in (lambda: load_config("nothing"), lambda: load_codec("nothing"), lambda: load_params("nothing", TINY, seed=0)):
        with pytest.raises(ValueError, match="Hugging Face model folder"):
            call()
