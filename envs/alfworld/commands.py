"""What counts as a command, and which one is meant.

Owns: the patterns, and the spellings that mean the same ("put O in/on R" of older games, "move O to R" of newer ones).
Promises: what fits no pattern is no command; what fits one is either the command that the game lists for it or stays as it was said (the
game then answers that nothing happens); never a guess.
Does not: know what is possible.
"""

from __future__ import annotations

import functools
import re

_THING = r"[a-z][a-z0-9]*(?: [a-z0-9]+){0,3}"
_PATTERNS = {
    kind: re.compile(pattern.replace("THING", f"({_THING})"))
    for kind, pattern in {
        "go": "go to THING",
        "open": "open THING",
        "close": "close THING",
        "take": "take THING from THING",
        "move": "(?:move|put) THING (?:to|into|in/on|in|on) THING",
        "use": "use THING",
        "heat": "heat THING with THING",
        "cool": "cool THING with THING",
        "clean": "clean THING with THING",
        "slice": "slice THING with THING",
        "examine": "examine THING",
        "look": "look",
        "inventory": "inventory",
        "help": "help",
    }.items()
}
KINDS = tuple(_PATTERNS)
ONLY_LOOKS = frozenset({"examine", "look", "inventory", "help"})  # what changes nothing in the game
_LONGEST = 120  # characters


def read(said: str) -> str | None:
    """``said`` as a command in lower case with single spaces, or None."""
    if len(said) > _LONGEST:
        return None
    command = " ".join(said.lower().split())
    return None if meaning(command) is None else command


@functools.lru_cache(maxsize=4096)
def meaning(command: str) -> tuple[str, ...] | None:
    """The kind of a command and the things it names; equal for two spellings of one command. None for what is no command."""
    for kind, pattern in _PATTERNS.items():
        found = pattern.fullmatch(command)
        if found is not None:
            return (kind, *found.groups())
    return None


def listed(command: str, commands: tuple[str, ...]) -> str | None:
    """The one of ``commands`` that ``command`` means, or None."""
    if command in commands:
        return command
    wanted = meaning(command)
    return next((other for other in commands if meaning(other) == wanted), None)
