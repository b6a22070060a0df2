"""An examination under way: the environment, its tasks, random replies, and where findings go.

Owns: ``Exam``. Promises: at most ``_MOST`` findings of one rule are told; replies follow from the seed alone. Does not: know a rule.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import random
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from envs.api import EnvSpec, EnvTask, EnvUnavailable, Observation, Step, TextEnv
from envs.players import players_of

_MOST = 3
_TELL_EVERY_S = 0.2
_NO_ACTION = "~ this is no action ~"

Player = Callable[[str, tuple[str, ...]], str]


class Exam:
    """One environment of the module ``source``; ``tell`` takes what is to be reported."""

    def __init__(self, source: str, name: str, options: Mapping[str, Any], tell: Callable[[dict[str, Any]], None]):
        self.name, self.options, self._tell = name, dict(options), tell
        self.module = importlib.import_module(source)
        self.spec: EnvSpec = self.module.spec(name, **options)
        self.tasks: dict[str, tuple[EnvTask, ...]] = {split: self.module.tasks(name, split) for split in ("train", "heldout")}
        self._told: Counter[str] = Counter()
        self._told_at = 0.0

    def make(self, **more: Any) -> TextEnv:
        """A fresh environment."""
        return self.module.make(self.name, **(self.options | more))

    def some_tasks(self, most: int) -> list[str]:
        """Ids of the first tasks of both splits, at most ``most``; one that is empty when there are none."""
        train, heldout = ([task.id for task in self.tasks[split]] for split in ("train", "heldout"))
        kept = heldout[: most // 2]
        return (train[: most - len(kept)] + kept) or [""]

    def task(self, id: str) -> EnvTask:
        """The task of this id."""
        known = [task for split in self.tasks.values() for task in split if task.id == id]
        return known[0] if known else EnvTask(self.name, id, self.spec.goal)

    def player(self, seed: int, task: str) -> Player:
        """Random replies: the family's own random player, else any of the actions shown."""
        try:
            return players_of(self.spec.family).make_player("random", self.task(task), seed=seed, options=self.options)
        except (KeyError, ValueError):  # the family has none, or none for these options
            draw, tagged = random.Random(seed), getattr(self.module.spec(self.name, **self.options), "system_prompt", "")
            form = "<action>{}</action>" if "<action>" in tagged else "{}"
            return lambda text, actions: form.format(draw.choice(actions) if actions else _NO_ACTION)

    def found(self, rule: str, message: str) -> None:
        """Report a broken promise."""
        self._told[rule] += 1
        if self._told[rule] <= _MOST:
            self._tell({"rule": rule, "message": message})

    def digest(self, case: str, digest: str) -> None:
        """Report what an episode came to, to be compared with another process."""
        self._tell({"case": case, "digest": digest})

    def at(self, what: str) -> None:
        """Say what is done next."""
        self._tell({"at": what})
        self._told_at = time.monotonic()

    def alive(self, episodes: int | None = None) -> None:
        """A sign of life between two calls, and the number of random episodes played so far."""
        if time.monotonic() - self._told_at > _TELL_EVERY_S or episodes is not None:
            self._tell({"alive": True} if episodes is None else {"episodes": episodes})
            self._told_at = time.monotonic()

    @contextlib.contextmanager
    def no_raise(self, rule: str, doing: str) -> Iterator[None]:
        """What the environment raises while ``doing`` something is a finding of ``rule``."""
        try:
            yield
        except EnvUnavailable:
            raise
        except Exception as failure:  # whatever an environment raises is what is looked for
            where = traceback.extract_tb(failure.__traceback__)[-1]
            self.found(rule, f"{doing}: {type(failure).__name__}: {failure} ({Path(where.filename).name}:{where.lineno})")

    def must_raise(self, kind: type[Exception], doing: str, call: Callable[[], Any]) -> None:
        """Anything but ``kind`` is a finding of the rule "lifecycle"."""
        try:
            call()
        except kind:
            return
        except Exception as failure:  # as above
            self.found("lifecycle", f"{doing} raises {type(failure).__name__}, not {kind.__name__}: {failure}")
        else:
            self.found("lifecycle", f"{doing} does not raise {kind.__name__}")


def digest_of(seen: Observation, steps: list[Step]) -> str:
    """Of everything an episode showed."""
    rows: list[Any] = [[seen.text, seen.actions]]
    for step in steps:
        info = {str(key): repr(value) for key, value in step.info.items()}
        rows.append([step.observation, step.reward, step.terminated, step.truncated, step.success, step.valid, info, step.actions])
    return hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()[:16]
