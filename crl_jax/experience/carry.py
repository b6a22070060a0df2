"""What a manager carries from step to step besides the bank and the training buffer.

Owns: its place in a checkpoint, and what a store gives up to go back to one. Promises: a text that no manager saved is refused whole; a
checkpoint from before this was kept restores without it. Does not: hold what begins anew with every step (draws, reservations), or
counters for metrics (``telemetry.totals``).
"""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Callable
from typing import Any, NamedTuple

from crl_jax.experience.store_rows import abandon_generations


class Carry(NamedTuple):
    """``generations`` is the number in the newest generation's id (None: not known), ``too_long_in_row`` and ``longest`` as in
    `ExtractorCalls`, ``redundancy`` as it was last measured, by namespace,
    ``log_row`` the number of the store's newest log row."""

    generations: int | None = None
    too_long_in_row: int = 0
    longest: tuple[int, int] = (0, 0)
    redundancy: dict[str, float] = {}  # noqa: RUF012  (never changed)
    log_row: int = 0

    def to_json(self) -> dict[str, Any]:
        """As a checkpoint keeps it."""
        return {**self._asdict(), "longest": list(self.longest)}

    @staticmethod
    def from_json(saved: Any) -> Carry:
        """Of `to_json`; an empty one for None. Raises ValueError for anything else."""
        if saved is None:
            return Carry()
        try:
            generations, in_row, (shortest, whole) = saved["generations"], saved["too_long_in_row"], saved["longest"]
            log_row = saved["log_row"]
            redundancy = {str(name): float(share) for name, share in saved["redundancy"].items()}
        except (TypeError, ValueError, LookupError, AttributeError) as error:
            raise ValueError(f"this is no saved state of a manager ({type(error).__name__}: {error})") from error
        numbers = [in_row, shortest, whole, log_row, *([] if generations is None else [generations])]
        if not all(type(n) is int and 0 <= n < 2**62 for n in numbers) or not all(map(math.isfinite, redundancy.values())):
            raise ValueError(f"this is no saved state of a manager: {saved!r:.200}")
        return Carry(generations, in_row, (shortest, whole), redundancy, log_row)


def undo(generations: int | None, buffer: str, also: Callable[[sqlite3.Connection], None] | None, db: sqlite3.Connection) -> None:
    """What else a store that goes back to a checkpoint gives up; the buffer on disk would name generations of the future."""
    if generations is not None:
        abandon_generations(db, after=generations)
    db.execute("INSERT OR REPLACE INTO buffer VALUES (0, ?)", (buffer,))
    if also is not None:
        also(db)
