"""Where LoRA adapters live on the mesh.

Owns: the placement of ``a`` and ``b``, derived from the rule of the matrix they change. Promises: ``x a`` and ``(x a) b`` need the same
traffic as the product with the matrix, on the narrow rank. Does not: place the base (``rules``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from crl_jax.models.lora import Lora, merge
from crl_jax.models.params import Params, flatten, unflatten
from crl_jax.sharding.reshard import Layout, cast, unchanged
from crl_jax.sharding.rules import rule_for


def adapter_shardings(adapters: Params, mesh: Mesh) -> Params:
    """The tree of adapters with a sharding at each leaf: ``a`` split like the matrix's input, ``b`` like its output, the rank whole."""

    def placed(name: str) -> NamedSharding:
        matrix, _, part = name.rpartition(".")
        into, out = rule_for(matrix).axes
        return NamedSharding(mesh, PartitionSpec(into, None) if part == "a" else PartitionSpec(None, out))

    return unflatten({name: placed(name) for name in flatten(adapters)})


def make_merge(lora: Lora, dtype: Any, base: Params, layout: Layout = unchanged, *, where: Any = None) -> Callable[[Params], Params]:
    """``merged(adapters) -> params`` over ``base``, compiled, in ``dtype`` and ``layout``; shares no buffer with ``base``.

    ``where``: sharding of the result, one for all leaves or one at each (None: the compiler's choice).
    """

    def merged(base: Params, adapters: Params) -> Params:
        return layout(cast(merge(base, adapters, lora), dtype))

    return functools.partial(jax.jit(merged) if where is None else jax.jit(merged, out_shardings=where), base)
