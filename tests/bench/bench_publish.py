"""One swap of weights on eight virtual devices: bytes, seconds by phase, checksum, and what is sampled after it.

Usage:  python tests/bench/bench_publish.py [--swaps 5] [--core 0] [--out docs/results/publish.json]

A model of SmolLM2-135M's sizes, but 8 query and 4 key/value heads of width 72 (9 and 3 do not divide over two devices) and a head of its
own (random tied weights repeat one token), float32, lies on a learner's mesh data=2, fsdp=2, tensor=2 and is published to samplers of two
devices each, four replicas. Between swaps the weights change in a program that takes over their buffers, as a train step does. The value is
the best swap (copy, checksum and hand-over) in seconds. The details compare it with the best ``jax.device_put`` of the same arrays to the
same placement, taken in turns with the swaps, and a copy of its result: what ``device_put`` gives shares memory between replicas here, so
by itself it does not move all bytes.

The goal: every swap brings the bits that ``device_put`` brings, and a request that is half done at a swap goes on, and a new one begins,
with just the greedy tokens that a new engine gives for those weights. Devices are threads of one process here, so "moving" is copying in
memory and all share the given core.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import time
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

DEVICES, TENSOR = 8, 2
TOKENS = 8  # of each greedy completion; half of them before the swap


def measure(swaps: int) -> dict[str, Any]:
    """Everything, in a process with eight devices."""
    import jax
    import jax.numpy as jnp

    from crl_jax.models.presets import SMOLLM2_135M
    from crl_jax.models.transformer import count_params, init
    from crl_jax.serving.publisher import Publisher, Serving
    from crl_jax.sharding.mesh import make_mesh
    from crl_jax.sharding.reshard import serving_mesh
    from crl_jax.sharding.rules import param_shardings

    config = dataclasses.replace(SMOLLM2_135M, name="smollm2-135m, 8 heads", n_heads=8, n_kv_heads=4, head_dim=72, tie_embeddings=False)
    mesh = make_mesh(2, 2, 2)
    serving = Serving(serving_mesh(mesh, TENSOR))
    target = param_shardings(config, serving.mesh)
    weights = jax.jit(init, static_argnums=0, out_shardings=param_shardings(config, mesh))(config, jax.random.key(0))
    learn = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf - 0.5 * jnp.roll(leaf, 1, axis=-1), tree), donate_argnums=0)
    copied = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))

    class Served:
        """A sampler that only takes weights."""

        def publish(self, params: Any, version: int) -> None:
            self.params, self.version = params, version

    sampler = Served()
    publisher = Publisher.of_weights(sampler, config, mesh, serving)
    rows: list[dict[str, Any]] = []
    for version in range(1, swaps + 2):  # the first compiles
        began, cpu = time.perf_counter(), time.process_time()
        published = publisher.publish(weights, version)
        swap = {"wall_s": time.perf_counter() - began, "cpu_s": time.process_time() - cpu, "phases_s": published.seconds}
        began, cpu = time.perf_counter(), time.process_time()
        plain = jax.block_until_ready(jax.device_put(weights, target))
        put = {"wall_s": time.perf_counter() - began, "cpu_s": time.process_time() - cpu}
        own = jax.block_until_ready(copied(plain))
        put |= {"own_memory_wall_s": time.perf_counter() - began, "own_memory_cpu_s": time.process_time() - cpu}
        equal = all(map(same_bits, jax.tree.leaves(plain), jax.tree.leaves(sampler.params)))
        rows.append({"checksum": published.checksum, "equal": equal, "swap": swap, "device_put": put})
        del plain, own
        weights = jax.block_until_ready(learn(weights))
    held = sum(part.data.nbytes for leaf in jax.tree.leaves(sampler.params) for part in leaf.addressable_shards)
    publisher.publish(weights, 1)
    outputs = asyncio.run(sample_across_a_swap(config, publisher, sampler.params, lambda: learn(weights), target))
    found = {"parameters": count_params(config), "bytes": publisher.transfer.nbytes, "bytes_on_all_devices": held}
    return {**found, "first": rows[0], "swaps": rows[1:], "greedy": outputs}


def same_bits(a: Any, b: Any) -> bool:
    """Whether two arrays agree on every device."""
    import numpy as np

    parts = zip(a.addressable_shards, b.addressable_shards, strict=True)
    return all(np.array_equal(np.asarray(x.data).view(np.uint32), np.asarray(y.data).view(np.uint32)) for x, y in parts)


async def sample_across_a_swap(config: Any, publisher: Any, first: Any, learn: Any, target: Any) -> dict[str, Any]:
    """One request that lives through a swap from ``first`` to what ``learn()`` gives, and one after it, each against a new engine."""
    import jax

    from crl_jax.records import SamplingParams
    from crl_jax.serving.engine import SlotEngine
    from crl_jax.serving.sampler import EngineSampler

    def new_engine() -> SlotEngine:
        mesh = jax.tree.leaves(target)[0].mesh
        return SlotEngine(config, max_slots=4, max_length=32, chunk_buckets=(16,), max_steps=TOKENS // 2, mesh=mesh, split_rows=True)

    engine, greedy, prompt = new_engine(), SamplingParams(TOKENS, temperature=0.0), [11, 2903, 31, 40_000, 5]
    sampler = publisher.sampler = EngineSampler(engine, first, version=1)
    plain, second = engine.generate, []

    def then_swap(*args: Any, **kwargs: Any) -> Any:
        out = plain(*args, **kwargs)
        if not second:  # while the first tokens are on their way
            second.append(learn())
            publisher.publish(second[0], 2)
        return out

    engine.generate = then_swap
    crossing = await sampler.complete(prompt, greedy)
    after = await sampler.complete(prompt, greedy)
    await sampler.aclose()
    fresh = EngineSampler(new_engine(), jax.device_put(second[0], target), version=2)
    split = crossing.versions.count(1)
    rest = await fresh.complete([*prompt, *crossing.ids[:split]], SamplingParams(TOKENS - split, temperature=0.0))
    expected = await fresh.complete(prompt, greedy)
    await fresh.aclose()
    return {
        "versions_in_flight": list(crossing.versions),
        "in_flight": list(crossing.ids),
        "in_flight_equal": crossing.ids[split:] == rest.ids,
        "after": list(after.ids),
        "after_equal": after.ids == expected.ids,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--swaps", type=int, default=5, help="timed swaps, after one that compiles")
    parser.add_argument("--core", type=int, default=0, help="the core that all devices share; -1: all cores")
    parser.add_argument("--out", type=pathlib.Path, default=None, help="also write the result here")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(args.swaps)))
        return
    if args.core >= 0:
        os.sched_setaffinity(0, {args.core})
    flags = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES}"}
    command = [sys.executable, __file__, "--measure", "--swaps", str(args.swaps)]
    child = subprocess.run(command, env=os.environ | flags, check=True, stdout=subprocess.PIPE, text=True, timeout=3600)
    report(json.loads(child.stdout.splitlines()[-1]), args.out)


def report(found: dict[str, Any], out: pathlib.Path | None) -> None:
    """Prints what was found and the result."""
    from crl_jax.telemetry.result import Result, emit

    swaps, greedy = found["swaps"], found["greedy"]
    best = min(swaps, key=lambda row: row["swap"]["wall_s"])["swap"]
    plain, put = (min(row["device_put"][key] for row in swaps) for key in ("wall_s", "own_memory_wall_s"))
    ratio, share = best["wall_s"] / put, best["phases_s"]["checksum"] / best["wall_s"]
    right = all(row["equal"] for row in swaps) and greedy["in_flight_equal"] and greedy["after_equal"]
    phases = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in best["phases_s"].items())
    print(f"{found['bytes'] / 1e6:.0f} MB in one copy, {found['bytes_on_all_devices'] / 1e6:.0f} MB on {DEVICES} devices")
    print(f"best swap {best['wall_s']:.3f} s ({phases}), device_put and copy {put:.3f} s, checksum {swaps[-1]['checksum']}")
    print(f"tokens in flight by version {greedy['versions_in_flight']}; equal to a new engine's: {right}")
    details = {
        **found,
        "device_put_s": plain,
        "device_put_and_copy_s": put,
        "ratio_to_device_put_and_copy": ratio,
        "ratio_of_copy_alone": best["phases_s"]["copy"] / put,
        "checksum_share": share,
        "gb_per_s": found["bytes_on_all_devices"] / best["wall_s"] / 1e9,
        "equal": right,
        "mesh": f"data=2, fsdp=2, tensor=2 -> {DEVICES // TENSOR} replicas of tensor={TENSOR}, virtual CPU devices",
    }
    goal = "bits as from jax.device_put on every device, tokens as from a new engine"
    emit(Result("publish", round(best["wall_s"], 4), "seconds per swap", goal, right, details=details), out)


if __name__ == "__main__":
    main()
