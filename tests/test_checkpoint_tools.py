"""``crl ckpt``: what is told of checkpoints, exports, and what is never deleted."""

import fcntl
import json
import pathlib
import shutil

import jax
import numpy as np
import pytest

from crl_jax import checkpoint_tools, cli
from crl_jax.checkpoint import CheckpointError, save
from crl_jax.checkpoint_tools import NoCheckpoint
from crl_jax.config import ConfigError, load
from crl_jax.config.load import to_yaml
from crl_jax.learner.state import init_state
from crl_jax.lookup import role_parts
from crl_jax.models.hf_weights import stored_hf
from crl_jax.models.load import load_params
from crl_jax.role_settings import optimizer_of
from crl_jax.run_state import adapters_of

SMOKE = pathlib.Path(__file__).resolve().parents[1] / "configs" / "smoke.yaml"
METRIC = "eval/known/with/greedy"
BANK = {"revision": 12, "step": 1, "buffer": json.dumps({"waiting": [["g1", 1.0, 1, 0]], "trained": [], "counts": {}})}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A run's folder with four small checkpoints; the third is damaged, the fourth half-written; the first scored best."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "config.yaml").write_text(to_yaml(load(SMOKE, [f"run.keep_best.metric={METRIC}", "run.keep_last=1"])))
    for step, value in ((1, 0.75), (2, 0.5), (3, 0.9)):
        run = {
            "counters": {"step": step, "env_steps": 10 * step, "extractor_updates": 1},
            "versions": {"actor": step},
            "method": "complementary",
            "seed": 3,
            "metrics": {METRIC: value},
        }
        state = {"params": {"w": np.zeros((4, 2), np.float32)}, "step": np.int32(step)}
        save(folder / "checkpoints", step, {"actor": state}, {"run": run, "bank": BANK})
    (folder / "checkpoints" / "step_00000003" / "records" / "bank.json").write_text("{}")
    (folder / "checkpoints" / "step_00000004" / "arrays").mkdir(parents=True)
    return folder


@pytest.fixture
def folder(made: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
    return shutil.copytree(made, tmp_path / "run")


def test_ls_says_what_is_whole_what_is_best_and_what_is_wrong(made: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["ckpt", "ls", str(made)]) == 0
    _, one, two, three, four = capsys.readouterr().out.splitlines()
    assert one.split()[0] == "1"
    assert "actor 1" in one
    assert " 12 " in one
    assert one.endswith("complete, best")
    assert two.endswith("complete")
    assert "damaged: " in three
    assert "bank.json" in three
    assert four.endswith("half-written")
    rows = [json.loads(line) for line in checkpoint_tools.ls(made, as_json=True)]
    assert [row["state"] for row in rows] == ["complete", "complete", "damaged", "half-written"]
    assert rows[0]["metrics"] == {METRIC: 0.75}


def test_show_says_what_is_inside(made: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.warns(RuntimeWarning, match="skipped"):
        text = "\n".join(checkpoint_tools.show(made))
    assert "step 2, complete" in text
    assert "env_steps: 20" in text
    assert "revision 12, 1 generations wait" in text
    assert "actor.params: 1 arrays, 8 x float32" in text
    assert cli.main(["ckpt", "show", str(made), "--step", "1", "--leaves"]) == 0
    assert "['params']['w'] float32[4, 2]" in capsys.readouterr().out
    assert json.loads(checkpoint_tools.show(made, 1, as_json=True)[0])["counters"]["env_steps"] == 10


def test_mistakes_are_one_line_with_the_fix(made: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["ckpt", "ls", str(tmp_path)]) == 1
    assert "give the folder of a run that has saved" in capsys.readouterr().err
    with pytest.raises(NoCheckpoint, match="it has step 1, step 2"):
        checkpoint_tools.show(made, 7)
    with pytest.raises(CheckpointError, match="its manifest says"):
        checkpoint_tools.show(made, 3)
    with pytest.raises(NoCheckpoint, match="has no extractor: it holds actor"):
        checkpoint_tools.export_hf(made, "extractor", tmp_path / "out", step=1)
    with pytest.raises(ConfigError, match="keep at least the newest"):
        checkpoint_tools.prune(made, last=0)
    (tmp_path / "other" / "checkpoints").mkdir(parents=True)
    with pytest.raises(ConfigError, match="add --metric"):
        checkpoint_tools.prune(tmp_path / "other", best=1)


def test_prune_keeps_the_best_and_the_newest_whole_one(folder: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["ckpt", "prune", str(folder), "--keep-last", "1", "--keep-best", "0", "--dry-run"]) == 0
    assert capsys.readouterr().out.startswith("would delete step 1 (")
    assert len(checkpoint_tools.look(folder)) == 4
    assert checkpoint_tools.prune(folder)[0].startswith("deleted nothing"), "the first is the best, the second the newest whole one"
    assert checkpoint_tools.prune(folder, best=0)[0].startswith("deleted step 1 (")
    assert [one.step for one in checkpoint_tools.look(folder)] == [2, 3, 4]


def test_prune_is_refused_while_a_run_trains(folder: pathlib.Path) -> None:
    with (folder / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="a run trains in"):
            checkpoint_tools.prune(folder, last=1)


def test_an_export_holds_the_weights_of_its_role_and_step(tmp_path: pathlib.Path) -> None:
    config = load(SMOKE)
    parts = role_parts(config, "actor")
    trained = jax.tree.map(lambda leaf: leaf * 2, parts.params)
    state = init_state(trained, optimizer_of(config, "actor", config.actor))
    run = {"versions": {"actor": 5}, "adapters": {"actor": adapters_of(config, "actor")}}
    save(tmp_path / "checkpoints", 3, {"actor": state}, {"run": run})
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    told = checkpoint_tools.export_hf(tmp_path, "actor", tmp_path / "out", dtype="float32")
    assert told[0].endswith("the actor of step 3 (version 5) as float32")
    assert (tmp_path / "out" / "micro_vocab.txt").exists(), told[1]
    assert set(stored_hf(tmp_path / "out", parts.model)) >= {"embed.table", "final_norm.scale"}
    back = load_params(str(tmp_path / "out"), parts.model, seed=0)
    for a, b in zip(jax.tree.leaves(back), jax.tree.leaves(trained), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    with pytest.raises(NoCheckpoint, match="exists"):
        checkpoint_tools.export_hf(tmp_path, "actor", tmp_path / "out")
