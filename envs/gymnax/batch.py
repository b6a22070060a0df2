"""Many games of one kind, stepped as one batch on the device.

Owns: the state of every slot (on the device), and the one program that resets some slots, steps others and leaves the rest alone.
Promises: what a slot does follows from its seed and actions alone, whatever the number of slots, its place among them and its neighbours;
one program per (game, number of slots) and process; games never restart by themselves.
Does not: know words or turns.

The key of a step is ``fold_in(key(seed), number of the step)`` with the number 0 for the reset, so that randomness depends on nothing else.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from envs.gymnax.games import load


@dataclasses.dataclass(frozen=True)
class Rows:
    """What some slots show after their reset or step, one row each. After a reset reward is 0 and ``ended`` False."""

    observations: np.ndarray
    rewards: Float[np.ndarray, " n"]
    ended: Bool[np.ndarray, " n"]


class DeviceBatch:
    """``slots`` games of kind ``name``. Raises ``EnvUnavailable`` when gymnax is missing."""

    def __init__(self, name: str, slots: int) -> None:
        if slots < 1:
            raise ValueError(f"slots={slots}: a batch has at least 1")
        self.name, self.slots = name, slots
        self._programs = _programs(name)
        self._state = self._programs.empty(slots)

    def grow(self, slots: int) -> None:
        """More slots; the games under way go on. Raises ValueError for fewer."""
        if slots < self.slots:
            raise ValueError(f"{slots} slots: there are {self.slots} already")
        if slots > self.slots:
            self._state = self._programs.join(self._state, self._programs.empty(slots - self.slots))
            self.slots = slots

    def reset(self, slots: Sequence[int], seeds: Sequence[int]) -> Rows:
        """Start the games of ``seeds`` in ``slots``."""
        return self.advance(dict(zip(slots, seeds, strict=True)), {})

    def step(self, slots: Sequence[int], actions: Sequence[int]) -> Rows:
        """Play one action in each of ``slots``."""
        return self.advance({}, dict(zip(slots, actions, strict=True)))

    def advance(self, seeds: Mapping[int, int], actions: Mapping[int, int]) -> Rows:
        """Start games (by slot) and play actions (by slot) in one dispatch; rows come in this order. A slot is in one of them at most."""
        order = [*seeds, *actions]
        if len(set(order)) < len(order) or not all(0 <= slot < self.slots for slot in order):
            raise ValueError(f"slots {order}: use each at most once, from 0 to {self.slots - 1}")
        what = np.zeros((4, self.slots), np.uint32)  # rows: 1 reset, 2 step; the two halves of the seed; action
        for slot, seed in seeds.items():
            what[:3, slot] = 1, seed >> 32, seed & 0xFFFFFFFF
        for slot, action in actions.items():
            what[[0, 3], slot] = 2, action
        self._state, shown = self._programs.advance(self._state, what)
        rows = [array[order] for array in self._programs.fetch(shown)]
        return Rows(rows[0], rows[1], rows[2])


def hidden(name: str, seed: int) -> dict[str, np.ndarray]:
    """The whole state in which the game of ``seed`` starts, by field: for scripted players and tests, which may look behind the game."""
    programs = _programs(name)
    state = programs.fetch(programs.first(np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32)))
    return {field: np.asarray(value) for field, value in vars(state).items()}


@dataclasses.dataclass(frozen=True)
class _Programs:
    empty: Any  # slots -> state
    join: Any  # state, state -> state
    advance: Any  # state, what -> state, (observations, rewards, ended)
    fetch: Any  # arrays on the device -> arrays on the host
    first: Any  # the two halves of a seed -> the state after its reset


@functools.cache
def _programs(name: str) -> _Programs:
    """The programs of a game; jax compiles ``advance`` once per number of slots."""
    env, params = load(name)
    import jax  # here and not above: the registry and the workers import this package without jax
    import jax.numpy as jnp

    def one(slot: tuple[Any, ...], what: Any) -> tuple[Any, Any]:
        state, seed, number = slot
        resets, steps = what[0] == 1, what[0] == 2
        seed = jnp.where(resets, what[1:3], seed)
        number = jnp.where(resets, 0, number + steps)
        key = jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), number)
        first, fresh = env.reset_env(key, params)
        seen, stepped, reward, ended, _ = env.step_env(key, state, what[3].astype(jnp.int32), params)
        after = jax.tree.map(
            lambda new, next_, old: jnp.where(resets, new, jnp.where(steps, next_, old)).astype(old.dtype), fresh, stepped, state
        )
        shown = (
            jnp.where(resets, first, seen),
            jnp.where(steps, reward, 0).astype(jnp.float32),
            jnp.logical_and(steps, ended),
        )
        return (after, seed, number), shown

    def empty(slots: int) -> Any:
        key = jax.random.wrap_key_data(jnp.zeros(2, jnp.uint32), impl="threefry2x32")
        # the types that a state has after a step, which games choose with more care than those after a reset
        state = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, env.step_env(key, env.reset_env(key, params)[1], jnp.int32(0), params)[1]))
        zeros = jax.tree.map(lambda leaf: jnp.zeros((slots, *leaf.shape), leaf.dtype), state)
        return zeros, jnp.zeros((slots, 2), jnp.uint32), jnp.zeros(slots, jnp.uint32)

    @jax.jit
    def first(halves: Any) -> Any:
        key = jax.random.fold_in(jax.random.wrap_key_data(halves, impl="threefry2x32"), 0)
        return env.reset_env(key, params)[1]

    def join(state: Any, more: Any) -> Any:
        return jax.tree.map(lambda a, b: jnp.concatenate([a, b]), state, more)

    return _Programs(empty, join, jax.jit(jax.vmap(one, in_axes=(0, 1)), donate_argnums=0), jax.device_get, first)
