"""An observation in sentences, for a model that reads English.

Owns: the ``full`` text style.
Promises: the map is what the player sees or remembers, as the game draws it; the legend names only symbols on the map that is shown, with
the description of those very squares; position and health are the game's x, y, hp and maximal hp. Nothing the player cannot see is said.
"""

from __future__ import annotations

from envs.minihack.game import Screen

CROP = 9  # side of the map around the hero, in squares
_BLANK = ord(" ")


def render(screen: Screen, actions: tuple[str, ...], *, whole: bool = False) -> str:
    """The game's message, the map around the hero (or, ``whole``, all of it that is drawn), a legend, inventory, state and the list of
    actions."""
    columns, rows_of = _drawn(screen) if whole else _around(screen)
    rows, legend = _map(screen, columns, rows_of)
    title = f"Map (its first row is y {rows_of.start}, its first column x {columns.start})" if whole else "Map around you"
    parts = [
        f"Message: {screen.message or '(none)'}",
        f"{title}:\n" + "\n".join(rows),
        "Legend:\n" + "\n".join(f"{symbol} {', '.join(names)}" for symbol, names in legend.items()),
        "Inventory:\n" + ("\n".join(screen.inventory) or "(empty)"),
        f"Position: x {screen.x}, y {screen.y}. Health: {screen.hp} of {screen.max_hp}.",
        "Actions: " + ", ".join(actions),
    ]
    return "\n\n".join(parts)


def _around(screen: Screen) -> tuple[range, range]:
    """The columns and rows of the square of ``CROP`` squares with the hero in the middle; some may lie outside the screen."""
    half = CROP // 2
    return range(screen.x - half, screen.x + half + 1), range(screen.y - half, screen.y + half + 1)


def _drawn(screen: Screen) -> tuple[range, range]:
    """The columns and rows of the smallest rectangle with all that is drawn, and the hero."""
    drawn = screen.chars != _BLANK
    drawn[screen.y, screen.x] = True
    ys, xs = drawn.any(axis=1).nonzero()[0], drawn.any(axis=0).nonzero()[0]
    return range(int(xs[0]), int(xs[-1]) + 1), range(int(ys[0]), int(ys[-1]) + 1)


def _map(screen: Screen, columns: range, rows_of: range) -> tuple[list[str], dict[str, list[str]]]:
    """The rows of the map, and for each symbol in them the distinct descriptions in reading order."""
    height, width = screen.chars.shape
    rows: list[str] = []
    legend: dict[str, list[str]] = {}
    for y in rows_of:
        row = ""
        for x in columns:
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
