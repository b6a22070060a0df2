"""Starting the smoke recipe in a process of its own."""

import os
import pathlib
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
CACHE = ROOT / ".cache" / "jax-tests-run"
DEADLINE_S = 600
ASKING = """
import asyncio, os
import crl_jax.rollout.agent as a
answer, wanted, finish = a._Play._answer, a._Play._ask_query, a._Play.finish
def asked(self, reply):
    return self.plan.task.goal if self.ask is not None and self.plan.ask_uses and not self.turns else wanted(self, reply)
async def late(self, query):
    await asyncio.sleep(os.urandom(1)[0] / 2000)
    return await answer(self, query)
def luck(self, status, *, success, reward, final):
    won = int(self.log.ids.sum()) % 2 == 1
    return finish(self, status, success=won, reward=float(won), final=final)
a._Play._ask_query, a._Play._answer, a._Play.finish = asked, late, luck
"""  # the micro actor asks nothing and never wins in four turns, so nothing would be learned: here guided episodes ask first and are
# answered in any order, and the sampled tokens say who wins


def command(folder, *overrides):
    settings = [f"run.dir={folder}", f"run.compile_cache={CACHE}", "telemetry.tensorboard=false", *overrides]
    return [sys.executable, "-m", "crl_jax.cli", "train", str(ROOT / "configs" / "smoke.yaml"), *settings]


def changed(change, folder, *more):
    """The command of a run in which the statements of ``change`` are made first."""
    program = f"{change}\nimport sys\nfrom crl_jax.cli import main\nsys.exit(main({[*command(folder)[3:], *more]!r}))\n"
    return [sys.executable, "-c", program]


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
