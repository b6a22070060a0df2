"""``crl profile FOLDER``: ask a run that is under way for a profiler trace.

Owns: finding the process and sending the signal. Promises: a process that does not handle the signal, which would end it, is not sent it.
Does not: wait for the trace; the run says in its own output when it is written.
"""

from __future__ import annotations

import os
import pathlib

from crl_jax import run_folder
from crl_jax.config.load import load
from crl_jax.config.schema import TelemetryConfig
from crl_jax.errors import UserError
from crl_jax.run_files import CONFIG
from crl_jax.telemetry.profiler import SIGNAL


def ask(folder: pathlib.Path) -> list[str]:
    """Sends the signal to the process that trains in ``folder``; returns what to tell a person. Raises UserError when there is none, it is
    another machine's or another user's, or it does not listen."""
    process = run_folder.trainer_of(folder)
    if not _handles(process):
        fix = "try again in a moment, or start it with telemetry.profile_signal_steps above 0"
        raise UserError(
            f"process {process}, which trains in {folder}, does not listen to {SIGNAL.name} (it starts, ends, or was told so): {fix}"
        )
    telemetry = load(folder / CONFIG).telemetry if (folder / CONFIG).exists() else TelemetryConfig()
    try:
        os.kill(process, SIGNAL)
    except ProcessLookupError as error:
        raise UserError(f"process {process}, which trained in {folder}, has just ended") from error
    except PermissionError as error:
        raise UserError(f"process {process}, which trains in {folder}, is another user's: ask as that user") from error
    seconds, steps = telemetry.profile_signal_s, telemetry.profile_signal_steps
    what = f"the next {seconds:g} s" if seconds > 0 else f"{steps} steps from the next one on"
    return [
        f"asked process {process} for a trace of {what}, into {folder / 'tensorboard' / 'plugins' / 'profile'}",
        f"its own output says when it is there; then: tensorboard --logdir {folder / 'tensorboard'} and the Profile page",
    ]


def _handles(process: int) -> bool:
    """Whether the process has a handler of its own for the signal (Linux)."""
    try:
        status = pathlib.Path(f"/proc/{process}/status").read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"process {process} is not there ({error.strerror}): the run has just ended") from error
    caught = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (SIGNAL - 1) & 1)
