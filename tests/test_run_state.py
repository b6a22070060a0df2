"""What may be resumed: only the same run."""

import pathlib
import types

import numpy as np
import pytest

from crl_jax.checkpoint import CheckpointError, save
from crl_jax.config.load import parse_text
from crl_jax.run_state import restore_run


def test_a_run_whose_checkpoints_are_all_damaged_does_not_begin_again_by_itself(tmp_path: pathlib.Path) -> None:
    save(tmp_path / "checkpoints", 1, {"actor": {"w": np.zeros(1)}}, {})
    (tmp_path / "checkpoints" / "step_00000001" / "manifest.json").write_text("{}")
    run = types.SimpleNamespace(config=None, folder=tmp_path, actor=None, extractor=None, manager=None)
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
    run = types.SimpleNamespace(config=config, folder=tmp_path, actor=None, extractor=None, manager=None)
    with pytest.raises(CheckpointError, match=message):
        restore_run(run)  # pyright: ignore[reportArgumentType]
