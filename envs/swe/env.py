"""Repairing a repository, as a text environment.

Owns: an episode: its instance, its workplace, when it ends and what it is worth.
Promises: reward 1 when, at ``submit`` or when the turns or the time run out, every listed test passes in a fresh checkout with the agent's
changes, else 0. What was not submitted is graded as well: the state counts, not the word. A failure of the sandbox or of the grader is
``EnvError``.
Does not: know how tools are run or graded (see ``workplace``).

The same replies give the same observations, except for what commands tell about the clock, process ids, the machine's load and the order in
which a file system lists a folder.
"""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Literal

import yaml

from envs.api import Observation, Step
from envs.swe.calls import Call, last_call
from envs.swe.catalogue import Catalogue
from envs.swe.workplace import Workbench, Workplace
from envs.turns import Played, TurnBased

Style = Literal["full", "compact"]

PROMPTS = yaml.safe_load(Path(__file__).with_name("prompts.yaml").read_text(encoding="utf-8"))
_END = {True: "All tests pass: the issue is solved.", False: "Not all tests pass: the issue is not solved."}


class SweRepair(TurnBased[Call]):
    """Instances of ``catalogue``, worked on at ``place``. ``episode_s``: seconds that tools may take in an episode, all calls together."""

    family = "swe"
    slow = True  # a call mostly waits for other processes

    def __init__(self, catalogue: Catalogue, place: Workplace, *, style: Style, max_turns: int, episode_s: float) -> None:
        super().__init__(style=style, grammar="tagged", max_turns=max_turns, data_source=catalogue.data_source)
        self._catalogue, self._place, self._episode_s = catalogue, place, episode_s
        self._bench: Workbench | None = None
        self._call: Call | None = None

    def drawn(self, seed: int) -> str:
        """A training instance."""
        return random.Random(f"swe/{seed}").choice(self._catalogue.ids("train"))

    def begin(self, seed: int, task: str) -> Observation:
        """Open a fresh copy of the instance's repository."""
        self.free()
        known = (*self._catalogue.ids("train"), *self._catalogue.ids("heldout"))
        if task not in known:
            raise KeyError(f"no task {task!r}: see envs.registry.tasks('swe')")
        instance = self._catalogue.instance(task)
        self._bench = self._place.open(instance)
        text = PROMPTS["task"][self.style].replace("{repo}", instance.repo).replace("{issue}", instance.problem_statement.strip())
        return Observation(text, ())

    def said(self, reply: str) -> str | None:
        """The whole reply, if it holds a call: a call has parts that no string could be read from again."""
        self._call = last_call(reply)
        return None if self._call is None else reply

    def read(self, said: str) -> Call | None:
        """The call that ``said`` found."""
        return self._call

    def play(self, action: Call) -> Played:
        """Run the tool; grade on ``submit``."""
        assert self._bench is not None
        if action.name == "submit":
            return self._graded()
        text, changed = self._bench.use(action)
        return Played(text, effective=changed)

    def step(self, text: str) -> Step:
        """As ``TextEnv.step``. The turn after which no turn or no time is left is graded."""
        step = super().step(text)
        if step.terminated or not (step.truncated or self._out_of_time()):
            return step
        self._turn = -1
        graded = self._graded()
        observation = f"{step.observation}\n\nNo {'turns' if step.truncated else 'time'} left. {graded.text}"
        info = {**step.info, **graded.info}
        return dataclasses.replace(step, observation=observation, reward=graded.reward, truncated=True, success=graded.success, info=info)

    def free(self) -> None:
        """Remove the tree."""
        if self._bench is not None:
            self._bench.close()
            self._bench = None

    def _out_of_time(self) -> bool:
        return self._bench is not None and self._bench.seconds > self._episode_s

    def _graded(self) -> Played:
        assert self._bench is not None
        instance = self._catalogue.instance(self.task)
        verdict = self._bench.grade()
        failed = set(verdict.failed)
        info = {
            "status": "resolved" if verdict.resolved else "unresolved",
            "fail_to_pass": sum(test not in failed for test in instance.fail_to_pass) / len(instance.fail_to_pass),
            "pass_to_pass": sum(test not in failed for test in instance.pass_to_pass) / max(1, len(instance.pass_to_pass)),
            "why": verdict.why,
        }
        self.free()
        return Played(_END[verdict.resolved], float(verdict.resolved), True, verdict.resolved, info=info)
