"""Share of the machine's matmul peak that one update reaches at the shape of SmolLM2-135M, in float32 on one CPU core.

Usage:  python tests/bench/bench_step_smollm2.py [--steps 4] [--core 0] [--out result.json]

Random weights, packed rows, four sequences of 64 + 64 tokens each. The value is the arithmetic that the model needs (``aot.needed``: causal
attention counted once, the head for trained tokens only, nothing recomputed) per CPU second of the best update, over the best rate of plain
matrix products measured in the same process.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import resource
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(pathlib.Path(__file__).resolve().parent)]

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from bench_gpu import Workload  # noqa: E402

from crl_jax.host_memory import keep_freed_memory  # noqa: E402
from crl_jax.learner import objective  # noqa: E402
from crl_jax.learner.optimizer import make_optimizer  # noqa: E402
from crl_jax.learner.state import init_state  # noqa: E402
from crl_jax.learner.step import make_train_step  # noqa: E402
from crl_jax.models import transformer  # noqa: E402
from crl_jax.models.forward import Execution  # noqa: E402
from crl_jax.models.presets import preset  # noqa: E402
from crl_jax.telemetry.result import Result, emit  # noqa: E402

GOAL = 0.6
SHAPES = ((1024, 1024, 1024), (512, 576, 1536), (512, 1536, 576), (512, 576, 49_152))  # (M, K, N) of the products timed for the peak


def peak_gflops(reps: int = 8) -> dict[str, float]:
    """GFLOP per CPU second of plain products: the best repetition of each shape."""
    found = {}
    for m, k, n in SHAPES:
        a, b = jnp.ones((m, k)), jnp.ones((k, n))
        product = jax.jit(jnp.matmul)
        product(a, b).block_until_ready()
        best = float("inf")
        for _ in range(reps):
            began = time.process_time()
            product(a, b).block_until_ready()
            best = min(best, time.process_time() - began)
        found[f"{m}x{k}x{n}"] = 2 * m * k * n / best / 1e9
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4, help="timed updates, after one that compiles")
    parser.add_argument("--rows", type=int, default=4, help="packed rows of 512 tokens")
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--scan-layers", action="store_true", help="one compiled layer in a loop")
    parser.add_argument("--core", type=int, default=0)
    parser.add_argument("--out", type=pathlib.Path, default=None, help="also write the result here")
    args = parser.parse_args()
    os.sched_setaffinity(0, {args.core})
    keep_freed_memory()
    w = Workload(preset("smollm2-135m"), args.rows, args.microbatches, sequences=4, prompt=64, trained=64)
    optimizer = make_optimizer(1e-6)
    state = init_state(jax.jit(transformer.init, static_argnums=0)(w.config, jax.random.key(0)), optimizer)
    how = Execution(scan_layers=args.scan_layers)
    step = make_train_step(w.config, optimizer, objective.actor(), temperature=1.0, allowed=None, microbatches=args.microbatches, how=how)
    seconds, peaks = [], [peak_gflops()]
    for i in range(args.steps + 1):
        batch = w.batch(i)
        began = time.process_time()
        state, _ = jax.block_until_ready(step(state, batch))
        seconds.append(time.process_time() - began)
    peaks.append(peak_gflops())
    if int(state.step) != args.steps + 1:
        raise SystemExit(f"{int(state.skipped)} updates were refused: the numbers mean nothing")
    peak, best = max(max(p.values()) for p in peaks), min(seconds[1:])
    rate = w.needed_flops() / best / 1e9
    details = {
        "update_cpu_s": {"best": best, "all": seconds[1:], "first_with_compile": seconds[0]},
        "tokens_per_cpu_s": w.tokens / best,
        "needed_gflop": w.needed_flops() / 1e9,
        "gflops": rate,
        "matmul_gflops": peaks,
        "parameters": transformer.count_params(w.config),
        "workload": {"rows": w.rows, "tokens_per_row": w.length, "microbatches": w.microbatches, "scan_layers": args.scan_layers},
        "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }
    share = rate / peak
    emit(Result("bench_step_smollm2", share, "of the matmul peak", f">= {GOAL}", share >= GOAL, details=details), args.out)


if __name__ == "__main__":
    main()
