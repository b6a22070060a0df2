"""Rules about replies that are no action, and about the order of calls.

Owns: the rules "reply" and "lifecycle", and the hostile replies. An invalid reply must change nothing, cost a turn, be flagged, and be told
with what was seen before; no reply may raise or take long.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

from envs.api import TextEnv
from envs.conformance.exam import Exam
from envs.conformance.rules import Episode

_TURNS = 6
_SLOWEST_S = 5.0  # an answer to a reply that is no action, whatever its size
_AFTER = 4  # turns played after an invalid reply, to see that nothing changed

INVALID: dict[str, str] = {  # never an action, whatever the family
    "empty": "",
    "spaces": " \t\r\n ",
    "words": "~ this is no action ~",
    "a megabyte": "x" * 2**20,
    "NULs": "\0" * 64,
    "lone surrogates": "\ud800\udfff\ud812",
    "thinking only": "<think>I could go north.</think>",
    "thinking that never ends": "<think>" * 500 + "north",
    "nested tags": "<action>" * 2000 + "~" + "</action>" * 2000,
    "many actions": "<action>~none of them~</action>" * 5000,
    "right to left": "\u202e<action>\u0634\u0645\u0627\u0644</action>\u202c",
    "open tags": "<action" * 5000,
    "brackets": "[" * 50_000 + "{" * 50_000,
    "control characters": "\x1b[2J\x07\x08" * 20,
}


def check_replies(exam: Exam) -> None:
    """Every hostile reply, in episodes of their own and before ordinary ones."""
    env = _short(exam)
    task = exam.some_tasks(1)[0]
    try:
        for name, reply in INVALID.items():
            with exam.no_raise("reply", f"a reply of {name}"):
                _one_reply(exam, env, task, name, reply)
        with exam.no_raise("reply", "all actions in one reply"):
            episode = Episode(exam, env, 0, task, _TURNS)
            episode.say("\n".join(f"<action>{action}</action>" for action in episode.actions * 200))
        with exam.no_raise("reply", "playing after an invalid reply"):
            _check_nothing_changed(exam, env, task)
    finally:
        env.close()


def check_lifecycle(exam: Exam) -> None:
    """Calls in the wrong order are RuntimeError; wrong seeds and tasks are ValueError and KeyError; after those, play goes on."""
    task = exam.some_tasks(1)[0]
    env = _short(exam)
    exam.must_raise(RuntimeError, "step before reset", lambda: env.step("north"))
    for seed in (-1, 2**63):
        exam.must_raise(ValueError, f"reset({seed})", lambda seed=seed: env.reset(seed, task))
    exam.must_raise(KeyError, "an unknown task", lambda: env.reset(0, "no such task \0 ../.."))
    with exam.no_raise("lifecycle", "reset after a reset that failed"):
        episode = Episode(exam, env, 0, task, _TURNS)
        for _ in range(_TURNS):
            episode.say(INVALID["words"])
        last = episode.steps[-1]
        if not last.truncated or last.terminated or last.success:
            exam.found("truncation", f"after {_TURNS} invalid replies of {_TURNS} turns: {_flags(last)}")
        exam.must_raise(RuntimeError, "step after the end", lambda: env.step("north"))
        Episode(exam, env, 2**63 - 1, task, _TURNS)
    with exam.no_raise("lifecycle", "close during an episode, and again"):
        env.close()
        env.close()
    exam.must_raise(RuntimeError, "step after close", lambda: env.step("north"))
    exam.must_raise(RuntimeError, "reset after close", lambda: env.reset(0, task))
    with exam.no_raise("lifecycle", "close before any reset"):
        _short(exam).close()


def _short(exam: Exam) -> TextEnv:
    """An environment of few turns."""
    return exam.make(max_turns=_TURNS)


def _one_reply(exam: Exam, env: TextEnv, task: str, name: str, reply: str) -> None:
    episode = Episode(exam, env, 0, task, _TURNS)
    before, started = episode.text, time.monotonic()
    step = episode.say(reply)
    took = time.monotonic() - started
    if took > _SLOWEST_S:
        exam.found("reply", f"a reply of {name} takes {took:.1f} s")
    if step.valid:
        exam.found("reply", f"a reply of {name} counts as a valid action")
        return
    if step.reward != 0 or step.done or step.info.get("effective") is not False:
        exam.found("reply", f"a reply of {name} is invalid, but: reward {step.reward:g}, {_flags(step)}")
    if before not in step.observation or before == step.observation:
        exam.found("reply", f"after a reply of {name} the observation is not the one before with a notice: {step.observation!r:.120}")


def _check_nothing_changed(exam: Exam, env: TextEnv, task: str) -> None:
    """The same episode twice, once with an invalid reply first. Numbers are left out of the texts: they may count turns."""

    def rows(*first: str) -> list[Any]:
        episode = Episode(exam, env, 1, task, _TURNS)
        for reply in first:
            episode.say(reply)
        player = _replay(exam, task)
        for _ in range(_AFTER):
            if not episode.done:
                episode.say(player(episode.seen.text, episode.seen.actions))
        steps = episode.steps[len(first) :]
        return [[re.sub(r"\d+", "#", step.observation), step.reward, step.terminated, step.valid, step.actions] for step in steps]

    if rows() != rows(INVALID["words"]):
        exam.found("reply", "an invalid reply changes what the same actions do after it")


def _replay(exam: Exam, task: str) -> Callable[[str, tuple[str, ...]], str]:
    """Replies that depend on nothing that was seen after the start."""
    return exam.player(3, task)


def _flags(step: Any) -> str:
    names = ("terminated", "truncated", "success", "valid")
    return ", ".join(f"{name} {getattr(step, name)}" for name in names) + f", effective {step.info.get('effective')}"
