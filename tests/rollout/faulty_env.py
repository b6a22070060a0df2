"""A small environment that fails on demand, for the tests of the pool. Its worker process imports this module."""

import os
import pathlib
import subprocess
import sys
import time

from envs.api import EnvUnavailable, Observation, Step


class FaultyEnv:
    """Echoes what it was told since the reset; some words make it fail."""

    def __init__(self, tag="", boxed=None):
        self.tag, self.boxed, self.seed, self.told = tag, boxed or [], None, []
        self.held = []

    def reset(self, seed, task=""):
        self.seed, self.told = seed, []
        return Observation(f"{self.tag}{self.boxed}:{seed}", ("say",))

    def step(self, text):
        match text.split():
            case ["index"]:
                return [][1]
            case ["shout", words]:
                raise ValueError(words)
            case ["hang", seconds]:
                time.sleep(float(seconds))
            case ["crash"]:
                os._exit(3)
            case ["jax"]:
                text = str("jax" in sys.modules)
            case ["pid"]:
                text = str(os.getpid())
            case ["child"]:  # in a session of its own, as sandboxes are
                text = str(subprocess.Popen(["sleep", "1000"], start_new_session=True).pid)
            case ["grow", mib]:
                self.held.append(bytearray(os.urandom(1)) * (int(mib) << 20))
            case ["swell"]:
                while True:
                    self.held.append(bytearray(os.urandom(1)) * (1 << 20))
            case ["power"]:  # one C call that never gives way to other threads
                text = str((10**10**8) % 7)
            case ["unsendable"]:
                return Step(text, 0.0, False, False, False, True, {"file": sys.stderr})
        self.told.append(text)
        return Step(f"{self.seed}:{','.join(self.told)}", 0.0, False, False, False, True, {})

    def close(self):
        pass


class Unclosable(FaultyEnv):
    def close(self):
        raise OSError("still in use")


class Slow(FaultyEnv):
    """Waits for other processes. The task is a file for the id of a process whose start never ends."""

    slow = True

    def reset(self, seed, task=""):
        if task:
            stuck = subprocess.Popen(["sleep", "1000"])
            pathlib.Path(task).write_text(str(stuck.pid))
            stuck.wait()
        return super().reset(seed)


def make(name, **options):
    """``unavailable`` and ``broken`` cannot be made; any other name can. ``unclosable`` cannot be closed; the calls of ``slow`` wait."""
    if name == "unavailable":
        raise EnvUnavailable("faulty: pip install nothing")
    if name == "broken":
        raise ValueError("no such level")
    return {"unclosable": Unclosable, "slow": Slow}.get(name, FaultyEnv)(**options)
