"""Errors of the launchers.

Owns: ``LaunchError`` and ``Refused``. Promises: the message says what is wrong and what to do; the command prints it without a traceback.
"""

from __future__ import annotations


class LaunchError(Exception):
    """Something outside said no, or did not answer in time."""

    exit_code = 1


class Refused(LaunchError):
    """The request is wrong as written; nothing was run."""

    exit_code = 2
