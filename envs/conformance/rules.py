"""Rules about one episode: what the environment says of itself, what a step holds, and that a seed fixes it all.

Owns: the rules "spec", "tasks", "step", "text", "pickle", "truncation" and "reproduce". Does not: send hostile replies (``behaviour``) or
count (``leaks``).
"""

from __future__ import annotations

import math
import pickle
import re
from collections.abc import Callable

from envs.api import Observation, Step, TextEnv
from envs.conformance.exam import Exam, digest_of

_TURNS, _CASES = 12, 4  # of an episode that is compared; how many of them
_TURNS_SLOW, _CASES_SLOW = 4, 2  # of environments that say they are slow
_LONGEST = 200_000  # characters of an observation
_INFO = {"turn": int, "invalid": int, "effective": bool, "data_source": str, "task": str}


class Episode:
    """An environment with an episode under way; every step is held against the rules."""

    def __init__(self, exam: Exam, env: TextEnv, seed: int, task: str, max_turns: int):
        self._exam, self._env, self._max_turns, self._task = exam, env, max_turns, task
        self.seen = env.reset(seed, task)
        self.text, self.actions = self.seen.text, self.seen.actions
        self.steps: list[Step] = []
        self.invalid = 0
        _look(exam, self.seen.text, self.seen.actions, "the first observation")

    @property
    def done(self) -> bool:
        """Whether it is over."""
        return bool(self.steps) and self.steps[-1].done

    def say(self, reply: str) -> Step:
        """One turn."""
        self._exam.alive()
        step = self._env.step(reply)
        self.steps.append(step)
        self.invalid += not step.valid
        _check_step(self._exam, step, len(self.steps), self.invalid, self._task, self._max_turns)
        self.text, self.actions = step.observation, step.actions
        return step

    def play(self, player: Callable[[str, tuple[str, ...]], str], most: int) -> None:
        """Go on until the end, or for ``most`` turns."""
        while not self.done and len(self.steps) < most:
            self.say(player(self.text, self.actions))


def check_spec(exam: Exam) -> None:
    """The specification holds together and fits the environment."""
    spec = exam.spec
    for field in ("goal", "namespace", "system_prompt"):
        if not getattr(spec, field).strip():
            exam.found("spec", f"{field} is empty")
    if spec.name != exam.name or spec.family != exam.name.partition("/")[0]:
        exam.found("spec", f"it is called {spec.name!r} of the family {spec.family!r}")
    if len(set(spec.actions)) != len(spec.actions):
        exam.found("spec", f"actions {spec.actions} repeat")
    env = exam.make()
    try:
        told = getattr(env, "max_turns", spec.max_turns)
        if told != spec.max_turns:
            exam.found("spec", f"max_turns is {spec.max_turns}, but of the environment {told}")
        seen = env.reset(0, exam.some_tasks(1)[0])
        if spec.actions and (strange := set(seen.actions) - set(spec.actions)):
            exam.found("spec", f"the environment offers actions that it does not list: {sorted(strange)[:5]}")
        examples = re.findall(r"<action>[^<]*</action>", spec.system_prompt)
        if examples and not env.step(examples[-1]).valid:
            exam.found("spec", f"the example of the system prompt, {examples[-1]}, is no valid first reply")
    finally:
        env.close()


def check_tasks(exam: Exam) -> None:
    """Every task is listed once, in one split, and can be begun."""
    train, heldout = ([(task.env, task.id) for task in exam.tasks[split]] for split in ("train", "heldout"))
    if not train and not heldout:
        exam.found("tasks", "there is no task in any split")
    if both := sorted(set(train) & set(heldout)):
        exam.found("tasks", f"{len(both)} tasks are in both splits, e.g. {both[0]}")
    if len({*train, *heldout}) < len(train) + len(heldout) - len(both):
        exam.found("tasks", "a task is listed twice")
    for task in [task for split in exam.tasks.values() for task in split]:
        if task.env != exam.name or not task.goal.strip():
            exam.found("tasks", f"task {task.id!r} has the environment {task.env!r} and the goal {task.goal!r}")


def check_reproduction(exam: Exam, *, quick: bool) -> None:
    """Seed and task fix an episode, byte for byte; another seed or task gives another. ``quick``: only tell what the episodes come to."""
    first, second = exam.make(), None if quick else exam.make()
    most = _CASES_SLOW if _is_slow(first) else _CASES
    cases = [(seed, task) for task in exam.some_tasks(3) for seed in (0, 1)][:most]
    try:
        digests = [_episode_digest(exam, first, seed, task) for seed, task in cases]
        for (seed, task), digest in zip(cases, digests, strict=True):
            exam.digest(f"seed {seed}" + (f" task {task}" if task else ""), digest)
        if second is None:
            return
        for (seed, task), digest in zip(reversed(cases), reversed(digests), strict=True):
            for env, which in ((first, "the same instance, after other episodes,"), (second, "another instance")):
                if _episode_digest(exam, env, seed, task) != digest:
                    exam.found("reproduce", f"seed {seed} task {task!r}: {which} plays another episode")
        _check_difference(exam, first)
    finally:
        first.close()
        if second is not None:
            second.close()


def _check_difference(exam: Exam, env: TextEnv) -> None:
    """The same replies in other episodes: something must differ, unless the family says that the environment is always the same."""
    if getattr(type(env), "same_for_all_seeds", False) or getattr(env, "same_for_all_seeds", False):
        return
    seen = set[str]()
    for task in exam.some_tasks(3):
        for seed in range(8):
            seen.add(_episode_digest(exam, env, seed, task, replies_of=0))
            if len(seen) > 1:
                return
    exam.found("reproduce", "8 seeds of every task play the same episode (same_for_all_seeds = True says that this is meant)")


def _episode_digest(exam: Exam, env: TextEnv, seed: int, task: str, replies_of: int | None = None) -> str:
    episode = Episode(exam, env, seed, task, exam.spec.max_turns)
    turns = _TURNS_SLOW if _is_slow(env) else _TURNS
    episode.play(exam.player(seed if replies_of is None else replies_of, task), turns)
    info = [{key: value for key, value in step.info.items() if key != "task"} for step in episode.steps]
    steps = [_with_info(step, kept) if replies_of is not None else step for step, kept in zip(episode.steps, info, strict=True)]
    return digest_of(episode.seen, steps)


def _is_slow(env: TextEnv) -> bool:
    return bool(getattr(type(env), "slow", False))


def _with_info(step: Step, info: dict[str, object]) -> Step:
    return Step(step.observation, step.reward, step.terminated, step.truncated, step.success, step.valid, info, step.actions)


def _check_step(exam: Exam, step: Step, turn: int, invalid: int, task: str, max_turns: int) -> None:
    where = f"turn {turn}"
    _look(exam, step.observation, step.actions, where)
    if not isinstance(step.reward, float | int) or not math.isfinite(step.reward):
        exam.found("step", f"{where}: reward {step.reward!r} is no finite number")
    if step.terminated and step.truncated:
        exam.found("step", f"{where}: terminated and truncated at once")
    if step.success and not step.done:
        exam.found("step", f"{where}: success, but the episode goes on")
    for key, kind in _INFO.items():
        if not isinstance(step.info.get(key), kind):
            exam.found("step", f"{where}: info[{key!r}] is {step.info.get(key)!r}, not {kind.__name__}")
    for key, value in (("turn", turn), ("invalid", invalid), ("task", task)):
        if isinstance(step.info.get(key), _INFO[key]) and step.info[key] != value:
            exam.found("step", f"{where}: info[{key!r}] is {step.info[key]!r}, not {value!r}")
    if step.info.get("data_source") not in ("real", "generated"):
        exam.found("step", f'{where}: info["data_source"] is {step.info.get("data_source")!r}, not "real" or "generated"')
    if step.truncated and turn < max_turns:
        exam.found("truncation", f"{where} of {max_turns}: truncated too early")
    if turn >= max_turns and not step.done:
        exam.found("truncation", f"{where} of {max_turns}: the episode goes on")
    if not step.valid and step.terminated:
        exam.found("reply", f"{where}: an invalid reply ended the world")


def _look(exam: Exam, text: str, actions: tuple[str, ...], where: str) -> None:
    """What a model could not read, and what could not travel."""
    if not isinstance(text, str) or not text.strip():
        exam.found("text", f"{where}: the observation is {text!r:.80}")
    elif len(text) > _LONGEST:
        exam.found("text", f"{where}: the observation has {len(text)} characters")
    elif "\0" in text or any(0xD800 <= ord(char) <= 0xDFFF for char in text):
        exam.found("text", f"{where}: the observation holds NULs or lone surrogates, which no tokenizer takes")
    if not isinstance(actions, tuple) or not all(isinstance(action, str) for action in actions):
        exam.found("text", f"{where}: actions are {actions!r:.80}, not a tuple of texts")


def check_pickle(exam: Exam) -> None:
    """Observations and steps travel between processes."""
    env = exam.make()
    try:
        seen = env.reset(0, exam.some_tasks(1)[0])
        step = env.step(exam.player(0, exam.some_tasks(1)[0])(seen.text, seen.actions))
        for what in (seen, step):
            if type(what) is not (Observation if what is seen else Step):
                exam.found("pickle", f"{type(what).__name__} is no record of envs.api")
            elif pickle.loads(pickle.dumps(what)) != what:
                exam.found("pickle", f"{type(what).__name__} comes back as something else")
    finally:
        env.close()
