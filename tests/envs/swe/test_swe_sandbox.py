"""What the sandbox shows and bounds, and that nothing runs without it."""

import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from envs.api import EnvError, EnvUnavailable
from envs.swe import sandbox as module
from envs.swe.bounds import Limits, tree_excess, tree_size
from envs.swe.layout import narrow
from envs.swe.sandbox import Sandbox, find_backend

ROOT = Path(__file__).parents[3]


def test_a_command_and_what_it_says(shell):
    done = shell("echo out; echo err >&2; exit 3")
    assert (done.output, done.code, done.stopped) == (b"out\nerr\n", 3, "")


def test_nothing_of_the_host_is_seen(shell, monkeypatch):
    monkeypatch.setenv("SECRET", "swordfish")
    done = shell(
        "env; cat /proc/*/environ | tr '\\0' '\\n'; ls /proc | grep -c '^[0-9]'; ls -A / /root /home /etc /tmp 2>&1; hostname; cat"
    )
    text = done.output.decode(errors="replace")
    assert "SECRET" not in text
    assert "swordfish" not in text
    assert "passwd" not in text
    assert str(ROOT) not in text
    assert "sandbox\n" in text
    assert int(next(line for line in text.splitlines() if line.isdigit())) < 12


def test_only_the_tree_and_scratch_folders_are_writable(shell, tree):
    done = shell("find / -maxdepth 3 -writable -not -type l -not -path '/proc/*' 2>/dev/null; echo x > made")
    devices = {f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom", "tty", "pts", "pts/ptmx")}
    assert set(done.output.decode().split()) <= {"/testbed", "/tmp", "/dev/shm"} | devices
    assert (tree / "made").read_text() == "x\n"


@pytest.mark.parametrize("target", ["/usr/x", "/x", "/proc/sys/kernel/domainname", "/proc/sysrq-trigger", "/dev/x", "/opt/swe/bin/x"])
def test_Z06_writing_outside_fails(best, tree, target):
    done = best.run(["/usr/bin/bash", "-c", f": >> {target}"], Limits(), cwd="/")
    assert done.code != 0


def test_no_capability_and_no_way_to_one(shell):
    done = shell("grep -E '^Cap(Eff|Prm|Bnd)|^NoNewPrivs' /proc/self/status; unshare -Ur true || echo no; mount -t tmpfs x /tmp || echo no")
    assert done.output.decode().count("0000000000000000") == 3
    assert "NoNewPrivs:\t1" in done.output.decode()
    assert done.output.decode().count("\nno\n") == 2


def test_no_way_to_a_listener_on_the_host(shell):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        listener.settimeout(0.2)
        done = shell(f"exec 3<>/dev/tcp/127.0.0.1/{port} && echo reached; cat /proc/net/dev | wc -l")
        assert b"reached" not in done.output
        with pytest.raises(TimeoutError):
            listener.accept()


def test_test_runner_but_no_sources_of_mutated_packages(best_shell):
    names = "pip idna packaging msgpack tomli tomllib resolvelib"
    lines = "".join(f"python -c 'import {name}; print({name}.__file__.split()[0])' 2>/dev/null;" for name in names.split())
    done = best_shell(f"{lines} python -m pytest --version && pytest --version; ls -A /usr/local /usr/share")
    assert [
        line for line in done.output.decode().splitlines() if not line.startswith(("pytest ", "/usr/local:", "/usr/share:")) and line
    ] == []
    assert done.output.decode().count("pytest ") == 2


def test_N13_deadlines_from_threads_without_signals_or_zombies(best, tree):
    results = []

    def run():
        results.append(best.run(["/usr/bin/sleep", "600.25"], Limits(wall_s=0.5), cwd="/"))

    began = time.monotonic()
    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(15.0)
    assert [done.stopped for done in results] == ["time"] * 4
    assert time.monotonic() - began < 10.0
    assert not processes_with("600.25")
    assert best.run(["/usr/bin/true"], Limits(), cwd="/").code == 0


def test_daemons_end_with_their_command(shell):
    done = shell("setsid sleep 601.25 & (sleep 602.25 &) & nohup sleep 603.25 >/dev/null 2>&1 & echo started")
    assert (done.output, done.code) == (b"started\n", 0)
    deadline = time.monotonic() + 5.0
    while processes_with("601.25", "602.25", "603.25") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not processes_with("601.25", "602.25", "603.25")


def test_too_many_processes_are_ended(shell):
    began = time.monotonic()
    done = shell("for i in $(seq 300); do sleep 604.25 & done 2>/dev/null; wait", processes=40, wall_s=15.0)
    assert done.stopped == "processes"
    assert time.monotonic() - began < 12.0
    wait_until(lambda: not processes_with("604.25"))


def test_one_process_gets_no_more_address_space(best, tree):
    done = best.run([best.layout.python, "-c", "x = bytearray(3 << 30)"], Limits(address_mib=512), cwd="/")
    assert b"MemoryError" in done.output


def test_many_processes_get_no_more_memory(shell):
    hog = "python -c 'import time; x = bytearray(60 << 20); time.sleep(20)'"
    done = shell(f"{hog} & {hog} & {hog} & wait", memory_mib=120)
    assert done.stopped == "memory"


def test_a_filled_disk_is_noticed_and_may_be_tidied(shell, tree):
    done = shell("for i in $(seq 400); do head -c 1000000 /dev/zero > f$i; sleep 0.005; done; sleep 30", tree_mib=8)
    assert done.stopped == "disk"
    assert tree_size(tree, 10_000)[0] < 400_000_000
    done = shell("head -c 30000000 /dev/zero > large; rm -f f*", file_mib=1)
    assert tree_size(tree, 10_000)[0] <= 1 << 20


def test_many_files_and_deep_folders_count(tree):
    for i in range(30):
        (tree / str(i)).touch()
    assert tree_excess(tree, Limits(tree_files=20))
    assert not tree_excess(tree, Limits(tree_files=20), allowed=(0, 40))
    assert not tree_excess(tree, Limits())


def test_long_output_is_cut_in_the_middle(best):
    done = best.run(["/usr/bin/bash", "-c", "echo first; head -c 5000000 /dev/zero; echo last"], Limits(head=100, tail=100), cwd="/")
    assert done.output.startswith(b"first\n")
    assert done.output.endswith(b"last\n")
    assert done.dropped == 5_000_011 - 200
    assert len(done.output) < 300


def test_Z04_without_a_tool_nothing_is_run(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: pytest.fail("a process was started"))
    with pytest.raises(EnvUnavailable, match="apt-get install bubblewrap"):
        find_backend()


def test_Z04_with_tools_that_do_not_work_nothing_else_is_run(monkeypatch, tmp_path):
    for name in ("bwrap", "unshare"):
        (tmp_path / name).write_text("#!/bin/sh\necho not permitted; exit 1\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    started = []
    popen = subprocess.Popen
    monkeypatch.setattr(
        subprocess, "Popen", lambda argv, **k: started.append(next(word for word in argv if str(tmp_path) in word)) or popen(argv, **k)
    )
    with pytest.raises(EnvUnavailable, match=r"bwrap: .*not permitted.*userns: .*not permitted.*apt-get install bubblewrap"):
        find_backend()
    assert started == [str(tmp_path / "bwrap"), str(tmp_path / "unshare")]


def test_N12_a_sandbox_that_does_not_start_is_an_error_of_the_environment(best, monkeypatch):
    broken = Sandbox(narrow())
    monkeypatch.setattr(broken, "_program", "/bin/false")
    with pytest.raises(EnvError, match="did not start"):
        broken.run(["true"], Limits())
    monkeypatch.setattr(broken, "_program", "/no/such/program")
    with pytest.raises(EnvError, match=r"could not be started|did not start"):
        broken.run(["true"], Limits())


def test_nothing_is_left_when_the_worker_is_killed(sandbox):
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n" + (
        "from envs.swe import sandbox as s\nfrom envs.swe.bounds import Limits\nfrom envs.swe.layout import narrow\n"
        f"s.Sandbox(narrow(), {sandbox.backend!r}).run(['/usr/bin/sleep', '605.25'], Limits(wall_s=100.0), cwd='/')"
    )
    worker = subprocess.Popen([sys.executable, "-c", code])
    wait_until(lambda: processes_with("605.25"))
    worker.kill()
    worker.wait(10)
    wait_until(lambda: not processes_with("605.25"))


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
def test_works_for_a_user_without_rights(tmp_path):
    python, path = "/usr/bin/python3", f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"

    def as_nobody(code, *arguments):
        nobody = {"user": 65534, "group": 65534, "extra_groups": [], "env": {"PATH": "/usr/bin:/bin"}}
        return subprocess.run([python, "-c", path + code, *arguments], capture_output=True, text=True, cwd="/", timeout=60, **nobody)

    if not os.path.exists(python) or as_nobody("import envs.swe.sandbox").returncode:
        pytest.skip("no interpreter that another user may start, or this checkout is closed to it")
    ways = [way for way, program in module._PROGRAMS if (found := shutil.which(program)) and not module._probe(way, found)]
    done = as_nobody("from envs.swe.sandbox import find_backend\nprint(*(find_backend(way)[0] for way in sys.argv[1:]))", *ways)
    assert done.stdout.split() == ways, done.stderr


def processes_with(*words):
    """Processes of this machine whose command line holds one of ``words`` as an argument."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            arguments = Path("/proc", pid, "cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        found += [arguments] if arguments[0].endswith("sleep") and set(words) & set(arguments[1:]) else []
    return found


def wait_until(true, within_s=20.0):
    deadline = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)
