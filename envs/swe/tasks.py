"""The family ``swe``: repairing real repositories by shell and editor, graded by hidden tests.

Owns: the environment ``swe/repair`` (its task ids are instance ids) and its options:
    style      "full" or "compact" system prompt
    grammar    "tagged": calls in function tags, see ``calls``
    max_turns  turns before the state is graded as it is
    command_s  seconds before a command is stopped
    episode_s  seconds that all commands of an episode may take together
    grading_s  seconds before the hidden tests are stopped, which makes them fail (and of each step before them)
    backend    "auto" (bubblewrap, else user namespaces), "bwrap", "userns" or "docker"
Where the variable SWE_INSTANCES names a JSON-lines file in SWE-bench's schema, its instances take the place of those that come with the
package.
Does not: run anything without a sandbox.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any, Literal

from envs import cache
from envs.api import EnvSpec, EnvTask, Split
from envs.options import choose
from envs.swe.bounds import Limits
from envs.swe.catalogue import Catalogue, catalogue
from envs.swe.docker import Docker
from envs.swe.env import PROMPTS, Style, SweRepair
from envs.swe.grading import PARTS
from envs.swe.layout import narrow, whole
from envs.swe.sandbox import Sandbox, find_backend
from envs.swe.workplace import Here

_DOCKER_S = 780.0  # the patch is taken (120 s) and the harness starts containers of its own (600 s), at most; see ``docker``


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of one environment; every field may be given to ``make`` and ``spec``."""

    style: Style = "full"
    grammar: Literal["tagged"] = "tagged"
    max_turns: int = 50
    command_s: int = 30
    episode_s: int = 1800
    grading_s: int = 120
    backend: Literal["auto", "bwrap", "userns", "docker"] = "auto"


def names() -> tuple[str, ...]:
    """The only environment, without the family."""
    return ("repair",)


def tasks(split: Split) -> tuple[EnvTask, ...]:
    """The instances of a split. Raises ``EnvUnavailable`` for a missing or broken file."""
    source = _catalogue()
    return tuple(EnvTask("swe/repair", name, source.instance(name).summary, source.kind(name)) for name in source.ids(split))


def spec(name: str, **options: Any) -> EnvSpec:
    """Describe the environment. Raises TypeError for an unknown option, ValueError for a value it cannot have."""
    chosen = choose(Options, options)
    prompt = PROMPTS[chosen.style].replace("{max_turns}", str(chosen.max_turns)).replace("{command_s}", str(chosen.command_s))
    return EnvSpec(
        name=f"swe/{name}",
        family="swe",
        goal="repair the bug that the issue describes",
        namespace="swe",
        actions=(),
        max_turns=chosen.max_turns,
        system_prompt=prompt,
        call_timeout_s=_longest_call_s(chosen),
    )


def _longest_call_s(chosen: Options) -> float:
    """Seconds: the last call runs a command, then grades. A shorter deadline would blame the environment for a slow patch."""
    if chosen.backend == "docker":
        return chosen.command_s + chosen.grading_s + _DOCKER_S
    return chosen.command_s + PARTS * chosen.grading_s + 30.0


def prepare() -> None:
    """Try the sandbox once, and read the user's file. Raises ``EnvUnavailable`` when there is none, or it is broken."""
    find_backend()
    _catalogue()


def build() -> str:
    """Make all repositories, unless they are there; a line about them. Raises ``EnvUnavailable``, ``EnvError``."""
    source = _catalogue()
    sandbox = Sandbox(narrow() if source.narrow else whole())
    made = [source.repository(name, sandbox) for name in (*source.ids("train"), *source.ids("heldout"))]
    return f"{len(made)} repositories"


def make(name: str, **options: Any) -> SweRepair:
    """The environment. Raises ``EnvUnavailable`` (no sandbox, no pytest, no file of instances, a broken one)."""
    chosen, source = choose(Options, options), _catalogue()
    if chosen.backend == "docker":
        place = Docker(chosen.command_s, chosen.grading_s)
    else:
        sandbox = Sandbox(narrow() if source.narrow else whole(), chosen.backend)
        limits = Limits(wall_s=float(chosen.command_s), cpu_s=2 * chosen.command_s)
        place = Here(source, sandbox, limits, Limits(wall_s=float(chosen.grading_s), cpu_s=chosen.grading_s))
    return SweRepair(source, place, style=chosen.style, max_turns=chosen.max_turns, episode_s=float(chosen.episode_s))


def _catalogue() -> Catalogue:
    given = os.environ.get("SWE_INSTANCES", "")
    return catalogue(str(cache.path_of(given, "SWE_INSTANCES")) if given else "")
