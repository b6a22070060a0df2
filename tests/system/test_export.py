"""What a finished run leaves to others: both models as Hugging Face folders that say what the run's own weights say."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from crl_jax import cli
from crl_jax.checkpoint import store
from crl_jax.config import load
from crl_jax.learner.state import init_state
from crl_jax.lookup import role_parts
from crl_jax.models import transformer
from crl_jax.models.config import ModelConfig
from crl_jax.models.load import load_params
from crl_jax.models.params import Params
from crl_jax.role_settings import optimizer_of

pytestmark = pytest.mark.system


@pytest.mark.usefixtures("compiled_in_haste")
def test_both_exported_roles_have_the_logits_of_the_checkpoint(finished, tmp_path: pathlib.Path) -> None:
    folder, logits = finished[0] / "smoke", jax.jit(_logits, static_argnums=0)
    config = load(folder / "config.yaml")
    for name, role in (("actor", config.actor), ("extractor", config.extractor)):
        out, parts = tmp_path / name, role_parts(config, name)
        assert cli.main(["ckpt", "export-hf", str(folder), str(out), "--role", name, "--dtype", "float32"]) == 0
        like = init_state(parts.params, optimizer_of(config, name, role))
        trained = store.restore_tree(folder / "checkpoints", 3, name, like).params
        ids = jnp.asarray([parts.codec.encode("go east, a dark room with a door")], jnp.int32)
        weights = (load_params(str(out), parts.model, seed=0), trained, parts.params)
        exported, expected, first = (np.asarray(logits(parts.model, params, ids)) for params in weights)
        np.testing.assert_array_equal(exported, expected)
        assert np.abs(exported - first).max() > 1e-5, f"the run has trained the {name}"


def _logits(model: ModelConfig, params: Params, ids: jax.Array) -> jax.Array:
    places = jnp.arange(ids.shape[1])[None]
    return transformer.unembed(model, params, transformer.hidden_states(model, params, ids, places)[0])
