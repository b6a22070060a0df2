"""Names become paths here, and only inside their root.

Owns: ``inside``. Promises: the result lies below the root even through symbolic links. Does not: create anything.
"""

from __future__ import annotations

import pathlib


def inside(root: pathlib.Path, name: str) -> pathlib.Path:
    """``root / name``, resolved.

    Raises ValueError if that is the root itself, lies outside it (``..``, absolute names, symbolic links) or leads nowhere (links in a
    circle).
    """
    base = root.resolve()
    try:
        path = (base / name).resolve()
    except (OSError, RuntimeError) as error:  # links that lead to each other
        raise ValueError(f"{name!r} leads nowhere in {root} ({error}): use a plain relative name") from error
    if "\0" in name or path == base or not path.is_relative_to(base):
        raise ValueError(f"{name!r} leads outside {root}: use a plain relative name")
    return path
