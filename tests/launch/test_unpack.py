"""Putting the code in place on a host of a pod: a new version replaces the old one, runs and environment stay."""

import os
import pathlib
import subprocess
import tarfile

UNPACK = pathlib.Path(__file__).resolve().parents[2] / "launch" / "tpu_vm" / "unpack.sh"


def archive(home: pathlib.Path, *files: str) -> None:
    source = home / "source"
    scripts = {"launch/setup.sh": 'mkdir -p .venv; echo "set up with $PYTHON"', "launch/tpu_packages.sh": 'echo "packages into $1"'}
    with tarfile.open(home / "code.tar.gz", "w:gz") as tar:
        for name in (*files, *scripts):
            path = source / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(scripts.get(name, name))
            tar.add(path, arcname=name)


def test_new_code_replaces_the_old_and_runs_stay(tmp_path: pathlib.Path) -> None:
    python = tmp_path / "bin" / "python3.12"
    python.parent.mkdir()
    python.write_text("#!/bin/sh\n")
    python.chmod(0o755)
    environment = {**os.environ, "PATH": f"{python.parent}:{os.environ['PATH']}", "HOME": str(tmp_path)}
    for file in ("old.py", "new.py"):
        archive(tmp_path, file)
        words = ["bash", str(UNPACK), "code.tar.gz", "crl_jax"]
        done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines() == ["set up with python3.12", "packages into .venv", "unpack: crl_jax is ready"]
        (tmp_path / "crl_jax" / "runs" / "first").mkdir(parents=True, exist_ok=True)
    assert sorted(path.name for path in (tmp_path / "crl_jax").iterdir()) == [".venv", "launch", "new.py", "runs"]
    assert (tmp_path / "crl_jax" / "runs" / "first").is_dir()
    assert not (tmp_path / "crl_jax.new").exists()
