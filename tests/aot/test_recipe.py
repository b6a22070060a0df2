"""Which model a recipe's programs are compiled for."""

import dataclasses
import json
import pathlib

import pytest

from crl_jax.aot.recipe import recipe_model
from crl_jax.config.roles import RoleConfig
from crl_jax.models.hf_config import to_hf_config
from crl_jax.models.load import load_codec
from crl_jax.models.presets import preset


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    """A checkpoint folder of which only the configuration is there."""
    place = tmp_path / "checkpoint"
    place.mkdir()
    (place / "config.json").write_text(json.dumps(to_hf_config(preset("qwen3-0.6b"), dtype="bfloat16")))
    return place


def test_a_checkpoint_folder_is_read_without_its_weights_or_tokenizer(folder: pathlib.Path) -> None:
    found = recipe_model("actor", RoleConfig(model=str(folder), weights=str(folder), tokenizer="not there"))
    wanted = preset("qwen3-0.6b")
    assert found == dataclasses.replace(wanted, name="checkpoint")


def test_a_preset_needs_no_files_but_must_be_the_model_of_a_folder_that_is_there(folder: pathlib.Path) -> None:
    absent = RoleConfig(model="qwen3-4b", weights="weights/not-there", tokenizer="weights/not-there")
    assert recipe_model("actor", absent) == preset("qwen3-4b")
    assert recipe_model("actor", RoleConfig(model="qwen3-0.6b", weights=str(folder))) == preset("qwen3-0.6b")
    with pytest.raises(ValueError, match=r"`extractor\.model`: model `qwen3-4b` is not that of .*d_model=2560 instead of 1024"):
        recipe_model("extractor", RoleConfig(model="qwen3-4b", weights=str(folder)))


def test_fresh_weights_have_the_vocabulary_of_the_tokenizer_as_in_a_run() -> None:
    found = recipe_model("actor", RoleConfig(model="qwen3-0.6b", weights="random", tokenizer="builtin:micro"))
    assert found.vocab_size == load_codec("builtin:micro").tokenizer.vocab_size


@pytest.mark.parametrize("model", ["qwen9", "."])
def test_a_model_that_cannot_be_had_names_the_key(model: str) -> None:
    with pytest.raises(ValueError, match=r"`actor\.model`: "):
        recipe_model("actor", RoleConfig(model=model, weights="weights/not-there"))
