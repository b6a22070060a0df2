"""The speed of one family's environments, for ``bench_envs``.

Owns: the measurements. CPU time is that of this process and of the children it waited for. Does not: compare families.
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import pathlib
import random
import resource
import time
from typing import Any

from crl_jax.rollout.pool import EnvPool
from crl_jax.telemetry.tracker import MetricsError, read_jsonl
from envs import registry
from envs.api import EnvTask, TextEnv
from envs.players import Player, players_of

_INSTANCES = 9  # at most; the first pays for the game itself
_MAKE_S = 30.0  # no more instances after this, but two
_CALL_TIMEOUT_S = 120.0


@dataclasses.dataclass(frozen=True)
class Speed:
    """One family. Rates are per second; ``cpu`` ones per CPU second, so for one core."""

    env: str
    steps_per_cpu_s: float
    steps_per_wall_s: float
    resets_per_cpu_s: float
    make_cpu_s: float  # a further instance
    memory_mib: float  # a further instance, after a reset
    first_memory_mib: float  # this process with one instance
    at_once: int
    workers: int
    steps_per_s_at_once: float
    busy_share_at_once: float  # of the workers' time spent inside environments; calls that wait side by side can make it exceed 1
    workers_memory_mib: float
    errors: int

    def shown(self) -> str:
        """A line of the table."""
        return (
            f"{self.env:<40} {self.steps_per_cpu_s:>9.0f} steps/s/core {self.resets_per_cpu_s:>8.1f} resets/s/core "
            f"{self.memory_mib:>7.2f} MiB each; {self.at_once} at once: {self.steps_per_s_at_once:>8.0f} steps/s"
        )


def measure_speed(family: str, seconds: float, at_once: int, workers: int) -> dict[str, Any]:
    """``Speed`` as a plain object. Raises ``EnvUnavailable``."""
    module = registry.module_of(family)
    name = f"{family}/{module.names()[0]}"
    registry.make(name).close()  # builds what is built once, imports the game
    found = _bare(name, seconds) | asyncio.run(_at_once(name, seconds, at_once, workers))
    return dataclasses.asdict(Speed(env=name, **found))


def share_of_run(folder: pathlib.Path) -> dict[str, Any]:
    """What a run's metrics tell of its environments: ``share`` of the rollout time, or why it is unknown."""
    try:
        logged = list(read_jsonl(folder / "metrics.jsonl"))
    except OSError as error:
        return {"unknown": f"{folder.name}/metrics.jsonl: {error.strerror}"}
    except MetricsError as error:
        return {"unknown": str(error)}
    rows = [row for row in logged if "rollout/collect_s" in row and "env/busy_s" in row]
    evaluated = {row["step"] for row in logged if any(key.startswith("eval/") for key in row)}
    steps = {row["step"]: row for row in rows}  # of a step that was run twice the later row counts
    if not steps:
        return {"unknown": f"{folder.name}: its metrics hold no step with env/busy_s and rollout/collect_s"}
    busy, collect, busy_before = 0.0, 0.0, 0.0
    for step, row in steps.items():  # the counter begins again with every resumed process
        spent = row["env/busy_s"] - busy_before if row["env/busy_s"] >= busy_before else row["env/busy_s"]
        busy_before = row["env/busy_s"]
        if step not in evaluated and step - 1 not in evaluated:  # an evaluation keeps the same workers busy
            busy, collect = busy + spent, collect + row["rollout/collect_s"]
    if not collect:
        return {"unknown": f"{folder.name}: an evaluation lies at or before every step"}
    played = max(row.get("env/steps", 0.0) for row in steps.values())
    return {
        "name": folder.name,
        "share": busy / collect,
        "env_busy_s": busy,
        "collect_s": collect,
        "steps": len(steps),
        "env_steps": played,
    }


def _bare(name: str, seconds: float) -> dict[str, float]:
    envs: list[TextEnv] = []
    made_s: list[float] = []
    first, end = 0.0, time.monotonic() + _MAKE_S
    try:
        for number in range(_INSTANCES):
            if number > 1 and time.monotonic() > end:
                break
            started = _cpu_s()
            envs.append(registry.make(name))
            made_s.append(_cpu_s() - started)
            envs[-1].reset(number, _tasks(name)[0].id)
            if number == 0:
                first = _memory_mib()
        last = _memory_mib()
        return {
            "make_cpu_s": min(made_s[1:]),
            "memory_mib": max(0.0, last - first) / (len(envs) - 1),
            "first_memory_mib": first,
            **_play(envs[0], name, seconds),
        }
    finally:
        for env in envs:
            env.close()


def _play(env: TextEnv, name: str, seconds: float) -> dict[str, float]:
    """Random episodes for a while; only the environment's own time counts."""
    steps = resets = 0
    step_cpu = step_wall = reset_cpu = 0.0
    tasks, end = _tasks(name), time.monotonic() + seconds
    while time.monotonic() < end or not steps:
        task, seed = tasks[resets % len(tasks)], resets
        cpu = _cpu_s()
        seen = env.reset(seed, task.id)
        reset_cpu, resets = reset_cpu + _cpu_s() - cpu, resets + 1
        player, text, actions, done = _random(name, task, seed), seen.text, seen.actions, False
        while not done:
            reply = player(text, actions)
            cpu, wall = _cpu_s(), time.perf_counter()
            step = env.step(reply)
            step_cpu, step_wall, steps = step_cpu + _cpu_s() - cpu, step_wall + time.perf_counter() - wall, steps + 1
            text, actions, done = step.observation, step.actions, step.done
    return {
        "steps_per_cpu_s": steps / max(step_cpu, 1e-9),
        "steps_per_wall_s": steps / max(step_wall, 1e-9),
        "resets_per_cpu_s": resets / max(reset_cpu, 1e-9),
    }


async def _at_once(name: str, seconds: float, at_once: int, workers: int) -> dict[str, Any]:
    tasks = _tasks(name)
    async with _pool(workers) as pool:
        leases = [await pool.lease(name) for _ in range(at_once)]
        begun = await asyncio.gather(*(lease.reset(n, tasks[n % len(tasks)].id) for n, lease in enumerate(leases)))
        steps, before, started = 0, pool.stats(), time.perf_counter()

        async def play(number: int) -> None:
            nonlocal steps
            seed, seen = number, begun[number]
            while time.perf_counter() - started < seconds:
                player, text, actions, done = _random(name, tasks[seed % len(tasks)], seed), seen.text, seen.actions, False
                while not done and time.perf_counter() - started < seconds:
                    step = await leases[number].step(player(text, actions))
                    text, actions, done, steps = step.observation, step.actions, step.done, steps + 1
                seed += at_once
                if done:
                    seen = await leases[number].reset(seed, tasks[seed % len(tasks)].id)

        await asyncio.gather(*(play(number) for number in range(at_once)))
        took, after = time.perf_counter() - started, pool.stats()
    return {
        "at_once": at_once,
        "workers": workers,
        "steps_per_s_at_once": steps / took,
        "busy_share_at_once": (after.busy_s - before.busy_s) / took / workers,
        "workers_memory_mib": after.memory_mib,
        "errors": after.errors + after.lost,
    }


def _pool(workers: int) -> Any:
    """The pool that runs use: worker processes, and the device for families that are stepped in batches."""
    try:
        pools = importlib.import_module("crl_jax.rollout.pools")
    except ModuleNotFoundError:
        return EnvPool(workers=workers, call_timeout_s=_CALL_TIMEOUT_S)
    return pools.Pools(workers=workers, call_timeout_s=_CALL_TIMEOUT_S)


def _tasks(name: str) -> tuple[EnvTask, ...]:
    return registry.tasks(name, "train") or registry.tasks(name, "heldout")


def _random(name: str, task: EnvTask, seed: int) -> Player:
    try:
        return players_of(name.partition("/")[0]).make_player("random", task, seed=seed, options={})
    except KeyError:  # a family without players, whose actions are listed
        form = "<action>{}</action>" if "<action>" in registry.spec(name).system_prompt else "{}"
        draw = random.Random(seed)
        return lambda text, actions: form.format(draw.choice(actions))


def _cpu_s() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def _memory_mib() -> float:
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20
