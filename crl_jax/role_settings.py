"""From the configuration of a role to what its learner is made of.

Owns: the objective, the optimiser, the batch shapes, the way the layers are run, the adapters and the engine's sizes that a configuration
names. Promises: no array is made, so the answers also hold for a mesh of described devices that this machine lacks (``aot``). Does not:
start anything.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from crl_jax.config.check import rows_of_step, task_sets
from crl_jax.config.roles import RoleConfig
from crl_jax.config.schema import Config
from crl_jax.learner import objective
from crl_jax.learner.optimizer import make_optimizer, make_schedule
from crl_jax.models.attention import attention_for, best_kernel, check_kernel
from crl_jax.models.forward import Execution
from crl_jax.models.lora import Lora
from crl_jax.role import Buckets
from crl_jax.sharding.mesh import DATA, FSDP, TENSOR


def lora_of(role: RoleConfig) -> Lora | None:
    """The role's adapters, or None when it trains all weights."""
    return Lora(role.lora.rank, role.lora.alpha, role.lora.targets) if role.lora.rank else None


def execution(role: RoleConfig, mesh: jax.sharding.Mesh) -> Execution:
    """How the learner of ``role`` runs its layers on ``mesh``, whose devices may be described ones that this machine lacks.

    Raises ValueError for an attention kernel of another platform.
    """
    dtype = np.dtype(jnp.bfloat16 if role.compute_dtype == "bfloat16" else jnp.float32)
    shared = role.packing == "prefixes"
    platform = mesh.devices.flat[0].platform
    rows = (DATA, FSDP)
    residual = NamedSharding(mesh, PartitionSpec(rows, TENSOR)) if role.sequence_parallel else None
    wide = NamedSharding(mesh, PartitionSpec(rows, None, TENSOR)) if role.sequence_parallel else None
    kernel = best_kernel(platform, dtype, shared_prefixes=shared) if role.attention == "auto" else role.attention
    check_kernel(kernel, platform)
    return Execution(role.remat, role.scan_layers, dtype, attention_for(kernel, mesh), kernel == "splash", residual, wide)


def engine_options(role: RoleConfig, mesh: jax.sharding.Mesh) -> dict[str, Any]:
    """The sizes of the slot engine that samples for ``role`` on ``mesh``, as arguments of ``SlotEngine``."""
    return {
        "max_slots": role.slots,
        "max_length": role.max_length,
        "mesh": mesh if mesh.size > 1 else None,
        "split_rows": role.serve_tensor > 0 and mesh.size > 1,
        "row_buckets": role.row_buckets,
        "chunk_buckets": role.chunk_buckets,
        "cache_dtype": jnp.dtype(role.serve_dtype),
    }


def optimizer_of(config: Config, name: str, role: RoleConfig) -> optax.GradientTransformation:
    """The optimiser of the role called ``name``, its schedule as long as the run."""
    steps = config.run.steps if name == "actor" else max(config.run.steps, 2)
    o = role.optimizer
    schedule = make_schedule(o.schedule, o.lr, steps=max(steps, o.warmup_steps + 1), warmup_steps=o.warmup_steps)
    return make_optimizer(schedule, b1=o.b1, b2=o.b2, eps=o.eps, weight_decay=o.weight_decay, clip_norm=o.clip_norm)


def buckets_of(config: Config, name: str, role: RoleConfig, mesh: jax.sharding.Mesh) -> Buckets:
    """The batch shapes of the role's train step, as each process of the job fills them: its rows of the step's."""
    processes = jax.process_count()
    turns = max(tasks.max_turns for tasks in task_sets(config).values()) if name == "actor" else 1
    return Buckets.of(
        rows=rows_of_step(config, name) // processes,
        max_length=role.max_length,
        max_tokens=turns * role.sampling.max_new_tokens,
        packing=role.packing,
        row_length=role.row_length,
        multiple=role.microbatches * mesh.shape[DATA] * mesh.shape[FSDP] // processes,
    )


def objective_of(config: Config, name: str) -> objective.Objective:
    """What the role called ``name`` minimises."""
    if name == "actor":
        a = config.actor.loss
        return objective.actor(
            ratio=a.ratio,
            clip_low=a.clip_low,
            clip_high=a.clip_high,
            aggregation=a.aggregate,
            correction=a.correction,
            correction_low=a.correction_low,
            correction_high=a.correction_high,
        )
    e = config.extractor.loss
    return objective.extractor(eps_low=e.eps_low, eps_high=e.eps_high, aggregation=e.aggregate)
