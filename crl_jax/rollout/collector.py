"""The collector: whole groups of episodes, guided and free, many at once.

Owns: which members of a group are guided (by id, never by position in a result list), retrieval at episode start, and the pool of
environment leases. Promises: a batch is complete or raises, and one in which nobody could begin raises; an environment that cannot be lent
fails its own episodes only; free episodes never touch the bank; evaluation reads the bank without counting. Does not: learn, or decide when
to start (admission is the caller's).
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from crl_jax.errors import UserError
from crl_jax.records import Condition, Episode, Group, SamplingParams, Task
from crl_jax.rollout.agent import ActorPrompts, Answer, Ask, Codec, EpisodeSampler, Plan, run_episode
from crl_jax.rollout.device_pool import DeviceLease, DevicePool
from crl_jax.rollout.gate import Gate
from crl_jax.rollout.pool import EnvError, EnvPool, Lease, Quarantined
from crl_jax.rollout.pools import Pools
from crl_jax.scopes import long_scope
from crl_jax.seeds import derive_seed
from envs.api import Observation, Step


class PromptTooLong(UserError, RuntimeError):
    """No episode of a batch could begin."""


class Bank(Protocol):
    """The part of the experience manager a rollout uses."""

    async def retrieve(self, queries: Sequence[tuple[str, str]], *, peek: bool = False) -> list[list[tuple[str, str]]]:
        """For each (namespace, text) the (experience id, text) pairs to show; ``peek`` leaves every counter as it was."""
        ...

    async def ask(self, task: Task, query: str, episode_id: str, number: int) -> Answer | None: ...


@dataclasses.dataclass(frozen=True)
class EnvSettings:
    """How one environment is made and played."""

    options: dict[str, Any] = dataclasses.field(default_factory=dict)  # of its constructor
    max_turns: int = 30
    timeout_reward: float = 0.0  # see ``EnvSpec``
    system_prompt: str = ""
    part: str = ""  # of the mixture it belongs to
    call_timeout_s: float = 0.0  # how long one call may take, where that is long; 0: as the run says


@dataclasses.dataclass(frozen=True)
class CollectSettings:
    """How episodes are played. ``guided`` of every ``group_size`` episodes retrieve; ``envs``: the environments by name."""

    group_size: int
    guided: int
    sampling: SamplingParams
    ask_uses: int
    envs: Mapping[str, EnvSettings]


class Collector:
    """Plays groups of episodes over an environment pool and one sampler."""

    def __init__(
        self,
        pool: EnvPool | DevicePool | Pools,
        sampler: EpisodeSampler,
        codec: Codec,
        prompts: ActorPrompts,
        bank: Bank | None,
        settings: CollectSettings,
        gate: Gate | None = None,
    ):
        self.gate = gate
        self.pool, self.sampler, self.codec, self.prompts, self.bank, self.settings = pool, sampler, codec, prompts, bank, settings

    async def groups(self, tasks: Sequence[Task], *, batch_id: str, guided: int | None = None, first: int = 0) -> list[Group]:
        """One group per task. Member ``k`` of a group is free for ``k < K - guided`` and guided after that. ``first``: the number of the
        first of them in a batch that several processes play.
        """
        cfg = self.settings
        guided = cfg.guided if guided is None or self.bank is None else guided
        guided = 0 if self.bank is None else guided
        slots = [
            (f"{batch_id}/g{g}", f"{batch_id}/g{g}/{k}", task, Condition.GUIDED if k >= cfg.group_size - guided else Condition.FREE)
            for g, task in enumerate(tasks, first)
            for k in range(cfg.group_size)
        ]
        with long_scope("rollout"):
            return await self._groups(slots)

    async def _groups(self, slots: Sequence[tuple[str, str, Task, Condition]]) -> list[Group]:
        """``slots``: group, episode, task and condition of each episode."""
        cfg = self.settings
        lessons = await self._lessons([task for _, _, task, condition in slots if condition is Condition.GUIDED], peek=False)
        shown = iter(lessons)
        plans = [
            self._plan(group, episode, task, condition, next(shown) if condition is Condition.GUIDED else [], cfg.sampling)
            for group, episode, task, condition in slots
        ]
        episodes = await self._play(plans, None if self.bank is None else self.bank.ask)
        if self.gate is not None:
            self.gate.require_room(sum(len(found) for found in lessons))
        by_group: dict[str, list[Episode]] = {}
        for episode in episodes:
            by_group.setdefault(episode.group_id, []).append(episode)
        return [Group(group_id, tuple(members)) for group_id, members in by_group.items()]

    async def evaluate(self, tasks: Sequence[Task], *, name: str, guided: bool, sampling: SamplingParams, first: int = 0) -> list[Episode]:
        """One episode per task, with or without experience; nothing is counted, distilled or asked. A gate works as in training."""
        condition = Condition.GUIDED if guided else Condition.FREE
        lessons = await self._lessons(tasks, peek=True) if guided else [[] for _ in tasks]
        plans = [
            self._plan(f"{name}/{i}", f"{name}/{i}", task, condition, found, sampling, ask_uses=0)
            for i, (task, found) in enumerate(zip(tasks, lessons, strict=True), first)
        ]
        return await self._play(plans, None, count=False)

    async def _lessons(self, tasks: Sequence[Task], *, peek: bool) -> list[list[tuple[str, str]]]:
        if self.bank is None or not tasks:
            return [[] for _ in tasks]
        return await self.bank.retrieve([(task.namespace, task.goal) for task in tasks], peek=peek)

    def _plan(
        self,
        group: str,
        episode: str,
        task: Task,
        condition: Condition,
        lessons: list[tuple[str, str]],
        sampling: SamplingParams,
        ask_uses: int | None = None,
    ) -> Plan:
        uses = self.settings.ask_uses if ask_uses is None else ask_uses
        return Plan(
            id=episode,
            group_id=group,
            condition=condition,
            task=task,
            sampling=dataclasses.replace(sampling, seed=derive_seed(sampling.seed, episode)),
            max_turns=self.settings.envs[task.env].max_turns,
            timeout_reward=self.settings.envs[task.env].timeout_reward,
            system=self.settings.envs[task.env].system_prompt,
            lessons=tuple(lessons),
            ask_uses=uses if condition is Condition.GUIDED else 0,
        )

    async def _play(self, plans: Sequence[Plan], ask: Ask | None, *, count: bool = True) -> list[Episode]:
        refused: list[EnvError] = []
        try:
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(self._episode(plan, ask, count, refused)) for plan in plans]
        except ExceptionGroup as group:  # one reason says it; every other episode failed for the same one or was cancelled
            raise group.exceptions[0] from None
        episodes = [task.result() for task in running]
        if refused and len(refused) == len(plans):  # the next batch would do no better
            raise refused[0]
        if episodes and not any(episode.turns or episode.reward is None for episode in episodes):
            used, room, reply = len(episodes[0].log), self.sampler.max_length, self.settings.sampling.max_new_tokens
            raise PromptTooLong(
                f"no episode had a turn: a prompt of {used} tokens leaves no room for a reply of {reply} in actor.max_length {room}: "
                f"set actor.max_length above {used + reply}, or actor.sampling.max_new_tokens lower"
            )
        return episodes

    async def _episode(self, plan: Plan, ask: Ask | None, count: bool, refused: list[EnvError]) -> Episode:
        if self.gate is not None:
            plan = await self.gate.judge(plan, count=count)  # before the environment is taken: others can use it meanwhile
        try:
            lease = await self._lease(plan.task.env)
        except EnvError as refusal:  # it fails its own episodes only: the others of the batch go on
            refused.append(refusal)
            lease = _Refused(refusal)
        try:
            return await run_episode(
                plan, env=lease, sampler=self.sampler, codec=self.codec, prompts=self.prompts, ask=ask, env_errors=(EnvError,)
            )
        finally:
            await lease.release()

    async def _lease(self, env: str) -> Lease | DeviceLease:
        """An environment. A worker that died meanwhile has been replaced, so one more try finds the new one."""
        options = self.settings.envs[env].options
        try:
            return await self.pool.lease(env, options)
        except Quarantined:
            raise
        except EnvError:
            return await self.pool.lease(env, options)


class _Refused:
    """In the place of an environment that is in quarantine or could not be made."""

    def __init__(self, refusal: EnvError):
        self._refusal = refusal

    async def reset(self, seed: int, task: str = "") -> Observation:
        raise self._refusal

    async def step(self, text: str) -> Step:
        raise self._refusal

    async def release(self) -> None:
        """Nothing was lent."""
