"""What the inside of the sandbox looks like.

Owns: the folders that are shown inside (all read-only but the working ones), those that are masked, the environment variables, and the
interpreter for tests.
Promises: nothing of the host's environment; no home folder; in the ``narrow`` layout no installed package but pytest and what it imports,
so that the sources the mutated repositories were made from cannot be looked up.
Does not: run anything.
"""

from __future__ import annotations

import dataclasses
import functools
import glob
import hashlib
import importlib.util
import os
import sys
import sysconfig
from pathlib import Path

from envs import cache
from envs.api import EnvUnavailable

TREE = "/testbed"  # where the repository is inside, as in SWE-bench
TOOLBOX = "/opt/swe"
_PYTEST = ("pytest", "_pytest", "pluggy", "iniconfig")
_BESIDE = ("pygments", "py")  # what some versions of pytest import as well
_INSTALLED = ("site-packages", "dist-packages", "ensurepip/_bundled", "tomllib")  # tomllib is a copy of tomli
# What brings copies of Python packages to many machines and is of no use inside.
_STRANGERS = (
    "/usr/local",
    "/usr/share",
    "/usr/src",
    "/usr/lib/python3/dist-packages",
    "/usr/lib/node_modules",
    "/usr/lib/google-cloud-sdk",
)
_PYTEST_COMMAND = """#!{toolbox}/bin/python
import sys
import pytest
sys.path.insert(0, "")
sys.exit(pytest.main())
"""


@dataclasses.dataclass(frozen=True)
class Bind:
    """A folder of the host at ``target`` inside."""

    source: str
    target: str
    writable: bool = False


@dataclasses.dataclass(frozen=True)
class Layout:
    """The inside: binds in order, folders shown empty, symbolic links (target, name), and environment variables."""

    binds: tuple[Bind, ...]
    masks: tuple[str, ...]
    links: tuple[tuple[str, str], ...]
    environment: tuple[tuple[str, str], ...]
    python: str


@functools.cache
def narrow() -> Layout:
    """For the repositories of the package: the system, the interpreter's standard library, pytest. Raises ``EnvUnavailable``."""
    site = tuple(Bind(str(place), f"{TOOLBOX}/site/{place.name}") for place in _pytest_places())
    return _layout(site, masks=_masks(), path=f"{TOOLBOX}/bin:/usr/bin:/bin", python_path=f"{TOOLBOX}/site")


@functools.cache
def whole() -> Layout:
    """For a user's repositories: the running environment with all its packages. Raises ``EnvUnavailable``."""
    _pytest_places()
    path = f"{sys.prefix}/bin:{TOOLBOX}/bin:/usr/local/bin:/usr/bin:/bin"
    return dataclasses.replace(_layout((), masks=(), path=path, python_path=""), python=sys.executable)


def interpreter() -> str:
    """The real interpreter, links resolved: what has to be reachable inside."""
    return os.path.realpath(sys.executable)


def _layout(extra: tuple[Bind, ...], *, masks: tuple[str, ...], path: str, python_path: str) -> Layout:
    for tool in ("bash", "git"):
        if not os.path.exists(f"/usr/bin/{tool}"):
            raise EnvUnavailable(f"swe: there is no /usr/bin/{tool}: apt-get install {tool}")
    binds, links = [Bind("/usr", "/usr")], []
    for name in ("/bin", "/sbin", "/lib", "/lib32", "/lib64"):
        if os.path.islink(name):
            links.append((os.readlink(name), name))
        elif os.path.isdir(name):
            binds.append(Bind(name, name))
    if os.path.isdir("/etc/alternatives"):
        binds.append(Bind("/etc/alternatives", "/etc/alternatives"))
    if os.path.isfile("/etc/ld.so.cache"):
        binds.append(Bind("/etc/ld.so.cache", "/etc/ld.so.cache"))
    shown = [prefix for prefix in dict.fromkeys((sys.base_prefix, sys.prefix)) if not (masks and prefix == sys.prefix != sys.base_prefix)]
    binds += [Bind(prefix, prefix) for prefix in shown if not prefix.startswith("/usr/") and prefix != "/usr"]
    binds += [Bind(str(_toolbox()), TOOLBOX), *extra]
    environment = {
        "PATH": path,
        "HOME": "/tmp",
        "LANG": "C.UTF-8",
        "TZ": "UTC",
        "TERM": "dumb",
        "PAGER": "cat",
        "NO_COLOR": "1",
        "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPATH": python_path,
        "GIT_CONFIG_NOSYSTEM": "1",
    }
    for who in ("AUTHOR", "COMMITTER"):  # commits made inside have the same names on any day
        environment |= {f"GIT_{who}_NAME": "agent", f"GIT_{who}_EMAIL": "agent@localhost", f"GIT_{who}_DATE": "2024-01-01T00:00:00Z"}
    given = tuple((name, value) for name, value in environment.items() if value)
    return Layout(tuple(binds), masks, tuple(links), given, f"{TOOLBOX}/bin/python")


def _masks() -> tuple[str, ...]:
    """Folders under those shown that hold packages or wheels that bugs were made in."""
    stdlib = sysconfig.get_path("stdlib", vars={"base": sys.base_prefix, "installed_base": sys.base_prefix})
    wanted = [f"{stdlib}/{name}" for name in _INSTALLED]
    wanted += [f"{sys.base_prefix}/{name}" for name in ("pkgs", "envs")]  # conda's
    wanted += [folder for folder in _STRANGERS if not f"{sys.base_prefix}/".startswith(f"{folder}/")]
    for root in ("/usr/lib", "/usr/local/lib"):
        for name in _INSTALLED:
            wanted += sorted(glob.glob(f"{root}/python3*/{name}"))
    found = [folder for folder in dict.fromkeys(wanted) if os.path.isdir(folder)]
    return tuple(folder for folder in found if not any(folder.startswith(f"{above}/") for above in found))


def _pytest_places() -> list[Path]:
    places = []
    for name in (*_PYTEST, *_BESIDE):
        found = importlib.util.find_spec(name)
        if found is not None and found.submodule_search_locations:
            places.append(Path(next(iter(found.submodule_search_locations))).resolve())
        elif found is not None and found.origin:
            places.append(Path(found.origin).resolve())
        elif name in _PYTEST:
            raise EnvUnavailable(f"swe: tests are run by pytest, and {name} is not installed here: pip install 'crl-jax[dev]'")
    return places


def _toolbox() -> Path:
    """A folder with ``bin/python``, ``bin/python3`` and ``bin/pytest``, made once."""
    python, places = interpreter(), _pytest_places()
    name = hashlib.sha256(f"{python}\0{_PYTEST_COMMAND}\0{[place.name for place in places]}".encode()).hexdigest()[:12]

    def fill(folder: Path) -> None:
        (folder / "bin").mkdir()
        (folder / "site").mkdir()
        for place in places:  # mount points: the folder is shown read-only
            (folder / "site" / place.name).mkdir() if place.is_dir() else (folder / "site" / place.name).touch()
        for link in ("python", "python3"):
            (folder / "bin" / link).symlink_to(python)
        script = folder / "bin" / "pytest"
        script.write_text(_PYTEST_COMMAND.format(toolbox=TOOLBOX), encoding="utf-8")
        script.chmod(0o755)

    return cache.made_once(cache.folder("swe") / f"toolbox-{name}", fill)
