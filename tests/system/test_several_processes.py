"""Jobs of two and four processes make the updates of one process that has all samples, serve them, save them together, and end together."""

import json
import os
import pathlib
import socket
import subprocess
import sys
import time
from typing import Any

import jax
import job_process as job
import numpy as np
import pytest

from crl_jax.checkpoint import store
from crl_jax.models.params import flatten
from crl_jax.sharding.mesh import make_mesh

pytestmark = pytest.mark.system

DEADLINE_S = 600
SCRIPT = pathlib.Path(job.__file__)
CACHE = SCRIPT.parents[2] / ".cache" / "jax-tests-job"
ALMOST = {"rtol": 1e-5, "atol": 1e-6}  # rows lie on other devices, so their gradients are added up in another order: no two sums are equal


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def run(count: int, folder: pathlib.Path, what: str) -> tuple[list[int], list[dict[str, Any]], list[str], float]:
    """How each process ended, what it found, what it said, and how long after the end of the last one the others lived (s)."""
    kept = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(CACHE),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    env = kept | cache | {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    port, log = free_port(), folder / what
    log.mkdir()
    running: list[subprocess.Popen[bytes]] = []
    try:
        for i in range(count):
            out, err = (log / f"{i}.out").open("wb"), (log / f"{i}.err").open("wb")
            args = [sys.executable, str(SCRIPT), str(i), str(count), port, str(folder), what]
            running.append(subprocess.Popen(args, env=env, stdout=out, stderr=err))
        running[-1].wait(DEADLINE_S)
        began = time.monotonic()
        for process in running:
            process.wait(DEADLINE_S)
        late_s = time.monotonic() - began
    finally:
        for process in running:
            process.kill()
    said = [(log / f"{i}.err").read_text() for i in range(count)]
    outs = [line for i in range(count) for line in (log / f"{i}.out").read_text().splitlines() if line.startswith("{")]
    assert len(outs) == count, said
    return [process.returncode for process in running], [json.loads(line) for line in outs], said, late_s


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory):
    """A job of two processes with two devices each, and its folder; at its end process 1 raises."""
    folder = tmp_path_factory.mktemp("two")
    return folder, *run(2, folder, "train")


@pytest.fixture(scope="module")
def four(two):
    """A job of four processes with one device each that goes on with the checkpoint of the two; at its end process 3 is killed."""
    return two[0], *run(4, two[0], "go_on")


def loaded(folder: pathlib.Path, name: str) -> dict[str, np.ndarray]:
    with np.load(folder / f"{name}.npz") as found:
        return dict(found)


def alone(kind: str, steps: int) -> tuple[Any, list[dict[str, list[float]]]]:
    """The role and the sums of each step of one process on one device with all samples."""
    role, sums = job.make_role(kind, make_mesh(1, 1, 1, jax.devices()[:1]), job.Kept()), []
    for step in range(steps):
        sums.append({name: [float(sum.total), float(sum.count)] for name, sum in role.update(job.samples(step)).items()})
    role.publish()
    return role, sums


@pytest.mark.parametrize("kind", job.KINDS)
def test_two_processes_make_the_updates_of_one(two, kind: str) -> None:
    folder, _, found, _, _ = two
    role, sums = alone(kind, 3)
    for one in found:
        assert one[kind]["sums"] == found[0][kind]["sums"]
        for step, expected in enumerate(sums):
            mine = one[kind]["sums"][step]
            assert mine.keys() == expected.keys()
            for name in expected:
                assert mine[name] == pytest.approx(expected[name], rel=2e-5, abs=1e-5), (step, name)
    trained = loaded(folder, kind)
    for name, leaf in flatten(role.state.params).items():
        np.testing.assert_allclose(trained[name], np.asarray(leaf), **ALMOST, err_msg=name)
    served = loaded(folder, f"{kind}_served")
    for name, leaf in role.sampler.arrays().items():
        np.testing.assert_allclose(served[name], leaf, **ALMOST, err_msg=name)


@pytest.mark.parametrize("kind", job.KINDS)
def test_P06_each_process_serves_what_is_trained_on_its_own_devices_and_training_goes_on(two, kind: str) -> None:
    folder, _, found, _, _ = two
    first, second = (one[kind] for one in found)
    assert first["first"]
    assert second["first"]
    assert first["same"] == second["same"] == [True] * 3  # a publish leaves the trainer's parameters usable and as they were
    assert first["crc"] == second["crc"]
    assert len(set(first["crc"])) == 3
    assert first["checksums"] == second["checksums"]
    assert all(first["checksums"])
    assert first["served"] == second["served"] == job.crc(loaded(folder, f"{kind}_served"))
    assert [one["here"] and one["version"] for one in (first, second)] == [3, 3]
    if kind != "lora":  # there adapters are trained, and the whole weights are served
        assert first["served"] == first["crc"][-1]


def test_P07_the_same_key_gives_the_same_values_on_one_device_and_on_all(two) -> None:
    assert [one["random"] for one in two[2]] == [True, True]


def test_P02_a_row_that_would_lie_on_several_processes_is_refused_by_all(two) -> None:
    assert ["each process needs rows of its own" in one["rows"] for one in two[2]] == [True, True]


def test_P09_logging_and_saving_each_step_hangs_nobody_and_is_done_once(two) -> None:
    folder, _, found, _, _ = two
    assert [one["manifests"] for one in found] == [3 * len(job.KINDS), 0]
    assert max(one[kind]["save_s"] for one in found for kind in job.KINDS) < 60
    for kind in job.KINDS:
        rows = [json.loads(line) for line in (folder / kind / "metrics.jsonl").read_text().splitlines()]
        assert [row["step"] for row in rows if row["kind"] == "metrics"] == [1, 2, 3]
        for step in (1, 2, 3):
            saved = folder / kind / f"step_{step:08d}"
            times = {path.name: path.stat().st_mtime_ns for path in saved.rglob("*") if path.is_file()}
            assert times["manifest.json"] == max(times.values()), "the manifest is what makes a checkpoint count"
            assert store.is_whole(folder / kind, step)


def test_K13_what_two_processes_saved_is_restored_by_one_on_another_mesh(two) -> None:
    folder, _, found, _, _ = two
    mesh = make_mesh(1, 2, 2, jax.devices()[:4])
    role = job.make_role("packed", mesh, job.Kept())
    restored = store.restore(folder / "packed", 3, {"actor": role.state})
    state = restored.arrays["actor"]
    assert all(leaf.sharding.device_set == set(mesh.devices.flat) for leaf in jax.tree.leaves(state))  # also the counters
    role.restore(state, restored.records["run"]["version"])
    assert (role.version, int(role.state.step)) == (3, 3)
    assert job.crc({name: np.asarray(leaf) for name, leaf in flatten(role.state.params).items()}) == found[0]["packed"]["crc"][-1]


def test_K13_four_processes_go_on_from_it_one_of_them_without_samples(two, four) -> None:
    folder, _, found, _, _ = four
    role, sums = alone("packed", 4)
    before = two[2][0]["packed"]["crc"][-1]
    for one in found:
        assert (one["packed"]["first"], one["packed"]["version"]) == (before, 4)
        assert one["packed"]["served"] == one["packed"]["crc"] == found[0]["packed"]["crc"]
        assert one["packed"]["loss"] == pytest.approx(sums[-1]["loss"], rel=2e-5, abs=1e-5)
    trained = loaded(folder, "four")
    for name, leaf in flatten(role.state.params).items():
        np.testing.assert_allclose(trained[name], np.asarray(leaf), **ALMOST, err_msg=name)
    assert [one["manifests"] for one in found] == [1, 0, 0, 0]
    assert store.is_whole(folder / "four", 4)


def test_A13_a_process_that_raises_ends_the_others_within_seconds_with_its_words(two) -> None:
    _, codes, _, said, late_s = two
    assert codes == [1, 1]
    assert "ValueError: the disk is on fire" in said[1]
    assert "PeerFailed: process 1 failed: ValueError: the disk is on fire" in said[0]
    assert late_s < 30


def test_A13_a_process_that_is_killed_ends_the_others_within_the_heartbeat(four) -> None:
    _, codes, _, _, late_s = four
    assert codes[3] == -9
    assert all(codes)
    assert late_s < 3 * job.HEARTBEAT_S + 30
