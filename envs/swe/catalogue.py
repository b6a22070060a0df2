"""Where instances and their repositories come from.

Owns: the two catalogues: the repositories that come with the package, and a user's file of instances with the repositories beside it.
Promises: the repository an agent gets is one commit of the instance's base: no later history, in which the repair would be found.
Does not: download anything.
"""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import Protocol

from envs import cache
from envs.api import EnvError, EnvUnavailable, Split
from envs.swe import repositories
from envs.swe.bounds import Limits
from envs.swe.instance import Instance, read_instances
from envs.swe.layout import TREE, Bind
from envs.swe.sandbox import Sandbox

_SOURCE = "/source"
_IMPORT = f"""set -e
cd {TREE}
if [ -f {_SOURCE} ]; then git clone -q --bare {_SOURCE} /tmp/source; from=/tmp/source; else from={_SOURCE}; fi
export GIT_DIR=$(git -c safe.directory='*' -C "$from" rev-parse --absolute-git-dir) GIT_INDEX_FILE=/tmp/index GIT_WORK_TREE={TREE}
git -c safe.directory='*' read-tree "$1"
git -c safe.directory='*' checkout-index -a -f
unset GIT_DIR GIT_INDEX_FILE GIT_WORK_TREE
git init -q --template= -b main .
mkdir -p .git/info
printf '__pycache__/\\n*.pyc\\n.pytest_cache/\\n' > .git/info/exclude
git add -A -f
git commit -q -m "Base of $2"
git repack -q -a -d"""


class Catalogue(Protocol):
    """Instances. ``narrow``: their tests need pytest alone. ``data_source``: "real" or "generated"."""

    narrow: bool
    data_source: str

    def ids(self, split: Split) -> tuple[str, ...]:
        """Instance ids of a split, in order."""
        ...

    def kind(self, instance_id: str) -> str:
        """What sort of bug it is."""
        ...

    def instance(self, instance_id: str) -> Instance:
        """The instance. Raises KeyError, ``EnvUnavailable``."""
        ...

    def repository(self, instance_id: str, sandbox: Sandbox) -> Path:
        """The folder with the agent's repository. Raises ``EnvUnavailable``, ``EnvError``."""
        ...


class Own:
    """The repositories that come with the package."""

    narrow = True
    data_source = "generated"

    def ids(self, split: Split) -> tuple[str, ...]:
        """As ``Catalogue``; those that cannot be made here are left out."""
        left_out = repositories.refused()
        return tuple(name for name, recipe in repositories.recipes().items() if recipe.split == split and name not in left_out)

    def kind(self, instance_id: str) -> str:
        """As ``Catalogue``: "algorithm" or "mutation"."""
        return repositories.recipes()[instance_id].kind

    def instance(self, instance_id: str) -> Instance:
        """As ``Catalogue``."""
        return repositories.instance(instance_id)

    def repository(self, instance_id: str, sandbox: Sandbox) -> Path:
        """As ``Catalogue``."""
        return repositories.repository(instance_id, sandbox)


class FromFile:
    """A user's JSON-lines file. The repository of an instance stands beside it, as a folder or as a git bundle, by the instance's id or by
    the repository's name with "/" written "__". All instances are for training. Raises ``EnvUnavailable`` (no file, or a broken one)."""

    narrow = False
    data_source = "real"

    def __init__(self, path: Path) -> None:
        try:
            self._instances = {one.instance_id: one for one in read_instances(path)}
        except OSError as failure:
            raise EnvUnavailable(
                f"swe: SWE_INSTANCES={path}: {failure.strerror}: give a file of instances, or unset the variable"
            ) from failure
        except ValueError as broken:
            raise EnvUnavailable(f"swe: SWE_INSTANCES={path}: {broken}: correct the file, or unset the variable") from broken
        self._folder = path.resolve().parent

    def ids(self, split: Split) -> tuple[str, ...]:
        """As ``Catalogue``."""
        return tuple(self._instances) if split == "train" else ()

    def kind(self, instance_id: str) -> str:
        """As ``Catalogue``: the repository."""
        return self._instances[instance_id].repo

    def instance(self, instance_id: str) -> Instance:
        """As ``Catalogue``."""
        return self._instances[instance_id]

    def repository(self, instance_id: str, sandbox: Sandbox) -> Path:
        """As ``Catalogue``."""
        wanted = self._instances[instance_id]
        source = self._source(wanted)
        digest = hashlib.sha256(f"{source}\0{wanted.base_commit}\0{_IMPORT}".encode()).hexdigest()[:16]

        def fill(folder: Path) -> None:
            binds = [Bind(str(folder), TREE, writable=True), Bind(str(source), _SOURCE)]
            limits = Limits(wall_s=600.0, cpu_s=600, tmp_mib=4096, file_mib=4096)
            argv = ["/usr/bin/bash", "-c", _IMPORT, "bash", wanted.base_commit, wanted.repo]
            done = sandbox.run(argv, limits, binds=binds, cwd="/")
            if done.code != 0:
                said = done.output.decode(errors="replace").strip()[-300:]
                raise EnvError(f"swe: commit {wanted.base_commit} of {source} cannot be checked out: {done.stopped or said}")

        return cache.made_once(cache.folder("swe") / "files" / f"{instance_id}-{digest}", fill)

    def _source(self, wanted: Instance) -> Path:
        stems = (wanted.instance_id, wanted.repo.replace("/", "__"))
        for stem in stems:
            for path in (self._folder / f"{stem}.bundle", self._folder / stem):
                if path.exists():
                    return path
        raise EnvUnavailable(
            f"swe: no repository of {wanted.instance_id} in {self._folder}: put a git bundle or a clone there, called "
            f"{' or '.join(f'{stem}[.bundle]' for stem in stems)}; or use backend=docker"
        )


@functools.cache
def catalogue(path: str) -> Catalogue:
    """The user's file at ``path``, or what comes with the package when it is ""."""
    return FromFile(Path(path)) if path else Own()
