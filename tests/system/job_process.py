"""One process of a job that trains the tiny model: argv = index, count, port, folder, what. Run by ``test_several_processes``, which also
imports it for the same samples and settings. Prints one line of JSON, then ends as ``what`` says."""

import json
import os
import pathlib
import signal
import sys
import time
import zlib

import jax
import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[2]
BEGAN = time.monotonic()
DEVICES = 4  # of all processes together
HEARTBEAT_S = 10

if __name__ == "__main__":
    sys.path.append(str(ROOT))
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES // int(sys.argv[2]))

from jax.sharding import NamedSharding, PartitionSpec  # noqa: E402

from crl_jax.checkpoint import manifest, store  # noqa: E402
from crl_jax.checkpoint.background import Saver  # noqa: E402
from crl_jax.checkpoint.retention import Keep  # noqa: E402
from crl_jax.learner import objective  # noqa: E402
from crl_jax.learner.optimizer import make_optimizer  # noqa: E402
from crl_jax.learner.placement import place_batch, put  # noqa: E402
from crl_jax.lookup import RoleParts  # noqa: E402
from crl_jax.models import transformer  # noqa: E402
from crl_jax.models.lora import Lora  # noqa: E402
from crl_jax.models.params import flatten  # noqa: E402
from crl_jax.processes import Processes, Topology, join  # noqa: E402
from crl_jax.records import Completion, Finish, Provenance, TokenLog, TrainSample  # noqa: E402
from crl_jax.role import Buckets, Role  # noqa: E402
from crl_jax.role_sampler import served_params  # noqa: E402
from crl_jax.serving.publisher import Serving  # noqa: E402
from crl_jax.sharding.mesh import AXES, make_mesh  # noqa: E402
from crl_jax.sharding.reshard import serving_mesh  # noqa: E402
from crl_jax.sharding.rules import param_shardings  # noqa: E402
from crl_jax.sharding.together import Together  # noqa: E402
from crl_jax.telemetry.tracker import open_trackers  # noqa: E402

CONFIG = transformer.ModelConfig("tiny", 40, 16, 1, 4, 2, 8, 32, tie_embeddings=False)
KINDS = {"packed": 1, "lora": 2}  # and on how many devices a served copy of the weights lies
SHARES = ((3, 5), (6, 0), (1, 4))  # of each update: how many samples each of two processes has
LAST = (2, 1, 3, 0)  # of the update that four processes make after them


def weights():
    """The first weights, whole."""
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda leaf: rng.normal(0.0, 0.2, leaf.shape).astype(np.float32), transformer.param_shapes(CONFIG))


def sample(step: int, i: int, count: int) -> TrainSample:
    """The first of an update has 8 tokens or a few more, the last up to 30: processes with few samples have short ones or long ones."""
    rng = np.random.default_rng(100 * step + i)
    reply = 2 + i % 5
    log = TokenLog.empty().append_context(rng.integers(0, 40, 6 + 18 * i // (count - 1)).tolist(), Provenance.PROMPT)
    ids, logps = tuple(rng.integers(0, 40, reply).tolist()), tuple(rng.uniform(-4.5, -3.0, reply).tolist())
    return TrainSample(log.append_completion(Completion(ids, logps, (0,) * reply, (0,) * reply, Finish.STOP)), float(rng.normal()))


def samples(step: int) -> list[TrainSample]:
    count = sum(SHARES[step] if step < len(SHARES) else LAST)
    return [sample(step, i, count) for i in range(count)]


def part(step: int, index: int) -> list[TrainSample]:
    """Those of process ``index``."""
    counts = SHARES[step] if step < len(SHARES) else LAST
    first = sum(counts[:index])
    return samples(step)[first : first + counts[index]]


class Kept:
    """A sampler that keeps what is published to it."""

    params, version = None, -1

    def publish(self, params, version) -> None:
        self.params, self.version = params, version

    def arrays(self) -> dict[str, np.ndarray]:
        return {name: np.asarray(leaf) for name, leaf in flatten(self.params).items()}

    def values(self) -> dict[str, int]:
        return {name: crc({name: leaf}) for name, leaf in self.arrays().items()}

    def here(self) -> bool:
        """Whether all of it lies on this process's devices."""
        return all(leaf.sharding.device_set == set(jax.local_devices()) for leaf in flatten(self.params).values())


def trace(text: str) -> None:
    print(f"{time.monotonic() - BEGAN:.1f} s wall, {time.process_time():.1f} s CPU: {text}", file=sys.stderr, flush=True)


def make_role(kind: str, mesh, sampler, serving=None, processes: Processes | None = None, params=None) -> Role:
    count = 1 if processes is None else processes.count
    packing = "sequences" if kind == "packed" else "padded"
    rows = {"rows": 16 // count, "max_length": 32, "max_tokens": 8, "multiple": DEVICES // count}
    return Role(
        "actor",
        model_config=CONFIG,
        params=weights() if params is None else params,
        optimizer=make_optimizer(0.01, eps=1e-3),  # Adam without it makes the sign of a rounding error a step of full length
        objective=objective.actor(),
        sampler=sampler,
        buckets=Buckets.of(**rows, packing=packing, row_length=96 if kind == "packed" else 0),
        temperature=1.0,
        allowed=None,
        mesh=mesh,
        serving=serving,
        lora=Lora(2, 4.0) if kind == "lora" else None,
        processes=processes,
    )


def job_mesh():
    return make_mesh(2, 2, 1, sorted(jax.devices(), key=lambda device: (device.process_index, device.id)))


class Gathered:
    """Whole arrays, in every process, of trees that several hold together."""

    def __init__(self, mesh, processes: Processes) -> None:
        self.programs: dict[str, Together] = {}
        self.mesh, self.processes = mesh, processes

    def __call__(self, tree, what: str) -> dict[str, np.ndarray]:
        if what not in self.programs:
            program = jax.jit(lambda tree: tree, out_shardings=NamedSharding(self.mesh, PartitionSpec()))
            self.programs[what] = Together(program, self.processes.meet, what)
        return {name: np.array(leaf.addressable_data(0)) for name, leaf in flatten(self.programs[what](tree)).items()}


def crc(arrays: dict[str, np.ndarray]) -> int:
    return zlib.crc32(b"".join(np.ascontiguousarray(arrays[name]).tobytes() for name in sorted(arrays)))


def train(kind: str, processes: Processes, folder: pathlib.Path, gathered: Gathered) -> dict:
    """Three updates; each is published, logged and saved."""
    mesh, sampler = job_mesh(), Kept()
    serving = Serving(serving_mesh(mesh, KINDS[kind]))
    first = put(weights(), param_shardings(CONFIG, mesh))
    parts = RoleParts(None, CONFIG, mesh, serving.mesh, first)  # type: ignore[arg-type]
    sampler.publish(served_params(parts, serving, processes), 0)
    found = {"first": sampler.values() == {name: crc({name: leaf}) for name, leaf in flatten(weights()).items()}}
    role = make_role(kind, mesh, sampler, serving, processes, first)
    saver = Saver(folder / kind, Keep(5), processes=processes)
    trackers = open_trackers(folder / kind, jsonl=processes.first, tensorboard=False)
    found |= {"sums": [], "same": [], "checksums": [], "crc": []}
    for step in range(len(SHARES)):
        sums = role.update(part(step, processes.index))
        before = gathered(role.state.params, kind)
        role.publish()
        after = gathered(role.state.params, kind)
        found["same"].append(crc(before) == crc(after))
        found["sums"].append({name: [float(sum.total), float(sum.count)] for name, sum in sums.items()})
        found["checksums"].append(role.published.checksum)
        found["crc"].append(crc(after))
        trackers.log(step + 1, {"loss": sums["loss"]})
        saver.save(step + 1, {"actor": role.state}, {"run": {"version": role.version}})
        trace(f"{kind} {step}")
    trackers.close()
    saver.wait()
    if processes.first:
        np.savez(folder / f"{kind}.npz", **after)
        np.savez(folder / f"{kind}_served.npz", **sampler.arrays())
    found |= {"served": crc(sampler.arrays()), "version": sampler.version, "here": sampler.here()}
    return found | {"save_s": saver.copy_s + saver.write_s}


def go_on(processes: Processes, folder: pathlib.Path, gathered: Gathered) -> dict:
    """One more update after what another job saved."""
    mesh, sampler = job_mesh(), Kept()
    role = make_role("packed", mesh, sampler, Serving(serving_mesh(mesh, 1)), processes)
    found = store.restore(folder / "packed", 3, {"actor": role.state})
    role.restore(found.arrays["actor"], found.records["run"]["version"])
    first = crc(gathered(role.state.params, "params"))
    sums = role.update(part(3, processes.index))
    role.publish()
    params = gathered(role.state.params, "params")
    if processes.first:
        np.savez(folder / "four.npz", **params)
    store.save_together(folder / "four", 4, {"actor": role.state}, {"run": {}}, processes)
    loss = [float(sums["loss"].total), float(sums["loss"].count)]
    return {"first": first, "crc": crc(params), "served": crc(sampler.arrays()), "version": role.version, "loss": loss}


def random_values(mesh) -> bool:
    """P07: whether the same key gives the same values on all devices of the job as on one."""
    whole = np.asarray(jax.random.normal(jax.random.key(0), (8,)))
    split = jax.jit(lambda: jax.random.normal(jax.random.key(0), (8,)), out_shardings=NamedSharding(mesh, PartitionSpec(AXES[:2])))()
    here = all((np.asarray(shard.data) == whole[shard.index]).all() for shard in split.addressable_shards)
    return bool(here and np.allclose(whole[:3], [1.6226, 2.0253, -0.4336], atol=1e-4))


def refused_rows() -> str:
    """P02: what is said of a mesh that lays one row over several processes."""
    mesh = make_mesh(1, 1, DEVICES, sorted(jax.devices(), key=lambda device: (device.process_index, device.id)))
    try:
        place_batch(Buckets.of(rows=2, max_length=32, max_tokens=8).batch(samples(0)[:1]), mesh, ("data", "fsdp"))
    except ValueError as error:
        return str(error)
    return ""


def main(index: int, count: int, port: str, folder: pathlib.Path, what: str) -> None:
    written: list[int] = []
    write = manifest.write
    manifest.write = lambda *given: (written.append(1), write(*given))[1]
    with join(Topology(f"127.0.0.1:{port}", index, count), heartbeat_s=HEARTBEAT_S) as processes:
        trace("joined")
        gathered = Gathered(job_mesh(), processes)
        found: dict = {"index": processes.index}
        if what == "train":
            found |= {"random": random_values(job_mesh()), "rows": refused_rows()}
            found |= {kind: train(kind, processes, folder, gathered) for kind in KINDS}
        else:
            found["packed"] = go_on(processes, folder, gathered)
        trace("all")
        print(json.dumps(found | {"manifests": len(written)}), flush=True)
        processes.meet("the end")
        if index == count - 1 and what == "train":
            raise ValueError("the disk is on fire")
        if index == count - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        print(f"waits {time.monotonic()}", flush=True)
        processes.meet("what never comes")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], pathlib.Path(sys.argv[4]), sys.argv[5])
