"""google-tunix's own sampler on the serving workload (single turn and eight turns).

Usage:  PEER_OUT=tunix.json python serve_tunix.py single|multiturn [--reps 5]

The sampler keeps nothing between calls, so every turn reads its whole history again. Two ways are timed: ``episode`` is one sampler whose
cache holds a whole episode, as its rollout settings have it (one ``kv_cache_size``), with prompts padded to exactly their length;
``episode_sized`` is a sampler of its own for every turn, with a cache that just fits. Log-probs are asked for, as training needs them.
"""

from __future__ import annotations

import importlib.metadata as md
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import bench_tunix
import jax
import numpy as np
import peer_common as pc
import serve_workload as sl
from tunix.generate import sampler as sampler_lib


def make_sampler(model, tokenizer, w: pc.Workload, length: int):
    cache = sampler_lib.CacheConfig(cache_size=length, num_layers=w.num_layers, num_kv_heads=w.num_kv_heads, head_dim=w.head_dim)
    return sampler_lib.Sampler(model, tokenizer, cache)


def ask(sampler, rows: list[sl.Ids], new: int, seed: int) -> sl.Sampled:
    # it puts a BOS before every prompt, which takes the place of the first id
    words = [" ".join(f"w{i}" for i in row[1:]) for row in rows]
    out = sampler(
        words, max_generation_steps=new, max_prompt_length=len(rows[0]), temperature=1.0, top_p=1.0, seed=seed, return_logprobs=True
    )
    return [list(map(int, row)) for row in out.tokens], out.logprobs


def main() -> None:
    args = sl.arguments(__doc__)
    w = pc.workload_from_env()
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    with mesh:
        model = bench_tunix.make_model(w, 0)
    bench_tunix.reinit(model)
    tokenizer = bench_tunix.WordTokenizer(w)
    sw = pc.Stopwatch()

    def talk(samplers, seed: int) -> list[list[sl.Ids]]:
        said, past = [], [[] for _ in range(w.batch)]
        for turn in range(sl.TURNS):
            past = sl.history(past, sl.context(w, seed, turn))
            said.append(ask(samplers[turn], past, sl.NEW, seed)[0])
            past = sl.history(past, said[-1])
        return said

    if args.case == "single":
        sampler = make_sampler(model, tokenizer, w, w.prompt_len + sl.LONG)
        phases = sl.single(sw, w, lambda rows, new, seed: ask(sampler, rows, new, seed), args.reps)
    elif args.case == "multiturn":
        one = [make_sampler(model, tokenizer, w, sl.EPISODE)] * sl.TURNS
        sized = [make_sampler(model, tokenizer, w, (turn + 1) * (sl.CONTEXT + sl.NEW)) for turn in range(sl.TURNS)]
        ways = {"episode": lambda seed: talk(one, seed), "episode_sized": lambda seed: talk(sized, seed)}
        phases = sl.episodes(sw, w, ways, args, compiles=True)
    else:
        raise SystemExit("smollm2: not measured with tunix")
    versions = {k: md.version(k) for k in ("google-tunix", "jax", "jaxlib", "flax", "numpy")}
    sl.report("google-tunix sampler", versions, w, sw, phases, {})


if __name__ == "__main__":
    main()
