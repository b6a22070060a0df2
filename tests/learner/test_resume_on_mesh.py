"""A run goes on on devices that are divided otherwise, with the same state and the same weights served. (That each mesh makes the same
update of a state is in ``test_mesh_step``.)"""

import pathlib
import types
from typing import Any

import jax
import numpy as np
import pytest
from toy_model import VOCAB

from crl_jax.checkpoint.background import Saver
from crl_jax.checkpoint.retention import Keep
from crl_jax.config.load import parse_text
from crl_jax.job import Job
from crl_jax.learner import objective
from crl_jax.learner.optimizer import make_optimizer
from crl_jax.models import transformer
from crl_jax.models.config import ModelConfig
from crl_jax.role import Buckets, Role
from crl_jax.run_state import RunCounters, restore_run, save_run
from crl_jax.sharding.mesh import make_mesh
from crl_jax.telemetry.totals import Totals
from crl_jax.telemetry.tracker import FanOut

CONFIG = ModelConfig(name="t", vocab_size=VOCAB + 1, d_model=16, n_layers=1, n_heads=2, n_kv_heads=2, head_dim=8, d_ff=32)


class Listener:
    """A sampler that keeps what is published to it."""

    def publish(self, params, version) -> None:
        self.params, self.version = params, version


def run_on(folder: pathlib.Path, shape: tuple[int, int, int]) -> Any:
    """A run whose actor is divided as (data, fsdp, tensor)."""
    actor = Role(
        "actor",
        model_config=CONFIG,
        params=transformer.init(CONFIG, jax.random.key(0)),
        optimizer=make_optimizer(0.01, eps=1e-3),
        objective=objective.actor(),
        sampler=Listener(),  # type: ignore[arg-type]
        buckets=Buckets.of(rows=8, max_length=16, max_tokens=8),
        temperature=1.0,
        allowed=None,
        mesh=make_mesh(*shape, jax.devices()[: np.prod(shape)]),
    )
    return types.SimpleNamespace(
        config=parse_text("env: {family: dungeon}\n", [f"actor.mesh.data={shape[0]}", f"actor.mesh.fsdp={shape[1]}"]),
        folder=folder,
        actor=actor,
        roles={"actor": actor},
        saved_bank=None,
        job=Job(),
        carried=lambda: None,
        go_on=lambda carried: None,
        joined=lambda row, what: row,
        saver=Saver(folder / "checkpoints", Keep(1)),
        trackers=FanOut(()),
        totals=Totals(),
        counted=dict,
        counters=RunCounters(),
        extractor_updates=0,
        scores={},
    )


@pytest.mark.usefixtures("compiled_in_haste")
def test_K13_a_run_of_fsdp_4_goes_on_with_data_2_and_fsdp_2(tmp_path: pathlib.Path) -> None:
    one, two = run_on(tmp_path, (1, 4, 1)), run_on(tmp_path, (2, 2, 1))
    one.actor.state = jax.tree.map(lambda leaf: leaf + 1, one.actor.state)  # as an update would, every leaf
    one.actor.publish()
    one.counters = RunCounters(1, 30, 0)
    save_run(one)
    one.saver.wait()
    assert restore_run(two) == RunCounters(1, 30, 0)
    assert (two.actor.version, two.actor.sampler.version) == (1, 1)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(two.actor.state), jax.device_get(one.actor.state))
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(two.actor.sampler.params), jax.device_get(one.actor.sampler.params))
    cut = {leaf.sharding.shard_shape(leaf.shape) != leaf.shape for leaf in jax.tree.leaves(two.actor.state.params)}
    assert True in cut, "its weights are divided over fsdp"
    assert all(leaf.sharding.mesh.shape["data"] == 2 for leaf in jax.tree.leaves(two.actor.state))
