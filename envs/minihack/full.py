"""An observation in sentences, for a model that reads English.

Owns: the ``full`` text style.
Promises: the legend names only symbols inside the crop, with the description of those very squares; position and health are the game's x,
y, hp and maximal hp. Nothing the player cannot see is said.
"""

from __future__ import annotations

from envs.minihack.game import Screen

CROP = 9  # side of the map around the hero, in squares
_BLANK = ord(" ")


def render(screen: Screen, actions: tuple[str, ...]) -> str:
    """The game's message, the map around the hero, a legend, inventory, state and the list of actions."""
    rows, legend = _crop(screen)
    parts = [
        f"Message: {screen.message or '(none)'}",
        "Map around you:\n" + "\n".join(rows),
        "Legend:\n" + "\n".join(f"{symbol} {', '.join(names)}" for symbol, names in legend.items()),
        "Inventory:\n" + ("\n".join(screen.inventory) or "(empty)"),
        f"Position: x {screen.x}, y {screen.y}. Health: {screen.hp} of {screen.max_hp}.",
        "Actions: " + ", ".join(actions),
    ]
    return "\n\n".join(parts)


def _crop(screen: Screen) -> tuple[list[str], dict[str, list[str]]]:
    """Rows of ``CROP`` characters around the hero, and for each symbol in them the distinct descriptions in reading order."""
    height, width = screen.chars.shape
    half = CROP // 2
    rows: list[str] = []
    legend: dict[str, list[str]] = {}
    for y in range(screen.y - half, screen.y + half + 1):
        row = ""
        for x in range(screen.x - half, screen.x + half + 1):
            inside = 0 <= y < height and 0 <= x < width
            code = int(screen.chars[y, x]) if inside else _BLANK
            row += chr(code)
            if code != _BLANK:
                name = screen.descriptions[y, x].tobytes().split(b"\0", 1)[0].decode("latin-1") or "unknown"
                known = legend.setdefault(chr(code), [])
                if name not in known:
                    known.append(name)
        rows.append(row)
    return rows, legend
