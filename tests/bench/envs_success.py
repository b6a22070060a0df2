"""How often scripted players succeed in one family, for ``bench_envs``.

Owns: the rows of the table and Wilson's interval. Episode ``i`` of a row is that of seed ``i`` in task ``i`` modulo their number (in an
order drawn once), so every player plays the same episodes. Does not: compare families.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

from envs import registry
from envs.api import EnvTask, TextEnv
from envs.players import Players, play, players_of

_MOST_ROWS = 40  # a family with more environments has one row
_FEWEST = 20  # episodes, however slow
_SLOW_EPISODES = 60  # of environments that say they are slow
_SLOW_PATIENCE = 10  # times the seconds
_BOUND = 0.95
_Z = 1.959964  # normal quantile of 97.5 %


@dataclasses.dataclass(frozen=True)
class Row:
    """One environment (or family): by player [episodes won, episodes played, mean turns]. ``bound``: what the expert must reach."""

    env: str
    players: dict[str, list[float]]
    bound: float
    data_source: str

    @property
    def expert(self) -> float | None:
        """Its rate, where there is one."""
        won, played, _ = self.players.get("expert", (0, 0, 0))
        return won / played if played else None

    @property
    def passed(self) -> bool:
        """The expert reaches its bound and the random player stays below it."""
        won, played, _ = self.players.get("random", (0, 1, 0))
        return self.expert is not None and self.expert >= self.bound and won / max(1, played) < self.expert

    def shown(self) -> str:
        """Lines of the table."""
        cells = []
        for name, (won, played, turns) in self.players.items():
            low, high = wilson(int(won), int(played))
            cells.append(f"  {name:<13} {won / played:>6.3f} [{low:.3f}, {high:.3f}]  {int(played):>4} episodes, {turns:.1f} turns")
        return "\n".join([f"{self.env} ({self.data_source} data)", *cells])

    def to_json(self) -> dict[str, Any]:
        """With rates and intervals."""
        rates = {}
        for name, (won, played, turns) in self.players.items():
            rates[name] = {"rate": won / played, "interval": wilson(int(won), int(played)), "episodes": int(played), "turns": turns}
        return {"env": self.env, "bound": self.bound, "data_source": self.data_source, "passed": self.passed, "players": rates}


def wilson(won: int, played: int) -> tuple[float, float]:
    """The 95 % interval of a rate: (p + z^2/2n -+ z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n) (Wilson, 1927)."""
    rate, z2 = won / played, _Z * _Z
    middle, half = rate + z2 / (2 * played), _Z * math.sqrt(rate * (1 - rate) / played + z2 / (4 * played * played))
    return max(0.0, (middle - half) / (1 + z2 / played)), min(1.0, (middle + half) / (1 + z2 / played))


def measure_success(family: str, episodes: int, seconds: float) -> list[dict[str, Any]]:
    """The rows as plain objects; a player stops early after ``seconds``. Raises ``EnvUnavailable``; none for a family without players."""
    try:
        players = players_of(family)
    except KeyError:
        return []
    tasks = sorted(registry.tasks(family, "train") + registry.tasks(family, "heldout"), key=lambda task: task.env)
    by_env = {env: list(group) for env, group in itertools.groupby(tasks, key=lambda task: task.env)}
    groups = by_env if len(by_env) <= _MOST_ROWS else {f"{family}/* ({len(by_env)} environments)": tasks}
    return [dataclasses.asdict(_row(name, group, players, episodes, seconds)) for name, group in groups.items()]


def _row(name: str, tasks: list[EnvTask], players: Players, episodes: int, seconds: float) -> Row:
    envs: dict[str, TextEnv] = {}
    random.Random(0).shuffle(tasks)  # so that the first ones stand for all
    try:
        envs[tasks[0].env] = registry.make(tasks[0].env)
        if getattr(type(envs[tasks[0].env]), "slow", False):
            episodes, seconds = min(episodes, _SLOW_EPISODES), seconds * _SLOW_PATIENCE
        rates: dict[str, list[float]] = {}
        source = ""
        for label, make in _ways(players, tasks[0]).items():
            won = turns = number = 0
            end = time.monotonic() + seconds
            while number < episodes and (number < _FEWEST or time.monotonic() < end):
                task = tasks[number % len(tasks)]
                if task.env not in envs:
                    envs[task.env] = registry.make(task.env)
                played = play(envs[task.env], make(task, number), number, task.id)
                won, turns, number = won + played.success, turns + played.turns, number + 1
                source = str(played.last.info.get("data_source", ""))
            rates[label] = [won, number, turns / max(1, number)]
    finally:
        for env in envs.values():
            env.close()
    bound: Callable[[EnvTask], float] = getattr(players, "expert_bound", lambda task: _BOUND)
    return Row(name, rates, min(bound(task) for task in tasks), source)


def _ways(players: Players, task: EnvTask) -> dict[str, Callable[[EnvTask, int], Any]]:
    """The players of a task by label; one that follows a lesson plays with the right and with a wrong one."""
    kinds: Sequence[str] = getattr(players, "kinds", lambda task: players.KINDS)(task)

    def way(kind: str, right: bool | None = None) -> Callable[[EnvTask, int], Any]:
        def make(task: EnvTask, seed: int) -> Any:
            lesson = "" if right is None else players.lesson(task, seed, right=right)
            return players.make_player(kind, task, seed=seed, options={}, lesson=lesson)

        return make

    ways: dict[str, Callable[[EnvTask, int], Any]] = {}
    for kind in kinds:
        ways |= {"follow right": way(kind, True), "follow wrong": way(kind, False)} if kind == "follow" else {kind: way(kind)}
    return ways
