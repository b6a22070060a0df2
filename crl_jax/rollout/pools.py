"""Both kinds of environment pools behind one door.

Owns: which pool a family's environments live in: the device's when its module says ``batched = True``, else worker processes.
Promises: the interface of ``EnvPool``.
Does not: make either kind itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from crl_jax.rollout.device_pool import Batch, DeviceLease, DevicePool
from crl_jax.rollout.pool import EnvPool, Lease, PoolStats
from envs import registry


class Pools:
    """``async with Pools(workers=2) as pools: ...`` on a running event loop."""

    def __init__(
        self,
        workers: int = 1,
        call_timeout_s: float = 20.0,
        *,
        families: Sequence[str] = (),
        episode_timeout_s: float = 0.0,
        worker_memory_mib: int = 0,
    ) -> None:
        self._processes = EnvPool(
            workers=workers,
            call_timeout_s=call_timeout_s,
            families=families,
            episode_timeout_s=episode_timeout_s,
            worker_memory_mib=worker_memory_mib,
        )
        self._device = DevicePool(make_batch, call_timeout_s, episode_timeout_s=episode_timeout_s)

    async def __aenter__(self) -> Self:
        await self._processes.__aenter__()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    async def lease(self, env: str, options: Mapping[str, Any] | None = None) -> Lease | DeviceLease:
        """Borrow an environment. Raises as the pool of its kind does."""
        return await (self._device if is_batched(env) else self._processes).lease(env, options)

    def stats(self) -> PoolStats:
        """The counters of both pools together."""
        return self._processes.stats() + self._device.stats()

    async def close(self) -> None:
        """Stop both. May be called twice."""
        await self._device.close()
        await self._processes.close()


def is_batched(env: str) -> bool:
    """Whether the environment of this registry name is stepped in batches on the device. An unknown one is not."""
    family = env.partition("/")[0]
    return family in registry.families() and getattr(registry.module_of(family), "batched", False)


def make_batch(env: str, slots: int, **options: Any) -> Batch:
    """A batch of the environment with this registry name. Raises KeyError for an unknown one, and what its family raises."""
    registry.spec(env, **options)
    family, _, name = env.partition("/")
    return registry.module_of(family).make_batch(name, slots, **options)
