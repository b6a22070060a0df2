"""``crl envs play``: one episode with a person at the keyboard.

Owns: what is shown and asked. Does not: need models or a running job.
"""

from __future__ import annotations

import contextlib
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

from crl_jax.env_tools.pick import explained, options_of, task_of
from envs import registry

_WIDTH = 110


def play_env(name: str, options: Sequence[str], seed: int, task: str | None = None) -> int:
    """Play; an empty line or the end of input stops, ``?`` shows the rules and the actions. 0 on success of the episode, else 1.

    Raises WrongWords for what does not exist, ``EnvUnavailable``.
    """
    with contextlib.ExitStack() as stack:
        with explained():
            chosen = _for_a_person(name, options_of(options))
            spec = registry.spec(name, **chosen)
        wanted = task_of(name, task, seed)
        with explained():
            env = registry.make(name, **chosen)
            stack.callback(env.close)
            seen = env.reset(seed, wanted.id)
        about = f"task {wanted.id}, " if wanted.id else ""
        print(f"{name}, {about}seed {seed}: {wanted.goal}\n{spec.max_turns} turns; ? shows the rules, an empty line ends\n\n{seen.text}\n")
        actions = seen.actions
        print(_listed(actions))
        while reply := _ask():
            if reply == "?":
                print(f"\n{spec.system_prompt}\n\n{_listed(actions)}")
                continue
            step = env.step(reply)
            print(f"\n{step.observation}\n[reward {step.reward:g}{'' if step.valid else ', not a valid action'}]")
            if step.done:
                print("the turns ran out" if step.truncated else "the episode is over", end="; ")
                print("success" if step.success else "no success")
                return 0 if step.success else 1
            if step.actions != actions:
                actions = step.actions
                print(_listed(actions))
    return 1


def _for_a_person(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """``options`` with bare actions, where nothing else is said and the family has them: nobody types tags."""
    bare = {"grammar": "bare", **options}
    try:
        registry.spec(name, **bare)
    except (KeyError, TypeError, ValueError):  # no bare grammar, or a mistake in the words, which is told for ``options`` as they stand
        return options
    return bare


def _listed(actions: tuple[str, ...]) -> str:
    text = f"actions: {', '.join(actions)}" if actions else "actions: any text the rules allow (? shows them)"
    return textwrap.fill(text, _WIDTH, subsequent_indent="  ")


def _ask() -> str:
    if sys.stdin is None:  # closed by who started us: the end of input
        return ""
    try:
        return input("> ").strip()
    except EOFError:
        return ""
