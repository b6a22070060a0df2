"""A tree of parameters from one placement to another: copied by a compiled program, and compared by checksums.

Owns: the copy, the two programs of sums, and the check that the tree is complete. Promises: nothing is filled in for a missing leaf; the
result shares no buffer with the input, so the learner may give its buffers away in its next step. Does not: know versions or samplers.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from crl_jax.models.params import Params, check_complete, flatten
from crl_jax.sharding.checksum import compare_sums, join_sums, make_sums
from crl_jax.sharding.reshard import Layout, cast, unchanged
from crl_jax.sharding.rules import replicated
from crl_jax.sharding.together import Meet, Together


class Transfer:
    """``transfer(params)`` is a copy of ``params`` on the target in ``dtype`` (None: each leaf its own) and ``layout``.

    ``shapes``: the tree with a shape at each leaf. ``source`` and ``target``: trees with a NamedSharding at each leaf; the target has the
    devices of the source in the same order. ``nbytes`` counts one copy on the target. ``meet``: for a mesh of several processes.

    Raises ValueError for a layout of its own on more than one device, or one that drops, adds or reshapes a leaf.
    """

    def __init__(
        self,
        shapes: Params,
        source: Params,
        target: Params,
        *,
        dtype: Any = None,
        layout: Layout = unchanged,
        meet: Meet | None = None,
    ) -> None:
        shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), shapes)  # arrays may be given, none is kept
        self._expected = flatten(shapes)
        mesh = jax.tree.leaves(target)[0].mesh
        if mesh.size > 1 and layout is not unchanged:
            raise ValueError(f"a serving layout is for one device, the serving mesh has {mesh.size}: use layout=unchanged")
        self.target_mesh = mesh
        alone = replicated(mesh)  # on one device; there the layout decides what a leaf is
        self._source, self._target = source, target if mesh.size > 1 else jax.tree.map(lambda _: alone, target)

        def converted(params: Params) -> Params:
            return layout(cast(params, dtype))

        served = jax.eval_shape(converted, shapes)
        check_complete(flatten(served), self._expected, source="the serving layout")
        self.nbytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(served))
        copy = jax.jit(converted, out_shardings=self._target if mesh.size > 1 else alone)
        self.copy: Any = Together(copy, meet, "the program that copies weights")
        self._sums = make_sums(source, dtype, meet), make_sums(self._target, None, meet)

    def __call__(self, params: Params) -> Params:
        """The copy, when it is there. Raises ValueError naming missing and unknown leaves."""
        check_complete(flatten(params), self._expected, source="the learner")
        return jax.block_until_ready(self.copy(params))

    def check(self, params: Params, served: Params) -> str:
        """The checksum of ``served`` in hexadecimal, the same for the same values on any placement. Fetches two small arrays.

        Raises ChecksumMismatch naming the leaves of which a copy on some devices is not bit for bit that of ``params``, and ValueError for
        leaves that are missing.
        """
        check_complete(flatten(served), self._expected, source="the sampler")
        before, after = self._sums
        sums: tuple[np.ndarray, np.ndarray] = jax.device_get((before(params), after(served)))
        return compare_sums(join_sums(sums[0], self._source), join_sums(sums[1], self._target))
