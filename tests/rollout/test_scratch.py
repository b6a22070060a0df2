"""Who may remove whose temporary folders."""

import os
import socket
import subprocess
import sys
import tempfile

import pytest

from crl_jax.rollout import scratch


@pytest.fixture
def dead_pid():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_only_folders_of_dead_processes_of_this_host_go(tmp_path, dead_pid):
    host = socket.gethostname()
    (tmp_path / f"crl-envs-{host}-{dead_pid}-abc_d1" / "deep").mkdir(parents=True)
    keep = [
        f"crl-envs-{host}-{os.getpid()}-abc_d1",  # lives
        f"crl-envs-{host}-1-abc_d1",  # lives, and may be another user's
        f"crl-envs-other{host}-{dead_pid}-abc_d1",  # another host's: nothing is known of its processes
        "crl-envs-abc_d1",
        f"other-{host}-{dead_pid}-abc_d1",
    ]
    for name in keep:
        (tmp_path / name).mkdir()
    target = tmp_path / "target"
    target.mkdir()
    link = tmp_path / f"crl-envs-{host}-{dead_pid}-link"
    link.symlink_to(target)
    assert scratch.sweep(str(tmp_path)) == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([*keep, "target", link.name])


def test_a_new_folder_is_this_process_s_own_and_a_sweep_spares_it(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = scratch.make()
    assert os.path.dirname(folder) == str(tmp_path)
    assert scratch.sweep() == 0
    assert os.path.isdir(folder)
