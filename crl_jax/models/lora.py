"""Low-rank adapters over frozen weights (LoRA, arXiv:2106.09685).

Owns: the adapters' tree, the matrix that multiplies as ``W + (alpha / rank) a b`` without being made, and merging. Promises: with the
initial ``b`` = 0 the model computes exactly what its base does; the base gets no gradient; merging gives plain parameters that every other
part (serving, export) takes. Does not: train (``learner.lora``) or place arrays on devices (``sharding.adapters``).

Adapters are nested like the parameters they change, with ``a`` [in, rank] and ``b`` [rank, out] in place of the matrix, so one base can
carry several sets of adapters.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from crl_jax.models.params import Params, flatten, unflatten

TARGETS = ("q", "k", "v", "o", "gate", "up", "down")
"""Matrices of each layer that can have an adapter, by the last part of their names."""


@dataclasses.dataclass(frozen=True)
class Lora:
    """Rank of the change, its scale ``alpha / rank``, and which matrices of each layer it changes.

    Raises ValueError for a rank below 1, no targets, or an unknown one (naming those there are).
    """

    rank: int
    alpha: float
    targets: tuple[str, ...] = TARGETS

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"lora rank {self.rank} must be at least 1")
        unknown = [name for name in self.targets if name not in TARGETS]
        if unknown or not self.targets:
            raise ValueError(f"lora targets {list(self.targets)}: use one or more of {list(TARGETS)}")

    @property
    def scale(self) -> float:
        """Factor of ``a b``."""
        return self.alpha / self.rank

    def adapts(self, name: str) -> bool:
        """Whether the parameter with this dotted name has an adapter."""
        *parents, last = name.split(".")
        return parents[:1] == ["layers"] and last in self.targets


@functools.partial(jax.tree_util.register_dataclass, data_fields=["base", "a", "b"], meta_fields=["scale"])
@dataclasses.dataclass(frozen=True)
class LowRank:
    """A matrix ``base + scale a b`` that is only ever multiplied from the left; stands where a kernel stands in the parameters."""

    base: Float[Array, "D E"]
    a: Float[Array, "D r"]
    b: Float[Array, "r E"]
    scale: float

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the matrix it stands for."""
        return self.base.shape

    @property
    def ndim(self) -> int:
        """Always 2."""
        return self.base.ndim

    @property
    def dtype(self) -> Any:
        """Type of the base."""
        return self.base.dtype

    def __getitem__(self, key: Any) -> LowRank:
        if key is not Ellipsis:
            raise TypeError("a low-rank matrix can only be multiplied: merge it to index it")
        return self

    def __rmatmul__(self, x: Float[Array, "*d D"]) -> Float[Array, "*d E"]:
        base, a, b = (jnp.asarray(m, x.dtype) for m in (jax.lax.stop_gradient(self.base), self.a, self.b))
        return x @ base + self.scale * ((x @ a) @ b)


def init_adapters(shapes: Params, lora: Lora, key: Array) -> Params:
    """Fresh float32 adapters for parameters of ``shapes`` (arrays or ShapeDtypeStructs): ``a`` normal with variance 1/in, ``b`` zero."""
    targets = {name: leaf for name, leaf in flatten(shapes).items() if lora.adapts(name)}
    keys = jax.random.split(key, len(targets))
    flat: dict[str, Array] = {}
    for one, (name, leaf) in zip(keys, targets.items(), strict=True):
        fan_in, fan_out = leaf.shape
        flat[f"{name}.a"] = jax.random.normal(one, (fan_in, lora.rank), jnp.float32) * fan_in**-0.5
        flat[f"{name}.b"] = jnp.zeros((lora.rank, fan_out), jnp.float32)
    return unflatten(flat)


def attach(base: Params, adapters: Params, lora: Lora) -> Params:
    """``base`` with a ``LowRank`` in place of each adapted matrix; all other leaves are the base's own, frozen."""
    flat, adapted = flatten(base), flatten(adapters)
    joined: dict[str, Any] = {}
    for name, leaf in flat.items():
        if lora.adapts(name):
            joined[name] = LowRank(leaf, adapted[f"{name}.a"], adapted[f"{name}.b"], lora.scale)
        else:
            joined[name] = jax.lax.stop_gradient(leaf)
    return unflatten(joined)


def merge(base: Params, adapters: Params, lora: Lora) -> Params:
    """Plain parameters ``W + scale a b``, the sum in float32, each in the base's type."""
    flat, adapted = flatten(base), flatten(adapters)

    def merged(name: str, leaf: Any) -> Any:
        if not lora.adapts(name):
            return leaf
        change = jnp.matmul(adapted[f"{name}.a"], adapted[f"{name}.b"], precision=jax.lax.Precision.HIGHEST)
        return (leaf.astype(jnp.float32) + lora.scale * change).astype(leaf.dtype)

    return unflatten({name: merged(name, leaf) for name, leaf in flat.items()})
