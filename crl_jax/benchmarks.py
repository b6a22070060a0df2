"""``crl bench``: the benchmarks of the source tree by name.

Owns: which script stands behind each name. Promises: a benchmark is a script of its own that prints one result object last, started here in
a process of its own. Does not: measure.
"""

from __future__ import annotations

import pathlib
import subprocess
import sys
from collections.abc import Sequence

from crl_jax.errors import UserError

FOLDER = pathlib.Path(__file__).resolve().parents[1] / "tests" / "bench"
SCRIPTS = {
    "step": ("bench_step.py", "one GRPO step on the workload shared with other stacks: CPU seconds, compile time, memory"),
    "peers": ("run_peers.py", "the same step and those of google-tunix and TRL, interleaved: --peers FOLDER with their environments"),
    "step-smollm2": ("bench_step_smollm2.py", "one update at the shape of SmolLM2-135M: share of the matmul peak"),
    "serve": ("bench_serve.py", "rollouts of the engine and of google-tunix, transformers and llama.cpp, and SmolLM2 against the roofline"),
    "serve-multiturn": ("bench_serve_multiturn.py", "conversations of eight turns by its sessions and by the same peers"),
    "soak": ("soak_serve.py", "10,000 requests with cancels, closes and swaps: slots, memory, requests per second"),
    "bank-kill": ("kill_bank.py", "kill -9 of a loaded experience bank at 50 random moments: what was acknowledged, halves, replay"),
    "run-kill": ("kill_run.py", "30 random kills of runs, of a bank's server, of environment workers: equal bit for bit, all there"),
    "rollout-overhead": ("bench_rollout_overhead.py", "the same episodes with and without experience: what the bank costs a rollout"),
    "async": ("async_vs_sync.py", "the same training asynchronously and synchronously: wall time, where it went, final success"),
    "envs": ("bench_envs.py", "environments: `speed` in steps per second, or `success` of the scripted players"),
    "load": ("load_memory.py", "host memory while a checkpoint is loaded onto a mesh"),
    "publish": ("bench_publish.py", "a swap of weights on eight virtual devices: bytes, seconds by phase, checksum, tokens after it"),
    "bank": ("bench_bank.py", "1,024 clients of the bank's search against bare ScaNN: throughput, latency, beside rebuilds and merges"),
    "local-pod": (
        "local_pod.py",
        "two jobs of two processes and a bank on this machine, undisturbed and with a process of each job killed",
    ),
    "schedule": (
        "bench_schedule.py",
        "the simulated schedule against two small real runs: seconds per step and lags, and 8 to 4,096 environments",
    ),
    "gpu": ("bench_gpu.py", "the update on an NVIDIA GPU: model FLOPs utilisation"),
}


class NoBenchmarks(UserError):
    """The benchmarks are not here."""

    exit_code = 2


def run(name: str, arguments: Sequence[str]) -> int:
    """Start the benchmark called ``name`` and return its exit code. Raises NoBenchmarks outside a source tree."""
    script = FOLDER / SCRIPTS[name][0]
    if not script.is_file():
        raise NoBenchmarks(f"{script} is missing: benchmarks come with the source tree, so run crl from a clone of the repository")
    return subprocess.run([sys.executable, str(script), *arguments]).returncode
