"""The words for the keys of the game.

Owns: which action words a task has (``words``), the keys they send (``keys``), and which of them may be said now (``allowed``).
Promises: a word is never taken for another: while the game asks for a letter only letters and "cancel" are actions, while it asks for a
direction only moves and "cancel", and otherwise neither letters nor "cancel".
Does not: read the screen.

MiniHack's skill levels (the "-Full" ones) take 85 keys. Each task here has the few that solve it, by name; a letter names a thing carried
("f", as the inventory and the question write it), or answers yes (y), no (n), left (l) or right (r).
"""

from __future__ import annotations

MOVES = ("north", "east", "south", "west", "northeast", "southeast", "southwest", "northwest")  # in the order of NLE's compass commands
PICKUP_APPLY = ("pickup", "apply")
LETTERS = ("a", "b", "c", "d", "e", "f", "g", "l", "n", "r", "y")
CANCEL = "cancel"

_KEY = dict(zip(MOVES, "kljhunby", strict=True)) | {letter: letter for letter in LETTERS}
_KEY |= {"pickup": ",", "put on": "P", "quaff": "q", "wear": "W", "zap": "z", "apply": "a", CANCEL: "\x1b"}
_VERBS = {
    "ring": ("pickup", "put on"),
    "potion": ("pickup", "quaff"),
    "levitate": ("pickup", "put on", "quaff", "wear"),
    "all": ("pickup", "put on", "quaff", "wear", "zap", "apply"),
}


def words(kind: str) -> tuple[str, ...]:
    """The action words of a kind of task: "moves", "keyroom", or one of the skills. Raises KeyError."""
    if kind == "moves":
        return MOVES
    if kind == "keyroom":
        return MOVES + PICKUP_APPLY
    return (*MOVES, *_VERBS[kind], *LETTERS, CANCEL)


def keys(kind: str) -> tuple[int, ...] | None:
    """The keys that the words of a skill send, in their order; None where the level's own commands fit."""
    return tuple(ord(_KEY[word]) for word in words(kind)) if kind in _VERBS else None


def allowed(all_words: tuple[str, ...], question: str) -> tuple[str, ...]:
    """Those of ``all_words`` that may be said now. ``question`` is what the game asks, "" when it does not."""
    if CANCEL not in all_words:
        return all_words
    if not question:
        return tuple(word for word in all_words if word not in LETTERS and word != CANCEL)
    answers = MOVES if "direction" in question else LETTERS
    return (*answers, CANCEL)
