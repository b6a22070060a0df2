"""Where LoRA adapters live on the mesh.

Owns: the placement of ``a`` and ``b``, derived from the rule of the matrix they change. Promises: ``x a`` and ``(x a) b`` need the same
traffic as the product with the matrix, on the narrow rank. Does not: place the base (``rules``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from crl_jax.models.lora import Lora, merge
from crl_jax.models.params import Params, flatten, unflatten
from crl_jax.sharding.reshard import Layout, unchanged
from crl_jax.sharding.rules import rule_for


def adapter_shardings(adapters: Params, mesh: Mesh) -> Params:
    """The tree of adapters with a sharding at each leaf: ``a`` split like the matrix's input, ``b`` like its output, the rank whole."""

    def placed(name: str) -> NamedSharding:
        matrix, _, part = name.rpartition(".")
        into, out = rule_for(matrix).axes
        return NamedSharding(mesh, PartitionSpec(into, None) if part == "a" else PartitionSpec(None, out))

    return unflatten({name: placed(name) for name in flatten(adapters)})


def make_merge(lora: Lora, dtype: Any, base: Params, layout: Layout = unchanged) -> Callable[[Params], Params]:
    """``merged(adapters) -> params`` over ``base``, compiled, in ``dtype`` and ``layout``; shares no buffer with ``base``."""

    def cast(base: Params, adapters: Params) -> Params:
        merged = merge(base, adapters, lora)
        return layout(jax.tree.map(lambda leaf: jnp.copy(leaf) if leaf.dtype == jnp.dtype(dtype) else leaf.astype(dtype), merged))

    return functools.partial(jax.jit(cast), base)
