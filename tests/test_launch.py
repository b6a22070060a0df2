"""The set-up script, with a stand-in for Python and uv: no network, no packages."""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]

# Answers as Python does, but makes environments of two scripts: itself, and a uv that installs a command named crl.
PYTHON = f"""#!/bin/bash
case "$1 $2" in
  "-m venv") mkdir -p "$3/bin"; touch "$3/pyvenv.cfg"; cp "$0" "$3/bin/python" ;;
  "-m pip") [[ $3 == install ]] && cp "${{0%/*}}/python" "${{0%/*}}/uv"; [[ $3 == install || -x ${{0%/*}}/uv ]] ;;
  "pip install") [[ -e $KILL ]] && kill -9 $PPID; cp "$0" "${{0%/*}}/crl" ;;
  "--help ") ;;
  *) exec {sys.executable} "$@" ;;
esac
"""


@pytest.fixture
def root(tmp_path: pathlib.Path) -> pathlib.Path:
    """A copy of what the script reads, in a folder with a space in its name."""
    copy = tmp_path / "a clone"
    (copy / "launch").mkdir(parents=True)
    for name in ("launch/setup.sh", "requirements-lock.txt", "requirements-weights.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, copy / name)
    (tmp_path / "python").write_text(PYTHON)
    (tmp_path / "python").chmod(0o755)
    return copy


def set_up(root: pathlib.Path, **settings: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name != "CRL_VENV"}
    environment = kept | {"PYTHON": str(root.parent / "python"), "KILL": str(root / "kill"), **settings}
    command = ["bash", str(root / "launch" / "setup.sh")]
    return subprocess.run(command, cwd="/", env=environment, capture_output=True, text=True, timeout=120)


def test_a_set_up_is_done_once_and_from_any_folder(root: pathlib.Path) -> None:
    done = set_up(root)
    assert "a clone/.venv is ready" in done.stdout, done.stderr
    assert "is up to date" in set_up(root).stdout


def test_a_set_up_that_was_killed_is_made_again(root: pathlib.Path) -> None:
    (root / "kill").touch()
    assert set_up(root).returncode != 0
    half = root / ".venv" / "half a package"
    half.touch()
    (root / "kill").unlink()
    done = set_up(root)
    assert "did not finish; starting again" in done.stderr
    assert "is ready" in done.stdout
    assert not half.exists()


def test_a_folder_that_is_no_environment_is_left_alone(root: pathlib.Path) -> None:
    mine = root / "letters"
    mine.mkdir()
    (mine / "a.txt").touch()
    done = set_up(root, CRL_VENV=str(mine))
    assert (done.returncode, [path.name for path in mine.iterdir()]) == (1, ["a.txt"])
    assert "set CRL_VENV to a new folder" in done.stderr


def test_a_python_that_is_missing_or_too_old_is_named(root: pathlib.Path) -> None:
    assert "Python 3.11, 3.12 or 3.13 is needed" in set_up(root, PYTHON="no-such-python").stderr
    old = root / "old"
    old.write_text('#!/bin/sh\n[ "$1" = -V ] && echo Python 3.9.1 || exit 1\n')
    old.chmod(0o755)
    done = set_up(root, PYTHON=str(old))
    assert done.returncode == 1
    assert "is Python 3.9.1; Python 3.11, 3.12 or 3.13 is needed" in done.stderr
