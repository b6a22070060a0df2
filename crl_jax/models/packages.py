"""Finding data files inside installed packages without importing them.

Owns: ``package_file``. Promises: nothing of the package runs (some weight packages import torch or llama.cpp when imported).
Does not: download anything.
"""

from __future__ import annotations

import importlib.util
import pathlib


def package_file(module: str, relative: str, *, install: str) -> pathlib.Path:
    """Path of ``relative`` inside the installed top-level package ``module``.

    Raises FileNotFoundError whose message is the line that installs it (``install``).
    """
    spec = importlib.util.find_spec(module)  # a top-level name is located, not imported
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = pathlib.Path(folder) / relative
        if path.is_file():
            return path
    raise FileNotFoundError(f"{relative} of package `{module}` is not installed: {install}")
