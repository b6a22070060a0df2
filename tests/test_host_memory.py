"""Freed memory stays with the process: in a process of its own, because the settings last."""

import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys
from crl_jax.host_memory import keep_freed_memory
kept = keep_freed_memory() if sys.argv[1] == "keep" else False
def touch():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = bytearray(64 * 2**20)
    del block
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
touch()
print(kept, touch())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc only")
def test_pages_of_a_freed_block_serve_the_next_one():
    runs = [
        subprocess.run([sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, check=True, timeout=60)
        for how in ("keep", "no")
    ]
    (kept, faults), (_, usual) = (run.stdout.split() for run in runs)
    if kept != "True":
        pytest.skip("the C library has no mallopt")
    assert int(faults) < 100 < int(usual)
