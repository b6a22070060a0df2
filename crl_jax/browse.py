"""What ``crl envs`` and ``crl bank`` print.

Owns: the text forms of environments and bank entries, and playing an episode by hand.
Promises: reads only; a bank is opened only if its file is there. Does not: need models or a running job.
"""

from __future__ import annotations

import contextlib
import pathlib
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from crl_jax.experience.store import Store

BANK_FILE = "bank.sqlite"  # inside the run's folder


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


def list_bank(folder: pathlib.Path) -> int:
    """Prints id, namespace, step, reads (successful of all) and text of every live entry, newest first."""
    store = _open(folder)
    if store is None:
        return 1
    try:
        state = store.load()
        for space in state.spaces.values():
            for entry in reversed(list(space.values())):
                usage = state.usage.get(entry.id)
                reads = f"{usage.succeeded}/{usage.shown}" if usage else "0/0"
                print(f"{entry.id}  {entry.namespace}  step {entry.step}  {reads}  {entry.text.splitlines()[0] if entry.text else ''}")
    finally:
        store.close()
    return 0


def show_entry(folder: pathlib.Path, entry_id: str) -> int:
    """Prints one entry, live or retired, with where it came from."""
    store = _open(folder)
    if store is None:
        return 1
    try:
        entry = store.experience(entry_id)
        if entry is None:
            print(f"no entry {entry_id!r} in {folder}; see `crl bank ls {folder}`", file=sys.stderr)
            return 1
        usage = store.load().usage.get(entry.id)
        print(f"{entry.text}\n")
        print(f"namespace   {entry.namespace}\nwritten     step {entry.step}, extractor version {entry.author_version}")
        print(f"generation  {entry.generation_id} (operation {entry.op_index})\nepisodes    {', '.join(entry.episode_ids) or '-'}")
        print(f"replaced    {', '.join(entry.parents) or '-'}")
        print(f"read        {usage.shown if usage else 0} times, {usage.succeeded if usage else 0} of them in episodes that succeeded")
    finally:
        store.close()
    return 0


def bank_stats(folder: pathlib.Path) -> int:
    """Prints totals: entries by namespace, entries ever read, reads and their success, generations, revision."""
    store = _open(folder)
    if store is None:
        return 1
    try:
        state = store.load()
        shown = sum(u.shown for u in state.usage.values())
        succeeded = sum(u.succeeded for u in state.usage.values())
        print(f"entries      {len(state)}")
        for namespace, space in state.spaces.items():
            print(f"  {namespace:<20} {len(space)}")
        print(f"ever read    {sum(u.shown > 0 for u in state.usage.values())}")
        print(f"reads        {shown}" + (f", {succeeded / shown:.3f} of them in episodes that succeeded" if shown else ""))
        print(f"generations  {store.generation_count()}\nrevision     {state.revision}")
    finally:
        store.close()
    return 0


def _open(folder: pathlib.Path) -> Store | None:
    path = folder / BANK_FILE
    if not path.is_file():
        print(f"{path} does not exist: give the folder of a run with a bank, e.g. runs/quickstart", file=sys.stderr)
        return None
    from crl_jax.experience.store import Store

    return Store.open(path)


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
