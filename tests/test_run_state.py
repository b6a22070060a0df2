"""What may be resumed: only the same run."""

import pathlib
import types

import numpy as np
import pytest

from crl_jax.checkpoint import CheckpointError, save
from crl_jax.config.load import parse_text
from crl_jax.job import Job
from crl_jax.run_state import RunCounters, adapters_of, restore_run
from crl_jax.telemetry.totals import Totals
from crl_jax.telemetry.tracker import FanOut


def test_a_run_whose_checkpoints_are_all_damaged_does_not_begin_again_by_itself(tmp_path: pathlib.Path) -> None:
    save(tmp_path / "checkpoints", 1, {"actor": {"w": np.zeros(1)}}, {})
    (tmp_path / "checkpoints" / "step_00000001" / "manifest.json").write_text("{}")
    run = types.SimpleNamespace(config=None, folder=tmp_path, job=Job(), roles={}, saved_bank=None)
    with pytest.warns(RuntimeWarning, match="is damaged"), pytest.raises(CheckpointError, match=r"every checkpoint in .* is damaged"):
        restore_run(run)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        pytest.param("run.method=static", "holds a complementary run", id="method"),
        pytest.param("run.seed=7", "set run.seed=3", id="seed"),
    ],
)
def test_another_run_is_not_continued(override: str, message: str, tmp_path: pathlib.Path) -> None:
    saved = {"counters": {}, "versions": {}, "method": "complementary", "seed": 3}
    save(tmp_path / "checkpoints", 1, {"actor": {"w": np.zeros(1)}}, {"run": saved})
    config = parse_text("env: {family: dungeon}\nrun: {seed: 3}\n", [override])
    run = types.SimpleNamespace(config=config, folder=tmp_path, job=Job(), roles={}, saved_bank=None)
    with pytest.raises(CheckpointError, match=message):
        restore_run(run)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        pytest.param("actor.lora.rank=8", "set actor.lora.rank=4, or", id="rank"),
        pytest.param("actor.lora.rank=0", "holds adapters of rank 4 of the actor", id="all-weights"),
        pytest.param("actor.lora.alpha=32", r"set actor.lora.alpha=16.0, or", id="scale"),
        pytest.param("actor.lora.targets=[q]", r"set actor.lora.targets=\[q,v\], or", id="targets"),
        pytest.param("actor.weights=other.safetensors", "set actor.weights=weights/old.safetensors, or", id="weights"),
        pytest.param("extractor.lora.rank=1", "holds all weights of the extractor .* set extractor.lora.rank=0", id="adapters-now"),
    ],
)
def test_R15_adapters_are_not_put_on_other_weights(override: str, message: str, tmp_path: pathlib.Path) -> None:
    """Most of these restore without any array of the wrong shape: the merged weights would just be others."""
    text = "env: {family: dungeon}\nactor: {weights: weights/old.safetensors, lora: {rank: 4, targets: [q, v]}}\n"
    before = parse_text(text, [])
    roles = {"actor": before.actor, "extractor": before.extractor}
    adapters = {name: adapters_of(before, name) for name in roles}
    versions = dict.fromkeys(roles, 1)
    saved = {"counters": {"step": 1}, "versions": versions, "method": before.run.method, "seed": before.run.seed, "adapters": adapters}
    save(tmp_path / "checkpoints", 1, {name: {"w": np.zeros(1)} for name in roles}, {"run": saved})

    unused = {"totals": Totals(), "counted": dict, "trackers": FanOut(()), "go_on": lambda carried: None, "joined": lambda row, what: row}

    def restore(config: object) -> RunCounters:
        fake = {name: types.SimpleNamespace(name=name, state={"w": np.zeros(1)}, restore=lambda state, version: None) for name in roles}
        return restore_run(types.SimpleNamespace(config=config, folder=tmp_path, job=Job(), roles=fake, saved_bank=None, **unused))  # pyright: ignore[reportArgumentType]

    assert restore(before).step == 1
    assert restore(parse_text(text, ["actor.weights=/elsewhere/old.safetensors"])).step == 1
    with pytest.raises(CheckpointError, match=message):
        restore(parse_text(text, [override]))
