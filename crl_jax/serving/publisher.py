"""Weights from a learner into its sampler, as one operation: copy to the serving mesh, compare checksums, swap.

Owns: the order of things and the record of each publish. Promises: programs are compiled once; the learner's arrays are read only and stay
usable; what was shipped is compared before it is used (with adapters that is they and the base, not what merging makes of them), and when
it differs the sampler goes on with the older weights; the sampler generates with the older weights while the new ones are copied, so it
pauses only for the swap, between two dispatches (or after a drain, if the sampler was built with one). Does not: number versions, or
decide when to publish.

Two kinds. ``of_weights`` copies all weights. ``of_adapters`` copies only the adapters and adds them to a base that was brought to the
serving mesh once: what travels is a small part of the weights, and the learner never makes the merged ones.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from crl_jax.models.config import ModelConfig
from crl_jax.models.lora import Lora
from crl_jax.models.params import Params, check_complete, flatten
from crl_jax.models.transformer import param_shapes
from crl_jax.sharding.adapters import adapter_shardings, make_merge
from crl_jax.sharding.reshard import Layout, on_own_part, own_part, unchanged
from crl_jax.sharding.rules import param_shardings, replicated
from crl_jax.sharding.together import Meet
from crl_jax.sharding.transfer import Transfer


@dataclasses.dataclass(frozen=True)
class Serving:
    """How a sampler wants its weights: on ``mesh`` (several devices along ``data`` or ``fsdp`` by the rules of ``sharding.rules``), in
    ``dtype``, arranged by ``layout``. In a job of several processes each one's sampler takes the copies on its own devices.
    """

    mesh: Mesh
    dtype: Any = jnp.float32
    layout: Layout = unchanged


@dataclasses.dataclass(frozen=True)
class Published:
    """One publish. ``nbytes`` is what one copy of the shipped arrays takes on the serving mesh (adapters only, where only they travel).

    ``seconds`` by phase: copy, checksum, merge, swap (a drain is part of it). ``checksum``: of what was shipped, the same for the same
    values wherever they lie; empty when it was not computed.
    """

    version: int
    nbytes: int
    seconds: dict[str, float]
    checksum: str

    def metrics(self) -> dict[str, float]:
        """For a tracker: version, bytes and seconds, each phase also by itself."""
        phases = {f"{name}_s": seconds for name, seconds in self.seconds.items()}
        return {"version": self.version, "bytes": self.nbytes, "seconds": sum(self.seconds.values()), **phases}


class Receiver(Protocol):
    """What a publisher needs of a ``Sampler``."""

    def publish(self, params: Any, version: int) -> None:
        """Uses these weights from now on."""
        ...


class Publisher:
    """Made by ``of_weights`` or ``of_adapters``. ``checksum``: whether to compare what arrived with what was sent; ``clock`` in seconds."""

    def __init__(
        self,
        sampler: Receiver,
        transfer: Transfer,
        merge: Callable[[Params], Params] | None = None,
        *,
        checksum: bool = True,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.sampler, self.transfer, self._merge, self._checksum, self._clock = sampler, transfer, merge, checksum, clock
        self._own = own_part(transfer.target_mesh)

    @staticmethod
    def of_weights(
        sampler: Receiver, config: ModelConfig, mesh: Mesh, serving: Serving, *, meet: Meet | None = None, **options: Any
    ) -> Publisher:
        """All weights of ``config``, from where the partition rules place them on ``mesh``. ``meet``: for a mesh of several processes.
        ``options``: those of the class.

        Raises ValueError when the model does not fit a mesh, or a parameter has no partition rule.
        """
        source, target = param_shardings(config, mesh), param_shardings(config, serving.mesh)
        transfer = Transfer(param_shapes(config), source, target, dtype=serving.dtype, layout=serving.layout, meet=meet)
        return Publisher(sampler, transfer, **options)

    @staticmethod
    def of_adapters(
        sampler: Receiver,
        config: ModelConfig,
        mesh: Mesh,
        serving: Serving,
        *,
        lora: Lora,
        base: Params,
        adapters: Params,
        checksum: bool = True,
        meet: Meet | None = None,
        **options: Any,
    ) -> Publisher:
        """The adapters (``adapters``: their tree with a shape at each leaf) over ``base``, which lies on ``mesh`` by the partition rules.

        The base is brought to another serving mesh here, once and compared; on the learner's own mesh it is used as it is. Raises like
        ``of_weights``, and ChecksumMismatch.
        """
        target = param_shardings(config, serving.mesh)
        check_complete(flatten(base), flatten(param_shapes(config)), source="the frozen base")
        kept = base
        if serving.mesh != mesh:
            move = Transfer(base, param_shardings(config, mesh), target, meet=meet)
            kept = move(base)
            if checksum:
                move.check(base, kept)
        transfer = Transfer(adapters, adapter_shardings(adapters, mesh), adapter_shardings(adapters, serving.mesh), meet=meet)
        where = target if serving.mesh.size > 1 else replicated(serving.mesh)
        merge = make_merge(lora, serving.dtype, kept, serving.layout, where=where)
        return Publisher(sampler, transfer, merge, checksum=checksum, **options)

    def publish(self, params: Params, version: int) -> Published:
        """Hands ``params`` (the learner's weights, or its adapters) to the sampler as ``version``; returns when the sampler has taken them.

        Raises ValueError for missing or unknown leaves, ChecksumMismatch when something else arrived than was sent, TimeoutError when the
        sampler drains and does not get there in time. After an error the sampler goes on with the weights it had.
        """
        seconds, began, checksum = dict[str, float](), self._clock(), ""

        def ended(phase: str) -> None:
            nonlocal began
            now = self._clock()
            seconds[phase], began = now - began, now

        served = self.transfer(params)
        ended("copy")
        if self._checksum:
            checksum = self.transfer.check(params, served)
            ended("checksum")
        if self._merge is not None:
            served = jax.block_until_ready(self._merge(served))
            ended("merge")
        self.sampler.publish(on_own_part(served, self._own), version)
        ended("swap")
        return Published(version, self.transfer.nbytes, seconds, checksum)
