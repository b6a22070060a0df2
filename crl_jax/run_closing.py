"""The end of a run: every part is told to stop, within a deadline of its own, whatever became of the others.

Owns: how a part ends when the run does. Promises: the error that ended a run is the one that is raised; what goes wrong while its parts end
is a warning beside it, and an error of its own only when there was none. Does not: know the order of the parts (``build``).
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from types import TracebackType

from crl_jax.experience.manager import ExperienceManager
from crl_jax.experience.manager_options import CLOSE_S
from crl_jax.rollout.shell import Shell

DISTIL_S = 30.0  # at the end of a run: the longest wait for the distillations of its last episodes


def at_end(stack: contextlib.ExitStack, what: str, end: Callable[[], object]) -> None:
    """Call ``end`` when ``stack`` is left; ``what`` names the part in the warning when it does not end in order."""

    def leave(kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        del kind, trace
        try:
            end()
        except Exception as late:  # the run has failed already, perhaps of the same cause: that error must not be hidden behind this one
            if error is None:
                raise
            said = f"{what} did not end in order either ({type(late).__name__}: {late})"
            warnings.warn(f"{said}; what ended the run follows", RuntimeWarning, stacklevel=2)

    stack.push(leave)


def close_bank(shell: Shell, manager: ExperienceManager, longest_s: float = DISTIL_S) -> None:
    """Ends the bank of a run; episodes that were not distilled within ``longest_s`` (at most ``DISTIL_S``) are named in a warning (the
    bank's counts end with it)."""
    if lost := shell.finish(manager.aclose(min(DISTIL_S, longest_s)), CLOSE_S + 60, "closing the experience bank"):
        warnings.warn(f"the run ended before {lost} of its episodes were distilled: they teach nothing", RuntimeWarning, stacklevel=2)
    if merges := manager.counts["merges_lost"]:
        warnings.warn(f"the run ended in the middle of {merges} merge(s): the entries stay as they are", RuntimeWarning, stacklevel=2)
