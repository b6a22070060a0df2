"""What ``crl envs`` prints.

Owns: the text forms of environments, and playing an episode by hand. Does not: need models or a running job.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from typing import Any

import yaml


def list_envs(prefix: str = "") -> int:
    """Prints name and goal of every environment whose name starts with ``prefix``; 1 if there is none."""
    from envs import registry

    found = [name for name in registry.names() if name.startswith(prefix)]
    for name in found:
        print(f"{name:<36} {registry.spec(name).goal}")
    if not found:
        print(f"no environment starts with {prefix!r}; see `crl envs ls`", file=sys.stderr)
    return 0 if found else 1


def play_env(name: str, options: Sequence[str], seed: int) -> int:
    """One episode with the player at the keyboard; an empty line or end of input stops. 0 on success of the episode, else 1."""
    from envs import registry

    with contextlib.ExitStack() as stack:
        try:
            env = registry.make(name, **_options(options))
            stack.callback(env.close)
            seen = env.reset(seed)
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            print(f"crl envs play: {error.args[0] if error.args else error}", file=sys.stderr)
            return 2
        print(f"{registry.spec(name).goal}\n\n{seen.text}\n\nactions: {', '.join(seen.actions)}")
        while reply := _ask():
            step = env.step(reply)
            print(f"\n{step.observation}\n[reward {step.reward:g}{'' if step.valid else ', not a valid action'}]")
            if step.done:
                print("success" if step.success else "no success")
                return 0 if step.success else 1
    return 1


def _options(pairs: Sequence[str]) -> dict[str, Any]:
    parsed: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise TypeError(f"option {pair!r}: write key=value, e.g. max_turns=20")
        try:
            parsed[key] = yaml.safe_load(value)
        except yaml.YAMLError:
            parsed[key] = value  # the environment says what it wants instead
    return parsed


def _ask() -> str:
    try:
        return input("> ").strip()
    except EOFError:
        return ""
