"""Seeds derived from names: the one place where randomness of a run is split.

Promises: the same parts give the same seed in every process, on every day and Python version. Does not: hold any state.
"""

from __future__ import annotations

import hashlib


def derive_seed(*parts: int | str) -> int:
    """A 31-bit seed from a path of names and numbers, e.g. ``derive_seed(run_seed, "episode", episode_id, turn)``."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little") & 0x7FFFFFFF
