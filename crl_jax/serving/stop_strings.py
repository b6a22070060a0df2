"""Stop strings over token ids: for each set of strings an automaton whose states live in one table the compiled programs read.

Owns: the automata (Aho and Corasick, CACM 18(6), 1975, over the bytes of the tokens), and the rows of the table they take up.
Promises: state 0 means "no stop strings"; after the token with which the bytes sampled so far first contain one of the strings, and not
before, the state is ``REACHED``, wherever the string lies in its tokens; rows of a set in use never move.
Does not: cut text. The ids keep the last token whole.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, deque
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

NONE = 0
REACHED = -1
_SHOWN = 80  # characters of a string in a message


@dataclasses.dataclass
class _Set:
    """The rows ``first : first + size`` of one set of strings, and how many requests use them."""

    first: int
    size: int
    users: int = 0


class StopTable:
    """``table[state, token]`` is the state after the token. ``version`` changes whenever the table does.

    ``pieces[i]`` are the bytes of token i (empty for special tokens). ``capacity`` is the number of states, about one for each byte of all
    strings in use at a time.
    """

    def __init__(self, pieces: Sequence[bytes], capacity: int = 64) -> None:
        if not 1 < capacity < 2**15:
            raise ValueError(f"a table of {capacity} states is not in 2..{2**15 - 1}: use about one for each byte of the stop strings")
        self.table: Int[np.ndarray, "T V"] = np.zeros((capacity, len(pieces)), np.int16)
        self.version = 0
        self._pieces = pieces
        self._sets: OrderedDict[frozenset[bytes], _Set] = OrderedDict()  # longest unused first

    def start(self, strings: Sequence[str]) -> int:
        """The state before the first token; each call is paid back by ``release`` with the same strings.

        Raises ValueError for an empty string, and when the table has no room beside the sets in use.
        """
        if not strings:
            return NONE
        key = frozenset(s.encode() for s in strings)
        if b"" in key:
            raise ValueError("an empty stop string would stop at once: leave it out")
        found = self._sets.get(key)
        if found is None:
            longest = max(map(len, key))
            if longest >= len(self.table):  # an automaton takes a kilobyte for each byte of its strings
                raise self._too_many(strings, longest + 1)
            steps = automaton(key)
            found = _Set(self._room(len(steps), strings), len(steps))
            rows = token_steps(steps, self._pieces)
            self.table[found.first : found.first + found.size] = np.where(rows < 0, rows, rows + found.first)
            self.version += 1
            self._sets[key] = found
        found.users += 1
        return found.first

    def release(self, strings: Sequence[str]) -> None:
        """One request less uses these strings. Their rows stay until the room is needed."""
        if strings:
            key = frozenset(s.encode() for s in strings)
            self._sets[key].users -= 1
            self._sets.move_to_end(key)

    def advance(self, state: int, token: int) -> int:
        """The state after ``token``."""
        return int(self.table[state, token])

    def _room(self, size: int, strings: Sequence[str]) -> int:
        """The first row of ``size`` free ones; drops unused sets, the longest unused first, until there are that many in a row."""
        while True:
            end = 1
            for taken in sorted(self._sets.values(), key=lambda s: s.first):
                if taken.first - end >= size:
                    return end
                end = taken.first + taken.size
            if len(self.table) - end >= size:
                return end
            unused = next((key for key, taken in self._sets.items() if not taken.users), None)
            if unused is None:
                raise self._too_many(strings, size)
            del self._sets[unused]

    def _too_many(self, strings: Sequence[str], size: int) -> ValueError:
        shown = [s if len(s) <= _SHOWN else f"{s[:_SHOWN]}..." for s in strings]
        return ValueError(
            f"stop strings {shown} need {size} states and the table of {len(self.table)} has no room for them: use shorter or fewer "
            "strings, or build the engine with more stop_states"
        )


def automaton(strings: frozenset[bytes]) -> Int[np.ndarray, "N 256"]:
    """The state after each byte in each state: the state is the longest end of what was read that begins a string, 0 at the start, and
    ``REACHED`` once a string is complete.
    """
    children: list[dict[int, int]] = [{}]
    complete = {0: False}
    for string in sorted(strings):
        node = 0
        for byte in string:
            if byte not in children[node]:
                children[node][byte] = len(children)
                complete[len(children)] = False
                children.append({})
            node = children[node][byte]
        complete[node] = True
    steps = np.zeros((len(children), 256), np.int32)
    shorter = [0] * len(children)  # the longest proper end of a node's bytes that is a node as well
    queue = deque([0])
    while queue:
        node = queue.popleft()
        steps[node] = steps[shorter[node]] if node else 0
        for byte, child in children[node].items():
            shorter[child] = int(steps[node, byte])
            complete[child] = complete[child] or complete[shorter[child]]
            steps[node, byte] = child
            queue.append(child)
    return np.where(np.array([complete[i] for i in range(len(children))])[steps], REACHED, steps)


def token_steps(steps: Int[np.ndarray, "N 256"], pieces: Sequence[bytes]) -> Int[np.ndarray, "N V"]:
    """The state after each whole token in each state."""
    order = sorted(range(len(pieces)), key=lambda i: -len(pieces[i]))
    lengths = np.array([len(pieces[i]) for i in order])
    state = np.repeat(np.arange(len(steps))[:, None], len(pieces), axis=1)
    for at in range(lengths[0] if len(lengths) else 0):
        reading = int((lengths > at).sum())
        byte = np.array([pieces[i][at] for i in order[:reading]])
        before = state[:, :reading]
        state[:, :reading] = np.where(before == REACHED, REACHED, steps[before, byte[None]])
    out = np.empty_like(state)
    out[:, order] = state
    return out
