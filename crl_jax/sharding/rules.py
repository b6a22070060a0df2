"""Which mesh axis splits which dimension of which array.

Owns: the partition rule of every parameter, of batches and of caches, and the check that a model fits a mesh. Promises: a parameter without
a rule is an error, never silently replicated. Does not: build models or meshes.

Matrices that read the residual stream split their output over ``tensor`` and those that write to it split their input, so a block needs one
all-reduce after attention and one after the MLP (Megatron-LM, arXiv:1909.08053); the other dimension is split over ``fsdp`` (ZeRO-3,
arXiv:1910.02054).
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from crl_jax.models.params import Params, flatten, unflatten
from crl_jax.models.transformer import KVCache, ModelConfig, param_shapes
from crl_jax.sharding.mesh import DATA, FSDP, TENSOR


class Rule(NamedTuple):
    """``axes[i]`` splits dimension i; ``units[i]`` is the ModelConfig field that counts what may not be cut (heads, not their width)."""

    pattern: str
    axes: tuple[str | None, ...]
    units: tuple[str, ...]


RULES = (
    Rule(r"embed\.table", (TENSOR, FSDP), ("vocab_size", "d_model")),
    Rule(r"head\.kernel", (FSDP, TENSOR), ("d_model", "vocab_size")),
    Rule(r"layers\.\d+\.attn\.q", (FSDP, TENSOR), ("d_model", "n_heads")),
    Rule(r"layers\.\d+\.attn\.[kv]", (FSDP, TENSOR), ("d_model", "n_kv_heads")),
    Rule(r"layers\.\d+\.attn\.o", (TENSOR, FSDP), ("n_heads", "d_model")),
    Rule(r"layers\.\d+\.attn\.q_bias", (TENSOR,), ("n_heads",)),
    Rule(r"layers\.\d+\.attn\.[kv]_bias", (TENSOR,), ("n_kv_heads",)),
    Rule(r"layers\.\d+\.mlp\.(gate|up)", (FSDP, TENSOR), ("d_model", "d_ff")),
    Rule(r"layers\.\d+\.mlp\.down", (TENSOR, FSDP), ("d_ff", "d_model")),
    Rule(r"layers\.\d+\.attn\.[qk]_norm\.scale", (None,), ("head_dim",)),
    Rule(r"(layers\.\d+\.(attn|mlp)(_post)?_norm|final_norm)\.scale", (None,), ("d_model",)),
)


def rule_for(name: str) -> Rule:
    """The rule of the parameter called ``name``. Raises ValueError when there is none."""
    for rule in RULES:
        if re.fullmatch(rule.pattern, name):
            return rule
    raise ValueError(f"parameter `{name}` has no partition rule: add one to RULES in crl_jax/sharding/rules.py")


def check_divisible(config: ModelConfig, mesh: Mesh) -> None:
    """Check that every split dimension of ``config`` divides evenly over ``mesh``.

    Raises ValueError naming the axis, the field, the model, the parameter and the axis sizes that work.
    """
    for name in flatten(param_shapes(config)):
        rule = rule_for(name)
        for axis, unit in zip(rule.axes, rule.units, strict=True):
            count = getattr(config, unit)
            if axis is not None and count % mesh.shape[axis]:
                size = mesh.shape[axis]
                raise ValueError(
                    f"mesh axis `{axis}`={size} does not divide {unit}={count} of model `{config.name}` ({name}): "
                    f"use {_alternatives(count, size, unit)}"
                )


def param_shardings(config: ModelConfig, mesh: Mesh) -> Params:
    """The tree of parameters with a NamedSharding at each leaf. Raises like ``check_divisible``."""
    check_divisible(config, mesh)
    return unflatten({name: _sharding(name, mesh) for name in flatten(param_shapes(config))})


def shard_params(params: Params, mesh: Mesh) -> Params:
    """``params`` placed on ``mesh`` by their rules. Raises ValueError for a parameter without a rule."""
    return unflatten({name: jax.device_put(leaf, _sharding(name, mesh)) for name, leaf in flatten(params).items()})


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Rows of a batch split over data and fsdp; later dimensions whole."""
    return NamedSharding(mesh, PartitionSpec((DATA, FSDP)))


def cache_sharding(config: ModelConfig, mesh: Mesh) -> KVCache:
    """A KVCache of shardings: rows over data and fsdp, key/value heads over tensor. Raises like ``check_divisible``."""
    check_divisible(config, mesh)
    layer: Any = NamedSharding(mesh, PartitionSpec((DATA, FSDP), TENSOR))
    return KVCache((layer,) * config.n_layers, (layer,) * config.n_layers)


def replicated(mesh: Mesh) -> NamedSharding:
    """The whole array on every device."""
    return NamedSharding(mesh, PartitionSpec())


def _sharding(name: str, mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec(*rule_for(name).axes))


def _alternatives(count: int, size: int, unit: str) -> str:
    """Axis sizes near ``size`` that divide ``count``, in words."""
    *others, last = [str(d) for d in range(1, 2 * size + 1) if count % d == 0]
    words = f"{', '.join(others)} or {last}" if others else last
    return f"{words}, or pad the vocabulary to {-(-count // size) * size} entries" if unit == "vocab_size" else words
