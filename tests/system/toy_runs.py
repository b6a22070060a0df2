"""Whole runs in this process whose models and environments are toys: everything between them is real, and a run takes a moment.

``Faults.at[place]`` is called at a place of a part and may delay, raise or hang. Places: ``actor.sample``, ``extractor.sample``
(coroutines, as samplers are), ``extractor.update``, ``embed``.
"""

import asyncio
import contextlib
import itertools
import json
import os
import pathlib
import sys
import threading
import time
import types

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "experience"))  # its toys

from experience_toys import HashEmbedder  # noqa: E402
from manager_toys import build as made_manager  # noqa: E402
from manager_toys import teach  # noqa: E402

from crl_jax import build  # noqa: E402
from crl_jax.config.load import load  # noqa: E402
from crl_jax.records import Completion, Finish, Sum  # noqa: E402
from crl_jax.rollout.pool import PoolStats  # noqa: E402
from crl_jax.serving.publisher import Published  # noqa: E402
from crl_jax.train import train  # noqa: E402
from envs.api import Observation, Step  # noqa: E402
from envs.guard import descendants  # noqa: E402

__all__ = ["made_manager", "teach"]
SHORT_S = 2.0  # the deadlines of a run that is to miss one
SETTINGS = (
    "run.sync=false", "run.steps=8", "run.eval_episodes=1", "run.save_every=0", "run.compile_cache=", "run.collect_timeout_s=60",
    "telemetry.tensorboard=false", "env.call_timeout_s=10", "bank.merge_every=2", "bank.warmup_steps=0", "bank.min_similarity=-1",
    "extractor.batch_size=2", "ask.timeout_s=1",
)  # fmt: skip


async def nothing():
    """What happens at a place without a fault."""


class Faults:
    """``until_s``: the longest that `hang` hangs, so that a test that fails ends."""

    def __init__(self):
        self.at, self.calls = {}, {}
        self._over = threading.Event()

    def reach(self, place):
        self.calls[place] = self.calls.get(place, 0) + 1
        return self.at.get(place, lambda: None)()

    async def areach(self, place):
        self.calls[place] = self.calls.get(place, 0) + 1
        await self.at.get(place, nothing)()

    def hang(self):
        self._over.wait(60)

    @staticmethod
    async def ahang():
        await asyncio.sleep(60)

    def release(self):
        self._over.set()


def raising(error):
    """A fault of a place that is called."""

    def fault(*_, **__):
        raise error

    return fault


def araising(error):
    """The same of a coroutine."""

    async def fault(*_, **__):
        raise error

    return fault


class ToySampler:
    """Says one thing in a role's own tokens."""

    def __init__(self, name, codec, faults, max_length):
        self.name, self.faults, self.version, self.max_length = name, faults, 0, max_length
        said = "north" if name == "actor" else json.dumps([{"op": "add", "experience": "in the gilded cavern the stairs are north west"}])
        self.ids = (*codec.encode(said), codec.stop_ids[0])
        self.vocab_size = codec.tokenizer.vocab_size
        self.names = itertools.count()

    async def open(self):
        return f"s{next(self.names)}"

    async def generate(self, session, new_ids, params):
        await self.faults.areach(f"{self.name}.sample")
        n = len(self.ids)
        return Completion(self.ids, (-0.5,) * n, (self.version,) * n, (0,) * n, Finish.STOP)

    async def complete(self, prompt_ids, params):
        return await self.generate("", prompt_ids, params)

    async def close(self, session):
        pass

    def publish(self, params, version):
        self.version = version

    def stats(self):
        return {}

    async def aclose(self):
        pass


class ToyRole:
    """A role whose update adds one to its only weight."""

    base = None

    def __init__(self, name, *, sampler, model_config, **_):
        self.name, self.sampler, self.model_config, self.version = name, sampler, model_config, 0
        self.state, self.published = {"w": np.zeros(2, np.float32)}, Published(0, 0, {}, "")

    def update(self, samples):
        self.sampler.faults.reach(f"{self.name}.update")
        self.state = {"w": self.state["w"] + 1}
        return {"loss": Sum(1.0, 1.0)}

    def publish(self):
        self.version += 1
        self.sampler.publish(None, self.version)

    def restore(self, state, version):
        self.state, self.version = state, version


class ToyPool:
    """Environments of this process: three turns, then success."""

    def __init__(self, *_, **__):
        pass

    async def __aenter__(self):
        return self

    async def lease(self, env, options=None):
        left = itertools.count(1)

        async def reset(seed, task=""):
            return Observation(" south west 1 7", ("north",))

        async def step(text):
            ended = next(left) >= 3
            return Step(" north west 1 2", float(ended), ended, False, ended, True, {})

        return types.SimpleNamespace(reset=reset, step=step, release=nothing)

    def stats(self):
        return PoolStats()

    async def close(self):
        pass


class SlowEmbedder(HashEmbedder):
    """One in which a fault may be."""

    faults: Faults

    def embed(self, texts):
        self.faults.reach("embed")
        return super().embed(texts)


def toys(monkeypatch, faults, *, pool=ToyPool):
    """From now on runs are built of toys; ``pool`` None leaves the environments real."""
    embedder = type("Embedder", (SlowEmbedder,), {"faults": faults})
    monkeypatch.setattr(build, "MiniLM", embedder)
    monkeypatch.setattr(build, "Role", ToyRole)
    sampler = lambda name, role, parts, *_, **__: (ToySampler(name, parts.codec, faults, role.max_length), None)  # noqa: E731
    monkeypatch.setattr(build, "open_sampler", sampler)
    if pool is not None:
        monkeypatch.setattr(build, "Pools", pool)


def config_of(folder, *overrides):
    return load(ROOT / "configs" / "smoke.yaml", [f"run.dir={folder}", *SETTINGS, *overrides])


def run(folder, *overrides):
    """The rows of a run's metrics, by step."""
    train(config_of(folder, *overrides), out=lambda text: None)
    return rows(folder)


def rows(folder):
    found = map(json.loads, (folder / "smoke" / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: row for row in found if row["kind"] == "metrics" and "env_steps" in row}


@contextlib.contextmanager
def nothing_left(within_s=10.0):
    """What begins inside has ended afterwards: no process, and no thread that would keep this process from ending."""
    processes, threads = set(descendants(os.getpid())), set(threading.enumerate())
    yield
    end = time.monotonic() + within_s
    while (left := _left(processes, threads)) and time.monotonic() < end:
        time.sleep(0.02)
    assert not left, left


def _left(processes, threads):
    found = [p for p in descendants(os.getpid()) if p not in processes]
    return found + [t for t in threading.enumerate() if t not in threads and not t.daemon]
