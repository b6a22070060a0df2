"""google-tunix GRPOLearner on JAX-CPU with the shared workload: rollout, update and whole-step times.

Usage:  PEER_OUT=tunix.json python bench_tunix.py [--steps 6] [--beta 0.0]
"""

from __future__ import annotations

import argparse
import importlib.metadata as md
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "disabled")

import grain
import grain.python as grain_py  # noqa: F401  (import check only)
import jax
import jax.numpy as jnp
import numpy as np
import optax
import peer_common as pc
from flax import nnx
from tunix.models.llama3 import model as llama
from tunix.rl import rl_cluster as rlc
from tunix.rl.grpo import grpo_learner as grpo
from tunix.rl.rollout import base_rollout


class WordTokenizer:
    """Word-level tokenizer with the methods tunix's TokenizerAdapter looks for."""

    def __init__(self, w: pc.Workload):
        self._w = w

    def encode(self, text, **_):
        return [int(t[1:]) for t in text.split()]

    def decode(self, ids, **_):
        return " ".join(f"w{int(i)}" for i in ids)

    def bos_id(self):
        return 1

    def eos_id(self):
        return self._w.vocab_size  # outside the vocabulary: it can never be sampled

    def pad_id(self):
        return 0


def make_model(w: pc.Workload, seed: int):
    shd = llama.ShardingConfig.get_default_sharding()
    cfg = llama.ModelConfig(
        num_layers=w.num_layers,
        vocab_size=w.vocab_size,
        embed_dim=w.embed_dim,
        hidden_dim=w.hidden_dim,
        num_heads=w.num_heads,
        head_dim=w.head_dim,
        num_kv_heads=w.num_kv_heads,
        rope_theta=w.rope_theta,
        norm_eps=w.norm_eps,
        weight_tying=True,
        shd_config=shd,
    )
    cls = getattr(llama, "Llama3", None) or llama.Transformer
    return cls(cfg, rngs=nnx.Rngs(seed))


def reinit(model) -> None:
    """Draws every matrix from N(0, 0.02) as the HF model of bench_trl.py has it.

    tunix 0.1.7's own init would not be comparable: attention and embedding have std 0.01 and the MLP kernels are all zero,
    so the MLP is dead (zero output, zero gradient) in a model that was not loaded from a checkpoint.
    """
    state = nnx.state(model, nnx.Param)
    leaves, tree = jax.tree.flatten(state)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    new = [0.02 * jax.random.normal(k, x.shape, x.dtype) if x.ndim > 1 else x for k, x in zip(keys, leaves, strict=True)]
    nnx.update(model, jax.tree.unflatten(tree, new))
    stds = [float(jnp.std(x)) for x in jax.tree.leaves(nnx.state(model, nnx.Param)) if x.ndim > 1]
    assert all(abs(x - 0.02) < 1e-3 for x in stds), stds


def main() -> None:
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=6)
    p.add_argument("--beta", type=float, default=0.0)
    args = p.parse_args()
    w = pc.workload_from_env()
    # Auto axes: jax.make_mesh now defaults to Explicit ones, which tunix 0.1.7 models do not support
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    with mesh:
        actor, reference = make_model(w, 0), (make_model(w, 0) if args.beta else None)
    reinit(actor)
    if reference is not None:
        reinit(reference)
    before = [np.asarray(x).copy() for x in jax.tree.leaves(nnx.state(actor, nnx.Param)) if x.ndim > 1]
    n_params = sum(x.size for x in jax.tree.leaves(nnx.state(actor, nnx.Param)))

    tok = WordTokenizer(w)
    roles = {rlc.Role.ACTOR: mesh, rlc.Role.ROLLOUT: mesh, rlc.Role.REFERENCE: mesh}
    engine_cls = getattr(rlc, "RLEngine", None) or rlc.RLCluster
    cluster = engine_cls(
        actor=actor,
        reference=reference,
        tokenizer=tok,
        cluster_config=rlc.ClusterConfig(
            role_to_mesh=roles,
            rollout_engine="vanilla",
            offload_to_cpu=False,
            training_config=rlc.RLTrainingConfig(
                actor_optimizer=optax.adamw(w.learning_rate),
                eval_every_n_steps=10_000,
                max_steps=args.steps,
                mini_batch_size=w.num_prompts,
                train_micro_batch_size=w.num_prompts,
            ),
            rollout_config=base_rollout.RolloutConfig(
                max_tokens_to_generate=w.completion_len,
                max_prompt_length=w.prompt_len,
                kv_cache_size=w.prompt_len + w.completion_len,
                temperature=1.0,
                top_p=1.0,
                top_k=None,
            ),
        ),
    )

    sw = pc.Stopwatch()
    lengths: list[float] = []

    gen = cluster.generate

    def timed_generate(*a, **k):
        with sw.time("rollout_generate"):
            out = gen(*a, **k)
            jax.block_until_ready([t for t in out.tokens if hasattr(t, "block_until_ready")])
        lengths.append(float(np.mean([len(t) for t in out.tokens])))
        return out

    cluster.generate = timed_generate

    def reward(prompts, completions, **_):
        return [float(sum(map(ord, c)) % 7) / 7.0 for c in completions]

    learner = grpo.GRPOLearner(
        **{("rl_engine" if engine_cls.__name__ == "RLEngine" else "rl_cluster"): cluster},
        reward_fns=reward,
        algo_config=grpo.GRPOConfig(num_generations=w.num_generations, num_iterations=1, beta=args.beta),
    )

    gac = learner._generate_and_compute_advantage

    def timed_gac(*a, **k):
        sw.mark_box()
        with sw.time("rollout_total"):
            out = gac(*a, **k)
            jax.block_until_ready(jax.tree.leaves(out))
        return out

    learner._generate_and_compute_advantage = timed_gac

    upd = cluster.update_actor

    def timed_update(*a, **k):
        with sw.time("update"):
            out = upd(*a, **k)
            jax.block_until_ready(jax.tree.leaves(nnx.state(cluster.actor_trainer.model, nnx.Param)))
        return out

    cluster.update_actor = timed_update

    # the sampler prepends BOS: one word fewer keeps the prompt at exactly prompt_len tokens (else it pads to 128)
    rows = [pc.prompt_words(w, i).split(" ", 1)[1] for i in range(w.num_prompts * args.steps)]

    class Source(grain.sources.RandomAccessDataSource if hasattr(grain, "sources") else object):
        def __getitem__(self, i):
            return rows[i]

        def __len__(self):
            return len(rows)

    ds = grain.MapDataset.source(Source()).batch(w.num_prompts).map(lambda x: {"prompts": x})
    with mesh:
        learner.train(ds)

    for kind in ("wall", "cpu"):
        d = getattr(sw, kind)
        d["step_total"] = [r + u for r, u in zip(d["rollout_total"], d["update"], strict=True)]
    after = [np.asarray(x) for x in jax.tree.leaves(nnx.state(cluster.actor_trainer.model, nnx.Param)) if x.ndim > 1]
    moved = [float(np.abs(a - b).max()) for a, b in zip(after, before, strict=True)]
    assert min(moved) > 0, f"some weights never moved: {moved}"
    phases = {
        "rollout_generate": w.completion_tokens,
        "rollout_total": w.completion_tokens,
        "update": w.total_tokens,
        "step_total": w.completion_tokens,
    }
    versions = {k: md.version(k) for k in ("google-tunix", "jax", "jaxlib", "flax", "optax", "qwix", "numpy")}
    pc.report(
        f"tunix-GRPOLearner beta={args.beta} vanilla sampler",
        versions,
        w,
        sw,
        phases,
        {
            "params": int(n_params),
            "completion_mean_len": lengths,
        },
    )


if __name__ == "__main__":
    main()
