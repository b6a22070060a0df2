"""Errors a person can mend.

Owns: ``UserError`` and ``MissingPackage``. Promises: their message says what is wrong and what to do, so the command line prints
it without a traceback. Does not: stand for faults of the program; those keep theirs.
"""

from __future__ import annotations


class UserError(Exception):
    """Base of errors whose message carries the fix; ``exit_code`` is what the command line ends with."""

    exit_code = 1


class MissingPackage(UserError, ImportError):
    """A package that is not installed; the message is the line that installs it."""
