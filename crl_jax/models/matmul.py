"""The matrix product of every linear layer, with a backward pass that is fast on CPU and exact in mixed precision.

Owns: ``matmul``. Promises: the kernel may be float32 while the activations are bfloat16: it is cast for the product, and its gradient is
summed and returned in float32. Does not: place anything on a mesh.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from crl_jax.models.lora import LowRank
from crl_jax.models.transposed import Transposed

PRODUCT = "product"  # the name rematerialisation policies know the results by: a product with a rule of its own is no dot to them


def matmul(x: Float[Array, "*d D"], kernel: Float[Array, "D E"], out_dtype: Any = None) -> Float[Array, "*d E"]:
    """``x @ kernel``, multiplied in the type of x, returned as ``out_dtype`` (None: the type of x).

    Rows and positions stay apart, because on a mesh they are split over different axes: merged, the compiler fetches all tokens of all
    devices for the gradient of the kernel instead of summing what each device has.
    """
    dtype = np.dtype(out_dtype or x.dtype)
    if isinstance(kernel, LowRank):
        change = matmul(matmul(x, kernel.a), kernel.b, dtype)
        return matmul(x, jax.lax.stop_gradient(kernel.base), dtype) + kernel.scale * change
    if isinstance(kernel, Transposed):
        return kernel.multiplied(x.reshape(-1, x.shape[-1]), dtype).reshape(*x.shape[:-1], kernel.shape[-1])
    out: Any = checkpoint_name(_product(dtype, x, kernel), PRODUCT)
    return out


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(dtype: np.dtype, x: Float[Array, "*d D"], kernel: Float[Array, "D E"]) -> Float[Array, "*d E"]:
    return jnp.matmul(x, kernel.astype(x.dtype), preferred_element_type=dtype)


def _forward(dtype: np.dtype, x: Float[Array, "*d D"], kernel: Float[Array, "D E"]) -> tuple[Array, tuple[Array, Array]]:
    return _product(dtype, x, kernel), (x, kernel)


def _backward(dtype: np.dtype, saved: tuple[Array, Array], out: Float[Array, "*d E"]) -> tuple[Array, Array]:
    del dtype
    x, kernel = saved
    out = out.astype(x.dtype)
    gradient = jax.lax.platform_dependent(x, out, cpu=_transposed_first, default=_contracted)
    return out @ kernel.astype(x.dtype).T, gradient.astype(kernel.dtype)


def _contracted(x: Float[Array, "*d D"], out: Float[Array, "*d E"]) -> Float[Array, "D E"]:
    leading = tuple(range(x.ndim - 1))
    return jax.lax.dot_general(x, out, ((leading, leading), ((), ())), preferred_element_type=jnp.float32)


def _transposed_first(x: Float[Array, "*d D"], out: Float[Array, "*d E"]) -> Float[Array, "D E"]:
    """The same as one two-dimensional product with the transpose written out: XLA's CPU product of a transposed left side runs at 60-80 %
    of the plain one, and the batched form takes a third longer.
    """
    left, right = x.reshape(-1, x.shape[-1]), out.reshape(-1, out.shape[-1])
    return jnp.matmul(jax.lax.optimization_barrier(left.T), right, preferred_element_type=jnp.float32)


_product.defvjp(_forward, _backward)
