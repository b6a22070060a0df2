"""What this box can do at all: fp32 matmul rate of JAX or torch, and the floor it implies for the shared workload.

Usage:  python bench_peak.py jax|torch        (run inside the matching virtual environment)
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time

import peer_common as pc


def matmul_gflops(kind: str, m: int, k: int, n: int, reps: int = 30) -> float:
    if kind == "jax":
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        import jax
        import jax.numpy as jnp

        a, b = jnp.ones((m, k)), jnp.ones((k, n))
        f = jax.jit(lambda x, y: x @ y)

        def run():
            f(a, b).block_until_ready()
    else:
        import torch

        torch.set_num_threads(len(os.sched_getaffinity(0)))
        a, b = torch.ones(m, k), torch.ones(k, n)

        def run():
            return a @ b

    run()
    times = []
    for _ in range(reps):
        t = time.perf_counter()
        run()
        times.append(time.perf_counter() - t)
    return 2 * m * k * n / min(times) / 1e9


def flops(w: pc.Workload) -> dict[str, float]:
    """Matrix-multiply FLOPs of the workload (tied head counted once, embedding lookup not counted)."""
    d, f, kv = w.embed_dim, w.hidden_dim, w.num_kv_heads * w.head_dim
    layer = 2 * d * d + 2 * d * kv + 3 * d * f  # weights of one block
    weights = w.num_layers * layer + d * w.vocab_size
    seq = w.prompt_len + w.completion_len

    def attn(q: int, s: int) -> int:
        return 4 * w.num_layers * q * s * d  # scores and values, no causal saving

    forward = 2 * weights * w.total_tokens + w.batch * attn(seq, seq)
    prefill = 2 * weights * w.batch * w.prompt_len + w.batch * attn(w.prompt_len, w.prompt_len)
    decode = 2 * weights * w.completion_tokens + w.batch * attn(w.completion_len, seq)
    return {"matmul_weights": weights, "update": 3 * forward, "prefill": prefill, "decode": decode, "rollout": prefill + decode}


if __name__ == "__main__":
    kind = sys.argv[1]
    w = pc.workload_from_env()
    calib = [pc.calibrate() for _ in range(3)]
    rates = {
        "large 1024x1024x1024": matmul_gflops(kind, 1024, 1024, 1024),
        "update 4096x256x1024": matmul_gflops(kind, 4096, 256, 1024),
        "decode 32x256x1024": matmul_gflops(kind, 32, 256, 1024, 200),
    }
    fl = flops(w)
    print(
        json.dumps(
            {
                "kind": kind,
                "gflops": {k: round(v, 1) for k, v in rates.items()},
                "workload_gflop": {k: round(v / 1e9, 2) for k, v in fl.items() if k != "matmul_weights"},
                "floor_s": {
                    "update": round(fl["update"] / 1e9 / rates["update 4096x256x1024"], 3),
                    "rollout": round(
                        fl["prefill"] / 1e9 / rates["update 4096x256x1024"] + fl["decode"] / 1e9 / rates["decode 32x256x1024"], 3
                    ),
                },
                "calib_s": round(statistics.median(calib), 4),
                "load1": os.getloadavg()[0],
            },
            indent=1,
        )
    )
