"""Checkpoints: commit point, kills, templates, donation, foreign files."""

import errno
import json
import pathlib
import shutil
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from crl_jax.checkpoint import CheckpointError, inside, latest, prune, read_records, restore, save, store
from crl_jax.processes import Processes


def tree(value: float = 1.0) -> dict[str, object]:
    params = {"w": jnp.full((4, 2), value, jnp.float32), "b": jnp.full((2,), value, jnp.bfloat16)}
    return {"params": params, "opt": optax.adamw(1e-3).init(params), "key": jax.random.key(3)}


def bits(leaf: jax.Array) -> bytes:
    data = jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
    return np.asarray(data).tobytes()


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A root with one good checkpoint, step 10; tests copy it."""
    root = tmp_path_factory.mktemp("good")
    save(root, 10, {"actor": tree()}, {"counters": {"episodes": 7, "rate": 0.1 + 0.2}, "ids": ["a", "b"]})
    return root


@pytest.fixture
def root(good: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
    return shutil.copytree(good, tmp_path / "checkpoints")


def test_everything_comes_back_bit_for_bit(root: pathlib.Path) -> None:
    back = restore(root, 10, {"actor": tree(9.0)})
    assert back.step == 10
    assert back.records == {"counters": {"episodes": 7, "rate": 0.1 + 0.2}, "ids": ["a", "b"]}
    assert read_records(root, 10) == back.records
    old, new = jax.tree.leaves_with_path(tree()), jax.tree.leaves_with_path(back.arrays["actor"])
    assert [p for p, _ in old] == [p for p, _ in new]
    assert all(a.dtype == b.dtype and bits(a) == bits(b) for (_, a), (_, b) in zip(old, new, strict=True))
    assert jax.random.uniform(back.arrays["actor"]["key"]) == jax.random.uniform(jax.random.key(3))


def test_K03_half_written_steps_are_passed_over_and_replaced(root: pathlib.Path) -> None:
    (root / "step_00000020" / "arrays").mkdir(parents=True)
    (root / "step_00000030").mkdir()
    (root / "step_00000030" / "manifest.json.tmp").write_text("{}")
    assert latest(root) == 10
    save(root, 15, {"x": {"a": np.ones(1)}}, {})
    assert latest(root) == 15
    save(root, 20, {"x": {"a": np.ones(1)}}, {})
    assert latest(root) == 20
    with pytest.raises(CheckpointError, match="half-written"):
        restore(root, 30, {})


def test_K03_a_damaged_step_is_passed_over_loudly(root: pathlib.Path) -> None:
    shutil.copytree(root / "step_00000010", root / "step_00000011")
    (root / "step_00000011" / "records" / "ids.json").write_text('["a", "c"]')
    with pytest.warns(RuntimeWarning, match="was changed"):
        assert latest(root) == 10
    with pytest.raises(CheckpointError, match="was changed"):
        restore(root, 11, {"actor": tree()})
    largest = max((p for p in (root / "step_00000010" / "arrays").rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-1])
    shutil.rmtree(root / "step_00000011")
    with pytest.warns(RuntimeWarning, match="bytes, its manifest says"):
        assert latest(root) is None


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda row: [], "is damaged: TypeError"),
        (lambda row: {**row, "leaves": None}, "is damaged: AttributeError"),
        (lambda row: {k: v for k, v in row.items() if k != "files"}, "is damaged: KeyError: 'files'"),
        (lambda row: {**row, "note": 1}, "unexpected keyword argument 'note'"),
        (lambda row: {**row, "step": 9}, "is that of step 9"),
        (lambda row: {**row, "format": 2}, "has format 2, this version reads 1"),
        (lambda row: {**row, "records": ["ids", "more"]}, "it lists the records"),
        (lambda row: {**row, "files": {**row["files"], "../../x": 1}}, "leads outside"),
    ],
)
def test_K03_an_edited_manifest_is_passed_over_and_its_step_is_saved_again(edit, said: str, root: pathlib.Path) -> None:
    shutil.copytree(root / "step_00000010", root / "step_00000011")
    manifest = root / "step_00000011" / "manifest.json"
    row = {**json.loads(manifest.read_text()), "step": 11}
    manifest.write_text(json.dumps(row))
    assert latest(root) == 11
    manifest.write_text(json.dumps(edit(row)))
    with pytest.warns(RuntimeWarning, match=said):
        assert latest(root) == 10
    save(root, 11, {}, {})
    assert latest(root) == 11


def test_changed_bytes_of_an_array_are_found_and_the_way_out_is_named(root: pathlib.Path) -> None:
    for path in (root / "step_00000010" / "arrays").rglob("d/*"):
        path.write_bytes(bytes(byte ^ 0x5A for byte in path.read_bytes()))
    with pytest.raises(CheckpointError, match=r"cannot be read .*: delete .*step_00000010 to go on"):
        restore(root, 10, {"actor": tree()})


def test_K03_a_finished_step_is_never_overwritten(root: pathlib.Path) -> None:
    with pytest.raises(CheckpointError, match="already saved"):
        save(root, 10, {}, {})


def test_no_folder_means_no_checkpoint(tmp_path: pathlib.Path) -> None:
    assert latest(tmp_path / "none") is None
    with pytest.raises(CheckpointError, match="missing or half-written"):
        restore(tmp_path / "none", 3, {})


def test_K04_a_save_that_fails_raises_in_the_caller(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OSError, match=r"Not a directory|File exists"):
        save(tmp_path / "file", 1, {"x": {"a": np.ones(1)}}, {})
    with pytest.raises(TypeError, match="JSON"):
        save(tmp_path / "c", 1, {}, {"r": object()})
    assert latest(tmp_path / "c") is None


def test_a_full_disk_is_named_before_anything_is_written(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: types.SimpleNamespace(free=1))
    with pytest.raises(OSError, match="a checkpoint needs") as error:
        save(tmp_path, 1, {"actor": tree()}, {})
    assert error.value.errno == errno.ENOSPC
    assert list(tmp_path.iterdir()) == []


def test_K06_missing_and_extra_leaves_are_named(root: pathlib.Path) -> None:
    more = tree()
    more["params"]["layer_5"] = jnp.zeros(1)  # type: ignore[index]
    del more["params"]["b"]  # type: ignore[attr-defined]
    with pytest.raises(CheckpointError, match=r"not in the checkpoint: .*layer_5.*only in the checkpoint: .*\['b'\]"):
        restore(root, 10, {"actor": more})
    with pytest.raises(CheckpointError, match=r"holds the trees \['actor'\], asked for \['actor', 'extractor'\]"):
        restore(root, 10, {"actor": tree(), "extractor": tree()})


def test_K07_counts_and_moments_keep_their_dtype(tmp_path: pathlib.Path) -> None:
    saved = {"count": jnp.asarray(10001, jnp.int32), "mu": jnp.full((3,), 1 / 3, jnp.float32)}
    save(tmp_path, 1, {"opt": saved}, {})
    like = jax.eval_shape(lambda: saved)
    back = restore(tmp_path, 1, {"opt": like}).arrays["opt"]
    assert int(back["count"]) == 10001
    assert back["mu"].dtype == jnp.float32
    cast = {"count": jax.ShapeDtypeStruct((), jnp.bfloat16), "mu": like["mu"]}
    with pytest.raises(CheckpointError, match=r"\['count'\]: saved int32\[\], wanted bfloat16\[\]"):
        restore(tmp_path, 1, {"opt": cast})
    short = {"count": like["count"], "mu": jax.ShapeDtypeStruct((2,), jnp.float32)}
    with pytest.raises(CheckpointError, match=r"float32\[3\], wanted float32\[2\]"):
        restore(tmp_path, 1, {"opt": short})


def test_K13_scalars_are_replicated_over_the_mesh_and_nothing_retraces(tmp_path: pathlib.Path) -> None:
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    state = {
        "w": jax.device_put(jnp.arange(8.0), NamedSharding(mesh, P("data"))),
        "count": jax.device_put(jnp.int32(5), NamedSharding(mesh, P())),
    }
    traces: list[int] = []

    @jax.jit
    def step(state: dict[str, jax.Array]) -> dict[str, jax.Array]:
        traces.append(1)
        return {"w": state["w"] + 1, "count": state["count"] + 1}

    state = step(state)
    save(tmp_path, 1, {"s": state}, {})
    back = restore(tmp_path, 1, {"s": {"w": state["w"], "count": jnp.int32(0)}}).arrays["s"]  # a fresh counter sits on one device
    assert len(back["count"].sharding.device_set) == 4
    assert back["w"].sharding == state["w"].sharding
    step(back)
    assert len(traces) == 1


def test_a_checkpoint_is_restored_onto_another_mesh(tmp_path: pathlib.Path) -> None:
    one = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    two = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[4:])
    save(tmp_path, 1, {"s": {"w": jax.device_put(jnp.arange(16.0).reshape(4, 4), NamedSharding(one, P("data")))}}, {})
    like = {"w": jax.ShapeDtypeStruct((4, 4), jnp.float32, sharding=NamedSharding(two, P("data", "tensor")))}
    back = restore(tmp_path, 1, {"s": like}).arrays["s"]["w"]
    assert back.sharding == like["w"].sharding
    np.testing.assert_array_equal(np.asarray(back), np.arange(16.0).reshape(4, 4))


def test_P04_a_donating_step_right_after_the_save_does_not_reach_the_file(tmp_path: pathlib.Path) -> None:
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    state = jnp.full((1024,), 3.0)
    save(tmp_path, 3, {"s": {"x": state}}, {})
    new = step(state)
    back = restore(tmp_path, 3, {"s": {"x": new}}).arrays["s"]["x"]
    assert float(back[0]) == 3.0
    assert float(new[0]) == 4.0
    if state.is_deleted():  # where the device really gave the buffer away, touching it is an error, never another value
        with pytest.raises(RuntimeError, match="deleted"):
            np.asarray(state)
    else:
        assert float(state[0]) == 3.0


def test_pruning_keeps_the_newest_and_clears_what_kills_left(tmp_path: pathlib.Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step, {"s": {"x": np.full(1, step)}}, {}, keep_last=2)
    (tmp_path / "step_00000001").mkdir()
    (tmp_path / "step_00000009").mkdir()
    assert prune(tmp_path, 1) == [1, 2]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_00000003", "step_00000009"]
    assert latest(tmp_path) == 3
    with pytest.raises(ValueError, match="1 or more"):
        prune(tmp_path, 0)


def test_numpy_leaves_stay_numpy_and_numbers_are_refused(tmp_path: pathlib.Path) -> None:
    save(tmp_path, 1, {"s": {"x": np.arange(3, dtype=np.int64), "n": np.int32(4)}}, {})
    back = restore(tmp_path, 1, {"s": {"x": np.zeros(3, np.int64), "n": np.int32(0)}}).arrays["s"]
    assert isinstance(back["x"], np.ndarray)
    assert back["x"].dtype == np.int64
    assert int(back["n"]) == 4
    with pytest.raises(CheckpointError, match="put numbers"):
        save(tmp_path, 2, {"s": {"x": 3}}, {})


def test_Z02_a_pickle_beside_a_checkpoint_is_refused_and_not_run(root: pathlib.Path, tmp_path: pathlib.Path) -> None:
    import pickle

    witness = tmp_path / "witness"

    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str, str]]:
            return (open, (str(witness), "w"))

    (root / "step_00000010" / "records" / "bank.pkl").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(CheckpointError, match=r"refused: records/bank\.pkl"):
        restore(root, 10, {"actor": tree()})
    with pytest.warns(RuntimeWarning, match=r"bank\.pkl"):
        assert latest(root) is None
    assert not witness.exists()


@pytest.mark.parametrize("name", ["../../x", "/etc/x", "a/../../b", "", ".", "a\0b"])
def test_Z06_names_that_lead_outside_are_refused(tmp_path: pathlib.Path, name: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  (the NUL byte is refused by the system first)
        inside(tmp_path / "root", name)
    with pytest.raises(ValueError, match="no checkpoint part"):
        save(tmp_path / "root", 1, {}, {name: 1})


def test_Z06_links_that_lead_outside_are_refused(root: pathlib.Path, tmp_path: pathlib.Path) -> None:
    (root / "out").symlink_to(tmp_path)
    with pytest.raises(ValueError, match="outside"):
        inside(root, "out/x")
    (root / "step_00000012").symlink_to(root / "step_00000010")
    assert latest(root) == 10
    manifest = root / "step_00000010" / "manifest.json"
    row = json.loads(manifest.read_text())
    row["files"]["../../witness"] = 1
    manifest.write_text(json.dumps(row))
    with pytest.raises(CheckpointError, match="outside"):
        restore(root, 10, {"actor": tree()})


def test_what_several_write_is_never_half_there_and_never_overwrites(root: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By one process: two are in ``tests/system/test_several_processes.py``."""
    alone = Processes.alone()
    with pytest.raises(CheckpointError, match="step 10 is already saved"):
        store.save_together(root, 10, {"actor": tree(2.0)}, {}, alone)
    assert latest(root) == 10
    with monkeypatch.context() as broken:
        broken.setattr(store, "_commit", lambda *_: (_ for _ in ()).throw(OSError("no space")))
        with pytest.raises(OSError, match="no space"):
            store.save_together(root, 11, {"actor": tree()}, {}, alone)
    assert store.steps(root) == [10]
    store.save_together(root, 11, {"actor": tree(2.0)}, {"run": {"step": 11}}, alone)
    assert (latest(root), read_records(root, 11)) == (11, {"run": {"step": 11}})
