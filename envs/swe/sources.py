"""Sources of the packages that pip carries, to make mutated repositories of.

Owns: where they are found (the installed pip, else the wheel that comes with Python), and the check that they are the ones that were
verified (``repos/pins.json``: package -> content hash -> version of pip).
Promises: a source that was not verified is never used: ``EnvUnavailable`` says which versions of pip are known.
Does not: fetch anything.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import sysconfig
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from envs.api import EnvUnavailable

_PINS = Path(__file__).with_name("repos") / "pins.json"


@functools.cache
def pinned_sources(package: str) -> tuple[Mapping[str, str], ...]:
    """File name -> text of the package's Python files, for every verified version that is here. Raises ``EnvUnavailable`` for none."""
    known: dict[str, str] = json.loads(_PINS.read_text(encoding="utf-8"))[package]
    found = tuple(files for files in _candidates(package) if content_hash(files) in known)
    if not found:
        versions = sorted(set(known.values()), key=lambda version: tuple(int(part) for part in version.split(".")))
        raise EnvUnavailable(
            f"swe: the {package} that pip carries here is not one of those that were verified: "
            f"pip install pip=={versions[-1]} (or {', '.join(versions[:-1])}) into this environment"
        )
    return found


def content_hash(files: Mapping[str, str]) -> str:
    """A hash of names and texts."""
    digest = hashlib.sha256()
    for name, text in sorted(files.items()):
        digest.update(f"{name}\0{len(text)}\0{text}".encode())
    return digest.hexdigest()[:32]


def read_wheel(wheel: Path, package: str) -> Mapping[str, str]:
    """The package's Python files in a wheel of pip; empty when it has none."""
    start = f"pip/_vendor/{package}/"
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.startswith(start) and name.endswith(".py")]
        return {name.removeprefix(start): archive.read(name).decode() for name in names}


def _candidates(package: str) -> Iterator[Mapping[str, str]]:
    pip = importlib.util.find_spec("pip")
    for place in (pip.submodule_search_locations or ()) if pip else ():
        folder = Path(place, "_vendor", package)
        yield {path.relative_to(folder).as_posix(): path.read_bytes().decode() for path in sorted(folder.rglob("*.py"))}
    bundled = Path(sysconfig.get_path("stdlib"), "ensurepip", "_bundled")
    for wheel in sorted(bundled.glob("pip-*.whl")):
        yield read_wheel(wheel, package)
