"""A bank's server over toy parts on a free port, in this process or in one of its own."""

import asyncio
import contextlib
import os
import pathlib
import subprocess
import sys

import pytest

pytest.importorskip("grpc_health", reason="the bank's service needs its packages: pip install -e '.[bank]'")
pytest.importorskip("grpc_reflection", reason="the bank's service needs its packages: pip install -e '.[bank]'")

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "experience"))  # its toys

from experience_toys import HashEmbedder, ScriptedSampler, decode, episode, render  # noqa: E402
from manager_toys import echo  # noqa: E402

from crl_jax.bank_service.client import RemoteBank  # noqa: E402
from crl_jax.bank_service.durable import DurableManager  # noqa: E402
from crl_jax.bank_service.edge import Retry  # noqa: E402
from crl_jax.bank_service.limits import Limits  # noqa: E402
from crl_jax.bank_service.server import BankServer  # noqa: E402
from crl_jax.bank_service.service import BankService  # noqa: E402
from crl_jax.experience.buffer import TrainingBuffer  # noqa: E402
from crl_jax.experience.index import ExactIndex  # noqa: E402
from crl_jax.experience.manager_options import ManagerOptions  # noqa: E402
from crl_jax.experience.merging import MergePolicy  # noqa: E402
from crl_jax.experience.retrieve import Diversity  # noqa: E402
from crl_jax.experience.store import Store  # noqa: E402
from crl_jax.experience.writer import WritePolicy  # noqa: E402
from crl_jax.records import BankOp, OpKind, SamplingParams  # noqa: E402

__all__ = ["episode"]
QUICK = Retry(attempts=8, first_wait_s=0.02, longest_wait_s=0.2, attempt_s=5.0)


def run(story):
    return asyncio.run(asyncio.wait_for(story, 60))


def add(*texts):
    return [BankOp(OpKind.ADD, text) for text in texts]


def manager_on(store, *, reply=echo, delay=lambda prompt: 0.0, embedder=None, learns=True, batch_size=2, **options):
    embedder = embedder or HashEmbedder()
    settings = {"merge": MergePolicy(0), "diversity": Diversity(recent_steps=0), "write": WritePolicy(dedup_cosine=2.0), **options}
    return DurableManager(
        store=store,
        learns=learns,
        embedder=embedder,
        make_index=lambda: ExactIndex(embedder.dim),
        sampler=ScriptedSampler(reply, delay),
        render=render,
        decode=decode,
        buffer=TrainingBuffer(batch_size=batch_size, capacity=64),
        options=ManagerOptions(SamplingParams(64, stop_ids=(0,)), **settings),
    )


@contextlib.asynccontextmanager
async def serving(path=":memory:", *, token="", tls=None, limits=None, host="127.0.0.1", port=0, log=None, keep=False, **parts):
    """Yields the url, the manager and the server; ``keep`` leaves the store open for a look."""
    store = Store.open(path)
    server = BankServer(host, port, token=token, tls=tls, limits=limits or Limits(call_timeout_s=20.0))
    manager = manager_on(store, **parts)
    await manager.start()
    server.gate = await server.start(BankService(manager, store, server.limits), *([log] if log else []))
    try:
        yield f"{'grpcs' if tls else 'grpc'}://127.0.0.1:{server.port}", manager, server
    finally:
        await server.stop(0.2)
        await manager.aclose(5.0)
        if not keep:
            store.close()


def remote(url, **options):
    return RemoteBank(url, **{"retry": QUICK, "timeout_s": 10.0, **options})


def start_process(path, port, *arguments):
    """A server process, when it is ready."""
    command = [sys.executable, str(pathlib.Path(__file__).with_name("serve_toy.py")), str(path), str(port), *arguments]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    line = process.stdout.readline()
    if not line.startswith("ready "):
        process.kill()
        raise RuntimeError(line + process.communicate(timeout=10)[0])
    return process, int(line.split()[1])
