"""Names become paths here, and only inside their root.

Owns: ``inside``. Promises: the result lies below the root even through symbolic links. Does not: create anything.
"""

from __future__ import annotations

import pathlib


def inside(root: pathlib.Path, name: str) -> pathlib.Path:
    """``root / name``, resolved.

    Raises ValueError if that is the root itself or lies outside it (``..``, absolute names, symbolic links).
    """
    base = root.resolve()
    path = (base / name).resolve()
    if "\0" in name or path == base or not path.is_relative_to(base):
        raise ValueError(f"{name!r} leads outside {root}: use a plain relative name")
    return path
