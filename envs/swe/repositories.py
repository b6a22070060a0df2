"""The repositories that come with the package: 35 small modules of ours and packages that pip carries, each with one bug.

Owns: the recipes (``repos/*.yaml``), the instances made of them, and the git repository of each, made once in the cache.
Promises: the agent's repository holds the broken source and the visible tests, in one commit whose name is the same everywhere; neither the
hidden tests nor the repair are in it. A module is either trained on or held out.
Does not: grade. A package that pip does not carry in a verified version leaves its instances out (see ``refused``).
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import yaml

from envs import cache
from envs.api import EnvError, EnvUnavailable, Split
from envs.swe.bounds import Limits
from envs.swe.instance import Instance
from envs.swe.layout import TREE, Bind
from envs.swe.mutate import Place, PlaceNotFound, mutate
from envs.swe.sandbox import Sandbox
from envs.swe.sources import pinned_sources

Kind = Literal["algorithm", "mutation"]

_REPOS = Path(__file__).with_name("repos")
_GIT = """set -e
git init -q --template= -b main .
mkdir -p .git/info
printf '__pycache__/\\n*.pyc\\n.pytest_cache/\\n' > .git/info/exclude
git add -A
git commit -q -m "Import $1"
git repack -q -a -d
git rev-parse HEAD"""


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How to make an instance. ``bug``: [right, wrong] text; ``place``: of an operator in ``file`` of the package ``module``."""

    id: str
    kind: Kind
    module: str
    split: Split
    issue: str
    visible: str
    hidden: str
    fail: tuple[str, ...]
    source: str = ""
    bug: tuple[str, str] = ("", "")
    file: str = ""
    place: Place | None = None


@functools.cache
def recipes() -> Mapping[str, Recipe]:
    """All recipes by instance id."""
    found: list[Recipe] = []
    for path in sorted(_REPOS.glob("*.yaml")):
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
        found += map(_algorithm, data) if path.name.startswith("algorithms") else _mutations(data)
    return {recipe.id: recipe for recipe in found}


@functools.cache
def instance(instance_id: str) -> Instance:
    """The instance, complete but for ``base_commit``, which ``repository`` makes. Raises KeyError, ``EnvUnavailable``."""
    recipe = recipes()[instance_id]
    right, wrong = _files(recipe)
    visible, hidden = f"tests/test_{recipe.module}.py", f"tests/test_issue_{recipe.id.partition('__')[2]}.py"
    tests = [f"{visible}::{name}" for name in _test_names(recipe.visible)] + [f"{hidden}::{name}" for name in _test_names(recipe.hidden)]
    fail = tuple(f"{hidden}::{name}" for name in recipe.fail)
    shown = {test.partition("[")[0] for test in fail}
    return Instance(
        repo=f"crl/{recipe.module}",
        instance_id=instance_id,
        base_commit="",
        patch="".join(_diff(name, wrong[name], right[name]) for name in right if right[name] != wrong[name]),
        test_patch=_diff(hidden, "", recipe.hidden),
        problem_statement=recipe.issue,
        fail_to_pass=fail,
        pass_to_pass=tuple(test for test in tests if test not in shown),
        version="1",
    )


def repository(instance_id: str, sandbox: Sandbox) -> Path:
    """The folder with the agent's repository, made now unless it is there. Raises KeyError, ``EnvUnavailable``, ``EnvError``."""
    recipe = recipes()[instance_id]
    _, wrong = _files(recipe)
    files = {**wrong, f"tests/test_{recipe.module}.py": recipe.visible, "README.md": f"# {recipe.module}\n\nTests: `python -m pytest`\n"}
    digest = hashlib.sha256(repr((sorted(files.items()), _GIT)).encode()).hexdigest()[:16]

    def fill(folder: Path) -> None:
        for name, text in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(text.encode())
        argv = ["/usr/bin/bash", "-c", _GIT, "bash", recipe.module]
        done = sandbox.run(argv, Limits(), binds=[Bind(str(folder), TREE, writable=True)])
        if done.code != 0:
            raise EnvError(f"swe: making the repository of {instance_id} failed: {done.output.decode(errors='replace')[-300:]}")

    return cache.made_once(cache.folder("swe") / f"{instance_id}-{digest}", fill)


def repair(instance_id: str) -> tuple[str, str, str]:
    """The file with the bug, its broken text and its right one. Raises KeyError, ``EnvUnavailable``."""
    right, wrong = _files(recipes()[instance_id])
    name = next(name for name in right if right[name] != wrong[name])
    return name, wrong[name], right[name]


@functools.cache
def refused() -> Mapping[str, str]:
    """Instances that cannot be made here, and why."""
    reasons: dict[str, str] = {}
    for name in recipes():
        try:
            instance(name)
        except EnvUnavailable as reason:
            reasons[name] = str(reason)
    return reasons


@functools.cache
def _files(recipe: Recipe) -> tuple[dict[str, str], dict[str, str]]:
    """The sources, right and wrong. Raises ``EnvUnavailable``."""
    if recipe.place is None:
        name = f"{recipe.module}.py"
        return {name: recipe.source}, {name: recipe.source.replace(*recipe.bug)}
    why = ""
    for source in pinned_sources(recipe.module):
        right, name = {f"{recipe.module}/{file}": text for file, text in source.items()}, f"{recipe.module}/{recipe.file}"
        try:
            return right, {**right, name: mutate(right[name], recipe.place)}
        except (PlaceNotFound, KeyError) as changed:
            why = str(changed)
    raise EnvUnavailable(f"swe: {recipe.id} does not fit the {recipe.module} that pip carries here ({why}): use an older pip")


def _algorithm(data: Mapping[str, Any]) -> Recipe:
    right, wrong = data["bug"]
    if data["source"].count(right) != 1:
        raise ValueError(f"repos: {data['module']}: the text of the bug is {data['source'].count(right)} times in the source")
    texts = {field: data[field] for field in ("module", "split", "issue", "visible", "hidden", "source")}
    return Recipe(id=f"algorithm__{data['module']}", kind="algorithm", fail=_fail(data), bug=(right, wrong), **texts)


def _mutations(data: Mapping[str, Any]) -> list[Recipe]:
    package, split, visible = data["package"], data["split"], data["visible"]
    return [
        Recipe(
            id=f"mutation__{package}_{one['id']}",
            kind="mutation",
            module=package,
            split=split,
            issue=one["issue"],
            visible=visible,
            hidden=one["hidden"],
            fail=_fail(one),
            file=one["file"],
            place=Place(*one["place"]),
        )
        for one in data["mutations"]
    ]


def _fail(data: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(data.get("fail") or [name for name in _test_names(data["hidden"]) if name.startswith("test_bug")])


def _test_names(source: str) -> list[str]:
    return [node.name for node in ast.parse(source).body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]


def _diff(name: str, old: str, new: str) -> str:
    lines = difflib.unified_diff(
        old.splitlines(keepends=True), new.splitlines(keepends=True), f"a/{name}" if old else "/dev/null", f"b/{name}"
    )
    return f"diff --git a/{name} b/{name}\n{'' if old else 'new file mode 100644' + chr(10)}{''.join(lines)}"
