"""Text of token ids while they come.

Owns: what is shown when. Promises: a delta never ends within a character and never shows a beginning of a stop string that may still be
completed; the deltas joined are the text of the whole; what is shown ends before the stop string or the stop id, although their tokens
stay among the ids. At the end, bytes that never became a character are shown as the tokenizer shows them (U+FFFD). Does not: decide when
sampling stops.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

_BROKEN = "\ufffd"  # what a decoder makes of bytes that are no character (yet): one for an unfinished tail


class TextStream:
    """The text of one completion. ``stop_string`` is the one that ended it, or empty."""

    def __init__(
        self, decode: Callable[[Sequence[int]], str], *, stop_strings: Collection[str] = (), stop_ids: Collection[int] = ()
    ) -> None:
        self._decode = decode
        self._stop_strings = tuple(stop_strings)
        self._stop_ids = frozenset(stop_ids)
        self._ids: list[int] = []  # the last two runs of ids with whole characters, and what came after: decoders look back
        self._mark = 0  # ids before it are the first of these runs
        self._out = 0  # characters of their text that were taken
        self._held = ""  # taken, but perhaps the beginning of a stop string
        self.stop_string = ""

    def push(self, token: int) -> str:
        """What can be shown after one more token."""
        if token in self._stop_ids or self.stop_string:
            return ""
        self._ids.append(token)
        whole = self._decode(self._ids)
        unfinished = whole.endswith(_BROKEN)
        stable = whole[:-1] if unfinished else whole
        new, self._out = stable[self._out :], max(self._out, len(stable))
        if not unfinished:
            self._ids, self._mark = self._ids[self._mark :], len(self._ids) - self._mark
            self._out = len(self._decode(self._ids))
        return self._show(new)

    def flush(self) -> str:
        """What is left at the end."""
        if self.stop_string:
            return ""
        shown = self._show(self._decode(self._ids)[self._out :])
        rest, self._held = self._held, ""
        self._ids, self._mark, self._out = [], 0, 0
        return shown + rest

    def _show(self, new: str) -> str:
        """Cuts at the first stop string; keeps back a tail that may become one."""
        text = self._held + new
        found = [(at, -len(stop), stop) for stop in self._stop_strings if (at := text.find(stop)) >= 0]
        if found:
            at, _, self.stop_string = min(found)
            self._held = ""
            return text[:at]
        longest = max((len(stop) for stop in self._stop_strings), default=1) - 1
        keep = next((n for n in range(min(longest, len(text)), 0, -1) if any(s.startswith(text[-n:]) for s in self._stop_strings)), 0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def pieces(stream: TextStream, ids: Sequence[int]) -> list[str]:
    """The text each of ``ids`` adds (empty while it is held), the rest with the last: joined they are the whole text."""
    found = [stream.push(token) for token in ids]
    if found:
        found[-1] += stream.flush()
    return found
