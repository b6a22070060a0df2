"""Peak host memory of loading a sharded bf16 checkpoint onto a mesh of eight virtual devices.

    python tests/bench/load_memory.py --out docs/results/load_memory.json

Makes a random Hugging Face folder of the Qwen2.5-0.5B shape (0.49 G parameters, bf16, several files), loads it in a process of its own,
and prints the result as the last line. The devices are virtual, so what they hold is host memory too: that part (the shards) is what any
loader needs. The value is what was needed beyond it, in layer-stacks; one layer-stack is the largest matrix of a layer times the layers.
XLA on CPU adopts the buffers that are filled from the files; where devices have memory of their own, the host also needs its part of one
parameter in transfer (largest_parameter_mib, for one process).
"""

import argparse
import ctypes
import gc
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np

from crl_jax.models.hf_config import to_hf_config
from crl_jax.models.hf_weights import hf_name, is_matrix, write_files
from crl_jax.models.load import load_config, load_params
from crl_jax.models.params import flatten
from crl_jax.models.presets import QWEN2_5_0_5B
from crl_jax.models.tensor_file import Outgoing
from crl_jax.models.transformer import param_shapes
from crl_jax.sharding.mesh import make_mesh
from crl_jax.sharding.rules import param_shardings
from crl_jax.telemetry.result import Result, emit

MIB = 2**20
GOAL = 1.3  # layer-stacks beyond the shards


def make_checkpoint(folder: pathlib.Path) -> None:
    """Random bf16 weights of the right names and shapes, in files of at most 300 MB."""
    noise = (np.random.default_rng(0).normal(size=2**20) * 0.02).astype(jnp.bfloat16)
    tensors = []
    for name, leaf in flatten(param_shapes(QWEN2_5_0_5B)).items():
        shape = leaf.shape[::-1] if is_matrix(name) else leaf.shape
        tensors.append(Outgoing(hf_name(name, QWEN2_5_0_5B), shape, noise.dtype, lambda shape=shape: np.resize(noise, shape)))
    folder.mkdir()
    write_files(folder, tensors, 300_000_000)
    (folder / "config.json").write_text(json.dumps(to_hf_config(QWEN2_5_0_5B, dtype="bfloat16")))


def memory(key: str) -> float:
    """MiB of a line of /proc/self/status: VmRSS (now) or VmHWM (highest since it was reset)."""
    found = re.search(rf"{key}:\s+(\d+) kB", pathlib.Path("/proc/self/status").read_text())
    assert found, f"no {key} in /proc/self/status"
    return int(found[1]) / 1024


def load(folder: str) -> dict[str, float]:
    """Load and measure, in this process. What JAX itself takes is there before the measurement starts."""
    config = load_config(folder)
    shardings = param_shardings(config, make_mesh(1, 4, 2))
    jax.block_until_ready(jax.device_put(jnp.zeros(8), jax.tree.leaves(shardings)[0].mesh.devices.flat[7]))
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what tracing has freed goes back to the system, or it would be used again and not be seen
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    before, started, cpu = memory("VmRSS"), time.monotonic(), time.process_time()
    params = load_params(folder, config, seed=0, dtype=jnp.bfloat16, shardings=shardings)
    peak, wall, cpu = memory("VmHWM"), time.monotonic() - started, time.process_time() - cpu
    shards = sum(shard.data.nbytes for leaf in jax.tree.leaves(params) for shard in leaf.addressable_shards) / MIB
    return {"before_mib": before, "peak_mib": peak, "after_mib": memory("VmRSS"), "shards_mib": shards, "wall_s": wall, "cpu_s": cpu}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, help="file to write the result to")
    parser.add_argument("--load", metavar="FOLDER", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.load:
        print(json.dumps(load(args.load)))
        return
    flags = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(scratch) / "checkpoint"
        make_checkpoint(folder)
        files = sorted(p.name for p in folder.glob("*.safetensors"))
        command = [sys.executable, __file__, "--load", str(folder)]
        child = subprocess.run(command, env=os.environ | flags, check=True, capture_output=True, text=True, timeout=1800)
    found = {key: round(value, 2) for key, value in json.loads(child.stdout.splitlines()[-1]).items()}
    config = QWEN2_5_0_5B
    stack = config.n_layers * config.d_model * config.d_ff * 2 / MIB
    value = (found["peak_mib"] - found["before_mib"] - found["shards_mib"]) / stack
    details = {
        **found,
        "layer_stack_mib": round(stack, 1),
        "largest_parameter_mib": round(config.vocab_size * config.d_model * 2 / MIB, 1),
        "model": config.name,
        "files": len(files),
        "stored_as": "bfloat16",
        "loaded_as": "bfloat16",
        "mesh": "fsdp=4 x tensor=2, virtual CPU devices",
    }
    result = Result(
        "load_memory",
        round(value, 3),
        "layer-stacks of host memory beyond the shards, at the peak",
        goal=f"<= {GOAL}",
        passed=value <= GOAL,
        command="python tests/bench/load_memory.py --out docs/results/load_memory.json",
        details=details,
    )
    emit(result, args.out)


if __name__ == "__main__":
    main()
