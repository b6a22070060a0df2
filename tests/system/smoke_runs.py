"""Starting the smoke recipe in a process of its own."""

import os
import pathlib
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
CACHE = ROOT / ".cache" / "jax-tests-run"
DEADLINE_S = 600


def command(folder, *overrides):
    settings = [f"run.dir={folder}", f"run.compile_cache={CACHE}", "telemetry.tensorboard=false", *overrides]
    return [sys.executable, "-m", "crl_jax.cli", "train", str(ROOT / "configs" / "smoke.yaml"), *settings]


def environment():
    kept = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    return kept | {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}  # most of a short run is compiling


def start(args, log):
    return subprocess.Popen(args, stdout=log.open("w"), stderr=subprocess.STDOUT, env=environment(), start_new_session=True)


def children_of_session(session, wait_s=0.0):
    """Processes of the session; with ``wait_s`` those that are left after waiting so long for all to end."""
    end = time.monotonic() + wait_s
    while (found := _children(session)) and time.monotonic() < end:
        time.sleep(0.05)
    return found


def _children(session):
    found = []
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found
