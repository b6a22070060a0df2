"""Reading the full style back.

Owns: ``read``: from the text that ``full.render`` made to what a player knows from it.
Promises: nothing but the text is read.
Does not: remember.
"""

from __future__ import annotations

import dataclasses
import re

Square = tuple[int, int]  # column, row on the screen

_POSITION = re.compile(r"^Position: x (\d+), y (\d+)\.", re.MULTILINE)
_WHOLE = re.compile(r"^Map \(its first row is y (\d+), its first column x (\d+)\):")


@dataclasses.dataclass(frozen=True)
class Seen:
    """What one observation says. ``symbols``: what is drawn where; ``legend``: what the symbols on it mean."""

    message: str
    here: Square
    symbols: dict[Square, str]
    legend: str
    inventory: tuple[str, ...]


def read(text: str) -> Seen:
    """Raises ValueError for a text that is not in the full style."""
    at = _POSITION.search(text)
    parts = text[text.find("Message: ") :].split("\n\n")
    if at is None or len(parts) < 5:
        raise ValueError("this player reads the full style: use style=full")
    here = (int(at[1]), int(at[2]))
    title, *rows = parts[1].split("\n")
    whole = _WHOLE.match(title)
    half = len(rows) // 2
    left, top = (int(whole[2]), int(whole[1])) if whole else (here[0] - half, here[1] - half)
    symbols = {(left + x, top + y): symbol for y, row in enumerate(rows) for x, symbol in enumerate(row) if symbol != " "}
    carried = tuple(line for line in parts[3].split("\n")[1:] if ": " in line)
    return Seen(parts[0].removeprefix("Message: "), here, symbols, parts[2], carried)
