"""Which weights are served: those of the configuration, of a file, of a checkpoint, with adapters or without."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from crl_jax.checkpoint import store as checkpoints
from crl_jax.checkpoint.manifest import CheckpointError
from crl_jax.config import ConfigError, load
from crl_jax.learner.state import init_state
from crl_jax.lookup import role_parts
from crl_jax.models.lora import init_adapters, merge
from crl_jax.models.params import flatten
from crl_jax.models.safetensors_io import save_params
from crl_jax.models.transposed import transposed
from crl_jax.role_settings import lora_of, optimizer_of
from crl_jax.run_state import adapters_of
from crl_jax.served_role import Source, load_role

QUICKSTART = pathlib.Path(__file__).resolve().parents[1] / "configs" / "quickstart.yaml"


def same(found, expected):
    a, b = jax.tree.leaves(found), jax.tree.leaves(transposed(expected))
    assert len(a) == len(b) > 10
    for x, y in zip(a, b, strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def changed(params, factor):
    return jax.tree.map(lambda leaf: leaf * factor, params)


def save(config, root, step, trained, version):
    states = {name: init_state(tree, optimizer_of(config, name, getattr(config, name))) for name, tree in trained.items()}
    records = {"run": {"versions": dict.fromkeys(trained, version), "adapters": {name: adapters_of(config, name) for name in trained}}}
    checkpoints.save(root / "checkpoints", step, states, records)


def test_the_configurations_weights_or_those_of_a_file(tmp_path):
    config = load(QUICKSTART)
    params = role_parts(config, "actor").params
    served = load_role(config, "actor", Source())
    same(served.params, params)
    assert (served.version, served.model.name, served.engine_options["max_length"], served.trie) == (0, "micro", 192, None)
    save_params(changed(params, 2.0), tmp_path / "two.safetensors")
    same(load_role(config, "actor", Source(weights=str(tmp_path / "two.safetensors"))).params, changed(params, 2.0))
    same(served.load(tmp_path / "two.safetensors"), changed(params, 2.0))
    with pytest.raises(ConfigError, match=r"`actor\.weights`"):
        load_role(config, "actor", Source(weights=str(tmp_path / "none")))


def test_a_checkpoints_weights_and_version_of_the_role_that_is_asked_for(tmp_path):
    config = load(QUICKSTART)
    params = role_parts(config, "actor").params
    for step, factor in ((3, 3.0), (5, 5.0)):
        save(config, tmp_path, step, {"actor": changed(params, factor), "extractor": changed(params, -factor)}, version=10 * step)
    newest, older = load_role(config, "actor", Source(run=tmp_path)), load_role(config, "extractor", Source(run=tmp_path, step=3))
    same(newest.params, changed(params, 5.0))
    same(older.params, changed(params, -3.0))
    assert (newest.version, older.version) == (50, 30)
    with pytest.raises(ConfigError, match="no complete checkpoint: correct --run"):
        load_role(config, "actor", Source(run=tmp_path / "nothing"))
    with pytest.raises(CheckpointError, match="missing"):
        load_role(config, "actor", Source(run=tmp_path, step=4))
    with pytest.raises(CheckpointError, match=r"set actor\.lora\.rank=0"):
        load_role(load(QUICKSTART, ["actor.lora.rank=2"]), "actor", Source(run=tmp_path))


def test_a_checkpoint_of_adapters_is_merged(tmp_path):
    config = load(QUICKSTART, ["actor.lora.rank=2"])
    base, lora = role_parts(config, "actor").params, lora_of(config.actor)
    adapters = jax.tree.map(lambda leaf: leaf + 0.01, init_adapters(base, lora, jax.random.key(1)))
    save(config, tmp_path, 1, {"actor": adapters}, version=1)
    found = flatten_leaves(load_role(config, "actor", Source(run=tmp_path)).params)
    for x, y in zip(found, flatten_leaves(transposed(merge(base, adapters, lora))), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)
    name = "layers.0.attn.q"
    assert float(jnp.abs(flatten(merge(base, adapters, lora))[name] - flatten(base)[name]).max()) > 0


def flatten_leaves(tree):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]
