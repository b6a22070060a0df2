"""Matrices kept [out, in] for decoding on CPU.

Owns: the stored form and its product. Promises: the numbers are those of the plain matrix up to rounding. Does not: train; the form has no
gradient rule worth using.

XLA on CPU packs the right side of a product anew at every call, and in decoding the right side is the weights: with 32 rows of activations
packing takes as long as multiplying. With the weights on the left only the activations are packed (measured 1.6 times as fast at 32 rows,
1.8 at 4; weights larger than the cache).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from crl_jax.models.lora import TARGETS
from crl_jax.models.params import Params, flatten, unflatten

FEW_ROWS = 64  # up to so many rows the weights go to the left; above, packing them is a small part of the work


@functools.partial(jax.tree_util.register_dataclass, data_fields=["stored"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Transposed:
    """A matrix ``[D, E]`` stored as ``[E, D]``; stands where a kernel stands in the parameters and can only be multiplied from the left."""

    stored: Float[Array, "E D"]

    @property
    def shape(self) -> tuple[int, int]:
        """(D, E), of the matrix it stands for."""
        return self.stored.shape[1], self.stored.shape[0]

    @property
    def ndim(self) -> int:
        """Always 2."""
        return 2

    @property
    def dtype(self) -> Any:
        """Type of its entries."""
        return self.stored.dtype

    def __getitem__(self, key: Any) -> Transposed:
        if key is not Ellipsis:
            raise TypeError("a transposed matrix can only be multiplied: index `stored`")
        return self

    def multiplied(self, x: Float[Array, "M D"], dtype: Any) -> Float[Array, "M E"]:
        """``x @ matrix`` as ``dtype``."""
        return from_the_left(x, self.stored, dtype)


def from_the_left(x: Float[Array, "M D"], stored: Float[Array, "E D"], dtype: Any) -> Float[Array, "M E"]:
    """``x @ stored.T`` as ``dtype``; for few rows as ``(stored @ x.T).T``."""
    stored = stored.astype(x.dtype)
    if x.shape[0] > FEW_ROWS:
        return jnp.matmul(x, stored.T, preferred_element_type=dtype)
    # The barriers keep the compiler from folding the transpositions into the product, which would put the weights back on the right.
    out = jnp.matmul(stored, jax.lax.optimization_barrier(x.T), preferred_element_type=dtype)
    return jax.lax.optimization_barrier(out).T


def transposed(params: Params) -> Params:
    """``params`` with the matrices of attention and MLP as ``Transposed``; everything else as it is."""
    flat = flatten(params)
    return unflatten({name: Transposed(leaf.T) if name.split(".")[-1] in TARGETS else leaf for name, leaf in flat.items()})
