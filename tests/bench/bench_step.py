"""Time, memory and compile time of one GRPO step on the workload that the peer benchmarks share.

Usage:  python tests/bench/bench_step.py [--steps 6] [--batching prefix|padded] [--out result.json]

Starts two processes of itself, pinned to one core: the first with an empty compile cache, the second with the cache that the first
left. Prints one JSON object (``crl_jax.telemetry.result``) as its last line; the value is the best update in CPU seconds. A step is a
rollout by the slot engine, rewards, advantages, batching, the update and a copy of the weights for the sampler; "update" is batching
and the jitted step until its result is ready.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(pathlib.Path(__file__).resolve().parent / "peers")]

import peer_common as pc  # noqa: E402  (the peers' sizes and stopwatch; imports no framework)

MICROBATCHES = 4  # quarters the memory of activations; hardly slower
UPDATE_GOAL_S, STEP_GOAL_S, COLD_GOAL_S, WARM_GOAL_S, RSS_GOAL_MB = 2.0, 2.8, 12.0, 3.0, 1000


def model_config(w: pc.Workload) -> Any:
    """The peers' random Llama."""
    from crl_jax.models.config import ModelConfig

    return ModelConfig(
        name="bench",
        vocab_size=w.vocab_size,
        d_model=w.embed_dim,
        n_layers=w.num_layers,
        n_heads=w.num_heads,
        n_kv_heads=w.num_kv_heads,
        head_dim=w.head_dim,
        d_ff=w.hidden_dim,
        rope_theta=float(w.rope_theta),
        norm_eps=w.norm_eps,
    )


async def rollout(sampler: Any, prompts: list[list[int]], length: int, seed: int) -> list[Any]:
    """One completion of ``length`` tokens for each prompt, all at once; nothing stops early."""
    from crl_jax.records import SamplingParams

    params = [SamplingParams(max_new_tokens=length, seed=seed * len(prompts) + i) for i in range(len(prompts))]
    return await asyncio.gather(*(sampler.complete(p, s) for p, s in zip(prompts, params, strict=True)))


def samples_of(w: pc.Workload, prompts: list[list[int]], completions: list[Any]) -> list[Any]:
    """Token logs with the advantage inside each prompt's group, for the peers' reward (a checksum of the text)."""
    import numpy as np

    from crl_jax.losses.advantages import group_advantages
    from crl_jax.records import Provenance, TokenLog, TrainSample

    text = [" ".join(f"w{i}" for i in c.ids) for c in completions]
    rewards = np.array([sum(map(ord, t)) % 7 / 7.0 for t in text], np.float32)
    advantages = group_advantages(rewards, np.arange(w.batch) // w.num_generations)
    logs = [TokenLog.empty().append_context(p, Provenance.PROMPT).append_completion(c) for p, c in zip(prompts, completions, strict=True)]
    return [TrainSample(log, float(a)) for log, a in zip(logs, advantages, strict=True)]


def to_arrays(w: pc.Workload, samples: list[Any], batching: str) -> Any:
    """One batch of static shape."""
    from crl_jax.learner.batching import to_batch
    from crl_jax.learner.packing import pack_batch

    length = w.prompt_len + w.completion_len
    if batching == "prefix":
        row = w.prompt_len + w.num_generations * w.completion_len
        sizes = {"row_buckets": (w.num_prompts,), "length_buckets": (row,), "sequence_buckets": (w.num_generations,)}
        return pack_batch(samples, **sizes, token_buckets=(w.completion_len,), share_prefixes=True)
    return to_batch(samples, row_buckets=(w.batch,), length_buckets=(length,), token_buckets=(w.completion_len,))


def measure(steps: int, batching: str) -> None:
    """One process: ``steps`` whole steps; prints the peers' report."""
    began = time.process_time()
    import importlib.metadata as md

    import jax
    import jax.numpy as jnp

    from crl_jax.host_memory import keep_freed_memory
    from crl_jax.learner import objective
    from crl_jax.learner.optimizer import make_optimizer
    from crl_jax.learner.state import init_state
    from crl_jax.learner.step import make_train_step
    from crl_jax.models import transformer
    from crl_jax.serving.engine import SlotEngine
    from crl_jax.serving.sampler import EngineSampler
    from crl_jax.sharding.mesh import make_mesh
    from crl_jax.sharding.reshard import make_copy, serving_layout

    keep_freed_memory()
    w = pc.workload_from_env()
    config = model_config(w)
    params = jax.jit(transformer.init, static_argnums=0)(config, jax.random.key(0))
    params = jax.tree.map(lambda x: x if x.ndim < 2 else x * (0.02 / jnp.std(x)), params)  # N(0, 0.02) as in the peers
    publish = make_copy(jnp.float32, serving_layout(make_mesh(1, 1, 1)))
    optimizer = make_optimizer(w.learning_rate)
    step = make_train_step(
        config, optimizer, objective.actor(aggregation="token_mean"), temperature=1.0, allowed=None, microbatches=MICROBATCHES
    )
    state = init_state(make_copy(jnp.float32)(params), optimizer)
    length = w.prompt_len + w.completion_len
    engine = SlotEngine(config, max_slots=w.batch, max_length=length, row_buckets=(w.num_prompts,), chunk_buckets=(w.prompt_len,))
    sampler = EngineSampler(engine, publish(params))

    sw = pc.Stopwatch()
    firsts: dict[str, float] = {"import_and_init": time.process_time() - began}
    losses, norms = [], []
    for i in range(steps):
        rows = [[int(t[1:]) for t in pc.prompt_words(w, i * w.num_prompts + j).split()] for j in range(w.num_prompts)]
        prompts = [row for row in rows for _ in range(w.num_generations)]
        sw.mark_box()
        with sw.time("rollout_total"):
            with sw.time("rollout_generate"):
                completions = asyncio.run(rollout(sampler, prompts, w.completion_len, i))
            samples = samples_of(w, prompts, completions)
        with sw.time("update"):
            state, sums = jax.block_until_ready(step(state, to_arrays(w, samples, batching)))
        with sw.time("publish"):
            sampler.publish(jax.block_until_ready(publish(state.params)), i + 1)
        losses.append(sums["loss"].mean())
        norms.append(sums["grad_norm"].mean())
        assert all(len(c.ids) == w.completion_len for c in completions)
    asyncio.run(sampler.aclose())
    assert int(state.step) == steps
    moved = [float(jnp.abs(a - b).max()) for a, b in zip(jax.tree.leaves(state.params), jax.tree.leaves(params), strict=True)]
    assert min(moved) > 0, f"some weights never moved: {moved}"
    for d in (sw.wall, sw.cpu):
        d["step_total"] = [sum(parts) for parts in zip(d["rollout_total"], d["update"], d["publish"], strict=True)]
    tokens = w.completion_tokens
    phases = {"rollout_generate": tokens, "rollout_total": tokens, "update": w.total_tokens, "publish": tokens, "step_total": tokens}
    versions = {k: md.version(k) for k in ("jax", "jaxlib", "flax", "optax", "numpy")}
    pc.report(
        f"crl_jax {batching}",
        versions,
        w,
        sw,
        phases,
        {
            "params": transformer.count_params(config),
            "batching": batching,
            "microbatches": MICROBATCHES,
            "first_step_cpu_s": round(sw.cpu["step_total"][0], 3),
            "first_update_cpu_s": round(sw.cpu["update"][0], 3),
            "import_and_init_cpu_s": round(firsts["import_and_init"], 3),
            "loss": losses,
            "grad_norm": norms,
        },
    )


def compile_cache(folder: pathlib.Path) -> dict[str, str]:
    """Environment of a process that keeps every compiled program in ``folder``."""
    return {
        "JAX_COMPILATION_CACHE_DIR": str(folder),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }


def child(args: argparse.Namespace, cache: pathlib.Path, out: pathlib.Path) -> dict[str, Any]:
    """``measure`` in a process of its own on one core, with the compile cache in ``cache``."""
    env = os.environ | {"JAX_PLATFORMS": "cpu", "PEER_OUT": str(out)} | compile_cache(cache)
    command = [sys.executable, __file__, "--measure", "--steps", str(args.steps), "--batching", args.batching]
    pinned = ["taskset", "-c", str(args.core), *command]
    subprocess.run(pinned, env=env, check=True, stdout=subprocess.DEVNULL, timeout=1800)
    return json.loads(out.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--batching", choices=("prefix", "padded"), default="prefix")
    parser.add_argument("--core", type=int, default=0, help="the core both processes are pinned to")
    parser.add_argument("--out", type=pathlib.Path, default=None, help="also write the result here")
    parser.add_argument("--measure", action="store_true", help="be one of the two processes")
    args = parser.parse_args()
    if args.measure:
        measure(args.steps, args.batching)
        return
    from crl_jax.telemetry.result import Result, emit

    with tempfile.TemporaryDirectory() as folder:
        cache = pathlib.Path(folder) / "cache"
        cold, warm = (child(args, cache, pathlib.Path(folder) / f"{name}.json") for name in ("cold", "warm"))
    update, step = warm["phases"]["update"], warm["phases"]["step_total"]
    facts = {
        "update_cpu_s": {"best": update["min_cpu_s"], "median": update["median_cpu_s"], "goal": UPDATE_GOAL_S},
        "step_cpu_s": {"best": step["min_cpu_s"], "median": step["median_cpu_s"], "goal": STEP_GOAL_S},
        "first_step_cpu_s": {
            "cold": cold["first_step_cpu_s"],
            "goal_cold": COLD_GOAL_S,
            "cached": warm["first_step_cpu_s"],
            "goal_cached": WARM_GOAL_S,
        },
        "peak_rss_mb": {"cold": cold["peak_rss_mb"], "cached": warm["peak_rss_mb"], "goal": RSS_GOAL_MB},
    }
    best = update["min_cpu_s"]
    details = facts | {"cold": cold, "cached": warm}
    emit(Result("bench_step_update", best, "CPU s", f"<= {UPDATE_GOAL_S}", best <= UPDATE_GOAL_S, details=details), args.out)


if __name__ == "__main__":
    main()
