"""The one place that runs other programs.

Owns: how gcloud, kubectl, xpk and git are called. Promises: a command is a list of words and never passes a shell here; every command has
a deadline and no keyboard; with ``dry_run`` it is printed, ready to paste, and not run; a program that is missing is named with what
installs it. Does not: know what the commands mean.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import shlex
import subprocess
from collections.abc import Callable, Sequence

from launch.cloud.errors import LaunchError

_INSTALL = {
    "gcloud": "install the Google Cloud CLI (https://cloud.google.com/sdk/docs/install), then `gcloud auth login`",
    "kubectl": "`gcloud components install kubectl gke-gcloud-auth-plugin`",
    "xpk": "`pip install xpk` into an environment of its own (https://github.com/AI-Hypercomputer/xpk)",
    "git": "install git with the system's package manager",
}


@dataclasses.dataclass(frozen=True)
class Result:
    """How a command ended and what it printed."""

    code: int
    out: str
    err: str

    @property
    def not_found(self) -> bool:
        """The thing that was asked about does not exist."""
        return self.code != 0 and ("NOT_FOUND" in self.err or "not found" in self.err.lower())

    @property
    def last_words(self) -> str:
        """The end of what it complained about, for messages."""
        return (self.err.strip() or self.out.strip() or "it said nothing")[-600:]


class Commands:
    """Runs commands, or prints them."""

    def __init__(self, *, dry_run: bool = False, out: Callable[[str], None] = print):
        self.dry_run, self.out = dry_run, out

    def run(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float,
        stdin: str = "",
        check: bool = True,
        quiet: bool = False,
        pretend: str = "",
    ) -> Result:
        """Runs one command to its end. ``check``: an exit code other than 0 is an error. ``quiet``: a command that only looks, not shown
        unless dry. ``pretend``: what it is taken to print when dry. Raises LaunchError.
        """
        if self.dry_run or not quiet:
            self.out(written(argv, stdin))
        if self.dry_run:
            return Result(0, pretend, "")
        try:
            done = subprocess.run(argv, input=stdin, capture_output=True, text=True, timeout=timeout_s, errors="replace")
        except FileNotFoundError:
            raise LaunchError(f"{argv[0]} is not installed here: {_INSTALL.get(argv[0], 'install it')}") from None
        except subprocess.TimeoutExpired:
            raise LaunchError(f"no answer within {timeout_s:g} s from: {written(argv)}") from None
        result = Result(done.returncode, done.stdout, done.stderr)
        if check and result.code != 0:
            raise LaunchError(f"exit code {result.code} from: {written(argv)}\n{result.last_words}")
        return result

    def run_all(self, commands: Sequence[Sequence[str]], *, timeout_s: float, at_once: int = 16) -> list[Result]:
        """Several commands, ``at_once`` at a time; results in order, whatever their exit codes. Raises LaunchError."""
        if self.dry_run:
            return [self.run(argv, timeout_s=timeout_s) for argv in commands]
        with concurrent.futures.ThreadPoolExecutor(max_workers=at_once) as pool:
            running = [pool.submit(self.run, argv, timeout_s=timeout_s, check=False) for argv in commands]
        return [future.result() for future in running]

    def say(self, text: str) -> None:
        """A line for people; when dry a comment, so that the whole output can be pasted."""
        self.out(f"# {text}" if self.dry_run else text)


def written(argv: Sequence[str], stdin: str = "") -> str:
    """The command as one would type it in a POSIX shell."""
    line = shlex.join(argv)
    return f"{line} << 'END_OF_INPUT'\n{stdin.rstrip()}\nEND_OF_INPUT" if stdin else line
