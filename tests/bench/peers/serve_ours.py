"""Our engine on the serving workload (single turn, eight turns, SmolLM2-135M), by the ``Sampler`` that trainers and servers use.

Usage:  PEER_OUT=ours.json python serve_ours.py single|multiturn|smollm2 [--reps 5] [--prompts FILE]

Weights are published as for a rollout. In the eight turns every conversation is a session, so a turn hands over its new ids only; the
counters of the sampler say how many ids were prefilled and how many had to be computed again. The best rate of plain matrix products
says how fast the core was; the SmolLM2 case measures it before and after, and reading memory too.
"""

from __future__ import annotations

import asyncio
import importlib.metadata as md
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[2]), str(HERE.parent), str(HERE)]

import bench_step  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import peer_common as pc  # noqa: E402
import serve_workload as sl  # noqa: E402

from crl_jax.host_memory import keep_freed_memory  # noqa: E402
from crl_jax.models import transformer  # noqa: E402
from crl_jax.models.load import load_params  # noqa: E402
from crl_jax.models.presets import preset  # noqa: E402
from crl_jax.records import SamplingParams  # noqa: E402
from crl_jax.serving.engine import SlotEngine  # noqa: E402
from crl_jax.serving.sampler import EngineSampler  # noqa: E402
from crl_jax.sharding.mesh import make_mesh  # noqa: E402
from crl_jax.sharding.reshard import make_copy, serving_layout  # noqa: E402

SHAPES = ((1024, 1024, 1024), (512, 576, 1536), (1536, 576, 32), (49_152, 576, 32))  # (M, K, N) of the products timed for the peak
READ = 2**27  # float32 entries read for the memory bandwidth: far more than any cache


def publish(params: Any) -> Any:
    """Weights as a rollout gets them."""
    return jax.block_until_ready(make_copy(jnp.float32, serving_layout(make_mesh(1, 1, 1)))(params))


def tiny(w: pc.Workload) -> tuple[Any, Any]:
    """The peers' random Llama, N(0, 0.02)."""
    config = bench_step.model_config(w)
    params = jax.jit(transformer.init, static_argnums=0)(config, jax.random.key(0))
    return config, publish(jax.tree.map(lambda x: x if x.ndim < 2 else x * (0.02 / jnp.std(x)), params))


async def burst(sampler: EngineSampler, rows: list[sl.Ids], new: int, temperature: float, seed: int) -> sl.Sampled:
    """One completion for every row, all at once."""
    params = [SamplingParams(new, temperature, seed=seed * len(rows) + i) for i in range(len(rows))]
    done = await asyncio.gather(*(sampler.complete(row, how) for row, how in zip(rows, params, strict=True)))
    return [list(c.ids) for c in done], [list(c.logps) for c in done]


async def talk(sampler: EngineSampler, w: pc.Workload, seed: int) -> list[list[sl.Ids]]:
    """All conversations in sessions, turn by turn."""
    sessions = [await sampler.open() for _ in range(w.batch)]
    said = list[list[sl.Ids]]()
    for turn in range(sl.TURNS):
        params = [SamplingParams(sl.NEW, seed=(seed * sl.TURNS + turn) * w.batch + i) for i in range(w.batch)]
        asked = zip(sessions, sl.context(w, seed, turn), params, strict=True)
        said.append([list(c.ids) for c in await asyncio.gather(*(sampler.generate(*one) for one in asked))])
    for session in sessions:
        await sampler.close(session)
    return said


def counted(sampler: EngineSampler, w: pc.Workload, episodes: int) -> dict[str, float]:
    """What the sampler prefilled and recomputed per episode of one conversation, and evicted in all."""
    stats = sampler.stats()
    per_episode = {name: stats[name] / episodes / w.batch for name in ("prefilled_tokens", "recomputed_tokens", "shared_tokens")}
    return per_episode | {"evictions": stats["evictions"]}


def best_s(call: Callable[[], Any], reps: int) -> float:
    """The least CPU seconds of ``call`` after one that is not counted."""
    call()
    seconds = []
    for _ in range(reps):
        began = time.process_time()
        call()
        seconds.append(time.process_time() - began)
    return min(seconds)


def product_rates() -> dict[str, float]:
    """GFLOP/s of plain products, by JAX and by numpy (its BLAS)."""
    found = dict[str, float]()
    for m, k, n in SHAPES:
        a, b = np.ones((m, k), np.float32), np.ones((k, n), np.float32)
        ours, theirs, product = jnp.asarray(a), jnp.asarray(b), jax.jit(jnp.matmul)
        for name, call in (("jax", lambda p=product, x=ours, y=theirs: p(x, y).block_until_ready()), ("numpy", lambda x=a, y=b: x @ y)):
            found[f"gflops {name} {m}x{k}x{n}"] = 2e-9 * m * k * n / best_s(call, 8)
    return found


def memory_rates() -> dict[str, float]:
    """GB/s of reading memory, by JAX and by numpy."""
    found = dict[str, float]()
    matrix, vector = np.ones((READ // 1024, 1024), np.float32), np.ones(1024, np.float32)
    ours, total = jnp.asarray(matrix), jax.jit(jnp.matmul)
    found["gbytes jax matrix-vector"] = 4e-9 * READ / best_s(lambda: total(ours, vector).block_until_ready(), 4)
    found["gbytes numpy matrix-vector"] = 4e-9 * READ / best_s(lambda: matrix @ vector, 4)
    found["gbytes numpy dot"] = 4e-9 * READ / best_s(lambda: np.dot(matrix.ravel(), matrix.ravel()), 4)
    return found


def smollm2(sw: pc.Stopwatch, args: Any) -> tuple[dict[str, int], dict[str, Any]]:
    """The SmolLM2 case: phases, and what else the report holds."""
    config = preset("smollm2-135m")
    params = publish(load_params("builtin:smollm2-135m", config, seed=0))
    samplers = list[EngineSampler]()

    def make(batch: int) -> sl.Generate:
        if samplers:
            asyncio.run(samplers[-1].aclose())
        length = sl.SMOLLM2_PROMPT + sl.LONG
        engine = SlotEngine(config, max_slots=batch, max_length=length, row_buckets=(8,), chunk_buckets=(sl.SMOLLM2_PROMPT,))
        samplers.append(EngineSampler(engine, params))
        return lambda rows, new, seed: asyncio.run(burst(samplers[-1], rows, new, 0.0, seed))

    before = product_rates() | memory_rates()
    phases, found = sl.smollm2_batches(sw, args, make)
    asyncio.run(samplers[-1].aclose())
    after = product_rates() | memory_rates()
    return phases, {"rates": {name: max(rate, after[name]) for name, rate in before.items()}, **found}


def main() -> None:
    args = sl.arguments(__doc__ or "")
    keep_freed_memory()
    w, sw = pc.workload_from_env(), pc.Stopwatch()
    extra = dict[str, Any]()
    if args.case == "smollm2":
        phases, extra = smollm2(sw, args)
    else:
        config, params = tiny(w)
        length = w.prompt_len + sl.LONG if args.case == "single" else sl.EPISODE
        engine = SlotEngine(config, max_slots=w.batch, max_length=length, row_buckets=(w.num_prompts,), chunk_buckets=(sl.CONTEXT,))
        sampler = EngineSampler(engine, params)
        if args.case == "single":
            phases = sl.single(sw, w, lambda rows, new, seed: asyncio.run(burst(sampler, rows, new, 1.0, seed)), args.reps)
        else:
            phases = sl.episodes(sw, w, {"episode": lambda seed: asyncio.run(talk(sampler, w, seed))}, args, compiles=True)
            extra = {"per_episode": counted(sampler, w, args.reps + 1)}
        extra |= {"stats": sampler.stats(), "rates": product_rates()}
        asyncio.run(sampler.aclose())
    versions = {k: md.version(k) for k in ("jax", "jaxlib", "numpy")}
    sl.report("crl_jax", versions, w, sw, phases, extra)


if __name__ == "__main__":
    main()
