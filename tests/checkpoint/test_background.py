"""Saving beside training: what the step waits for, and what becomes of errors."""

import errno
import pathlib
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from crl_jax.checkpoint import latest, restore, retention, save, store
from crl_jax.checkpoint.background import Saver
from crl_jax.checkpoint.retention import Keep
from crl_jax.learner.optimizer import make_optimizer
from crl_jax.learner.placement import state_shardings
from crl_jax.learner.state import init_state
from crl_jax.models.presets import TINY
from crl_jax.models.transformer import param_shapes
from crl_jax.sharding.mesh import make_mesh
from crl_jax.sharding.rules import param_shardings


def held_up(gate: threading.Event):
    """Writes once ``gate`` is open."""

    def write(*arguments: object) -> None:
        assert gate.wait(30)
        store.save(*arguments)  # type: ignore[arg-type]

    return write


def test_P04_a_donating_step_while_the_thread_writes_does_not_reach_the_file(tmp_path: pathlib.Path) -> None:
    gate = threading.Event()
    saver = Saver(tmp_path, Keep(3), write=held_up(gate))
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    state = {"x": jnp.full((1024,), 3.0), "b": jnp.full((8,), 1.5, jnp.bfloat16), "key": jax.random.key(5), "n": jnp.int32(7)}
    saver.save(3, {"s": state}, {})
    after = step(state["x"])
    assert latest(tmp_path) is None, "still being written"
    gate.set()
    saver.wait()
    back = restore(tmp_path, 3, {"s": state | {"x": after}}).arrays["s"]
    assert float(back["x"][0]) == 3.0
    assert float(after[0]) == 4.0
    assert (back["b"].dtype, int(back["n"])) == (jnp.bfloat16, 7)
    assert jax.random.uniform(back["key"]) == jax.random.uniform(jax.random.key(5))


def test_what_is_copied_shares_no_memory_with_the_caller(tmp_path: pathlib.Path) -> None:
    gate, mine = threading.Event(), np.zeros(4)
    saver = Saver(tmp_path, Keep(3), write=held_up(gate))
    saver.save(1, {"s": {"x": mine}}, {})
    mine += 9
    gate.set()
    saver.wait()
    assert restore(tmp_path, 1, {"s": {"x": mine}}).arrays["s"]["x"].tolist() == [0.0] * 4


def test_a_save_waits_for_the_one_before_within_a_deadline_and_it_is_counted(tmp_path: pathlib.Path) -> None:
    gate = threading.Event()
    saver = Saver(tmp_path, Keep(3), wait_s=0.1, write=held_up(gate))
    saver.save(1, {"s": {"x": np.zeros(1)}}, {})
    with pytest.raises(TimeoutError, match=r"step 1 was not written .*run\.save_every"):
        saver.save(2, {"s": {"x": np.zeros(1)}}, {})
    gate.set()
    saver.wait(30)
    saver.save(2, {"s": {"x": np.zeros(1)}}, {})
    saver.wait(30)
    assert (latest(tmp_path), saver.stats()["saves"], saver.stats()["waits"]) == (2, 2, 1)


def test_nothing_is_written_before_what_the_checkpoint_needs_is_on_disk_and_the_step_does_not_wait(tmp_path: pathlib.Path) -> None:
    gate, saver = threading.Event(), Saver(tmp_path, Keep(3))
    saver.save(1, {"s": {"x": np.zeros(1)}}, {}, first=lambda: gate.wait(30))
    assert not tmp_path.joinpath("step_00000001").exists()
    gate.set()
    saver.wait(30)

    def refused() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    saver.save(2, {"s": {"x": np.zeros(1)}}, {}, first=refused)
    with pytest.raises(OSError, match="No space left"):
        saver.wait(30)
    assert store.steps(tmp_path) == [1]


def test_K04_a_full_disk_in_the_thread_reaches_the_next_step_and_the_older_checkpoint_stays(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1, {"s": {"x": np.ones(3)}}, {"run": {}})

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(tmp_path))

    monkeypatch.setattr(store, "write_tree", full)
    saver = Saver(tmp_path, Keep(1))
    saver.save(2, {"s": {"x": np.zeros(3)}}, {"run": {}})
    with pytest.raises(OSError, match="No space left") as error:
        until_raised(saver)
    assert error.value.errno == errno.ENOSPC, "the command line knows it by this, and exits with 1"
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000001"], "what was half-written would take up the space that is missing"
    monkeypatch.undo()
    saver.save(2, {"s": {"x": np.zeros(3)}}, {"run": {}})
    saver.wait()
    assert latest(tmp_path) == 2


def test_K04_an_array_writer_that_fails_for_want_of_space_says_so(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Free:
        free = 10**12

    def vague(*_: object) -> None:
        Free.free = 0
        raise ValueError("UNKNOWN: writing failed")

    monkeypatch.setattr(store, "write_tree", vague)
    monkeypatch.setattr(store.shutil, "disk_usage", lambda path: Free)
    with pytest.raises(OSError, match="a checkpoint needs"):
        save(tmp_path, 1, {"s": {"x": np.zeros(3)}}, {})


def until_raised(saver: Saver) -> None:
    end = time.monotonic() + 30
    while time.monotonic() < end:
        saver.check()
        time.sleep(0.01)


def keep(tmp_path: pathlib.Path, values: dict[int, float | None], rule: Keep) -> list[int]:
    """The steps that are left after saving these, each with its value of the metric ``m``."""
    saver = Saver(tmp_path, rule)
    for step, value in values.items():
        saver.save(step, {"s": {"x": np.zeros(1)}}, {"run": {"metrics": {} if value is None else {"m": value}}})
    saver.wait()
    return store.steps(tmp_path)


@pytest.mark.parametrize(
    ("rule", "left"),
    [
        pytest.param(Keep(1), [6], id="last"),
        pytest.param(Keep(1, 1, "m"), [3, 6], id="best-the-newer-of-equals"),
        pytest.param(Keep(1, 2, "m"), [2, 3, 6], id="two"),
        pytest.param(Keep(1, 1, "m", lowest=True), [4, 6], id="lowest"),
        pytest.param(Keep(2, 1, "other"), [5, 6], id="never-measured"),
    ],
)
def test_the_best_stay_beside_the_newest(rule: Keep, left: list[int], tmp_path: pathlib.Path) -> None:
    values = {1: 0.5, 2: 0.8, 3: 0.8, 4: 0.1, 5: float("nan"), 6: None}
    assert keep(tmp_path, values, rule) == left


def test_pruning_never_costs_the_newest_whole_one_although_damaged_ones_are_newer(tmp_path: pathlib.Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step, {"s": {"x": np.zeros(1)}}, {"run": {}})
    for step in (2, 3):
        (tmp_path / f"step_{step:08d}" / "records" / "run.json").write_text("[]")
    assert retention.prune(tmp_path, Keep(1)) == [2]
    assert store.steps(tmp_path) == [1, 3]
    with pytest.warns(RuntimeWarning, match="was changed"):
        assert latest(tmp_path) == 1


def test_a_state_goes_on_on_another_mesh_with_the_same_values(tmp_path: pathlib.Path) -> None:
    """Saved from one device, restored with ``data`` = 2 and with ``fsdp`` = 2: parameters and moments, by the rules of the real model."""
    optimizer, rng = make_optimizer(0.01), np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), leaf.dtype), param_shapes(TINY))
    state = init_state(params, optimizer)._replace(step=jnp.int32(4))
    state = state._replace(opt_state=jax.tree.map(lambda leaf: leaf + 1, state.opt_state))
    saver = Saver(tmp_path, Keep(1))
    saver.save(4, {"actor": state}, {})
    saver.wait()
    like = jax.eval_shape(lambda: state)
    for shape in ((2, 1), (1, 2)):
        mesh = make_mesh(*shape, 1, jax.devices()[:2])
        where = state_shardings(like, optimizer, param_shardings(TINY, mesh), mesh)
        wanted = jax.tree.map(lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), like, where)
        back = restore(tmp_path, 4, {"actor": wanted}).arrays["actor"]
        assert all(a.sharding == b for a, b in zip(jax.tree.leaves(back), jax.tree.leaves(where), strict=True))
        assert shape == (2, 1) or any(not leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(back.params))
        for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(back), strict=True):
            assert (a.dtype, np.asarray(a).tobytes()) == (b.dtype, np.asarray(b).tobytes())
