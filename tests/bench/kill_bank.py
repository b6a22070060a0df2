"""kill -9 of a loaded experience bank, again and again; the last line is one JSON object.

Usage:  python tests/bench/kill_bank.py [--kills 50] [--seed 0] [--out docs/results/kill_bank.json]

A child process runs the experience manager on one store file under load: episodes are distilled (three operations each, by a scripted
extractor), observed, asked about, merged, evicted, checkpointed, with snapshots and a training buffer. It prints the revision and a
checksum of every state it saw: what is visible counts as acknowledged. At a random moment it is killed; then the file must hold:

- everything acknowledged: the state at every printed revision replays to the printed checksum;
- no half operation: three rows of the log for every distillation, or none; every row with its generation;
- no fault that ``verify`` knows, so that replay equals the tables byte for byte.

The next child goes on with the same file. The value is the number of faults.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import itertools
import json
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

import numpy as np

from crl_jax.experience import bank_json
from crl_jax.experience.bank import BankState
from crl_jax.experience.buffer import TrainingBuffer
from crl_jax.experience.manager import ExperienceManager
from crl_jax.experience.manager_options import ManagerOptions
from crl_jax.experience.merging import MergePolicy
from crl_jax.experience.scann_index import ScannIndex
from crl_jax.experience.store import Store
from crl_jax.experience.verify import verify
from crl_jax.experience.writer import WritePolicy
from crl_jax.records import Completion, Condition, Episode, Finish, SamplingParams, Status, Task, TokenLog, Turn
from crl_jax.telemetry.result import Result, emit

DIM, CLIENTS, CAPACITY = 32, 8, 120
START_S, DEADLINE_S = 60.0, 120.0


class WordEmbedder:
    """Sums of hashed words, so that texts with common words are near each other."""

    dim = DIM
    fingerprint = "words-32"

    def embed(self, texts: list[str]) -> np.ndarray:
        """One row per text."""
        return np.stack([sum(map(_word, text.split()), np.full(DIM, 1e-3, np.float32)) for text in texts])


def _word(word: str) -> np.ndarray:
    digest = hashlib.blake2b(word.encode(), digest_size=8).digest()
    return np.random.default_rng(int.from_bytes(digest, "little")).normal(size=DIM).astype(np.float32)


class Scripted:
    """Three operations for an episode, one merge for entries, some text for a question. The reply follows from the prompt."""

    async def complete(self, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        """After a short while."""
        prompt = "".join(map(chr, prompt_ids))
        rng = random.Random(zlib.crc32(prompt.encode()))
        await asyncio.sleep(rng.random() * 0.01)
        ids = (*map(ord, self._reply(prompt, rng)), 0)
        return Completion(ids, (-0.5,) * len(ids), (1,) * len(ids), (0,) * len(ids), Finish.STOP)

    def _reply(self, prompt: str, rng: random.Random) -> str:
        words = lambda: " ".join(f"w{rng.randrange(400)}" for _ in range(6))  # noqa: E731
        if "<episode>" in prompt or "environment: " in prompt:
            update = {"op": "update", "targets": [1], "experience": words()}
            return json.dumps([{"op": "add", "experience": words()}, {"op": "add", "experience": words()}, update])
        if "<lesson>" in prompt:
            return "<answer>" + words() + "</answer>"
        return json.dumps([{"op": "update", "targets": [1, 2], "experience": words()}])


def manager_on(store: Store) -> ExperienceManager:
    """The manager under test, small enough that everything happens often."""
    embedder = WordEmbedder()
    return ExperienceManager(
        store=store,
        embedder=embedder,
        make_index=lambda: ScannIndex(embedder.dim, tail_min=16),
        sampler=Scripted(),
        render=lambda messages: [ord(c) for m in messages for c in m.content],
        decode=lambda ids: "".join(map(chr, ids)),
        buffer=TrainingBuffer(batch_size=16, capacity=64, max_age_steps=4),
        options=ManagerOptions(
            SamplingParams(64, stop_ids=(0,)),
            write=WritePolicy(capacity=CAPACITY, dedup_cosine=0.97),
            merge=MergePolicy(every_steps=7, redundancy=0.3),
            decay=(0.99, 0.95, 1000),
            snapshots=2,
        ),
    )


def episode(name: str, shown: Sequence[str], success: bool) -> Episode:
    """A finished one-turn episode."""
    return Episode(
        name, name, Condition.GUIDED if shown else Condition.FREE, Task("toy", 1, "find the exit", "room"), TokenLog.empty(),
        (Turn(f"you see {name}", "go", (0, 1)),), "the end", Status.TERMINATED, success, float(success), tuple(shown),
    )  # fmt: skip


async def load(path: pathlib.Path, run: int) -> None:
    """Everything at once, until killed."""
    async with manager_on(Store.open(path)) as manager:
        steps = itertools.count(manager.step + 1)

        async def client(number: int) -> None:
            rng = random.Random(f"{run}/{number}")
            for n in itertools.count():
                shown = [s.id for s in await manager.retrieve("room", f"w{rng.randrange(400)} w{rng.randrange(400)}")]
                played = episode(f"r{run}c{number}n{n}", shown, rng.random() < 0.5)
                await manager.observe([played])
                await manager.submit(played)
                if rng.random() < 0.1:
                    await manager.ask("room", f"w{rng.randrange(400)}", episode_id=played.id)
                if number == 0:
                    manager.on_step(next(steps))
                    if rng.random() < 0.1:
                        await manager.checkpoint()

        async def witness() -> None:
            while True:
                state = manager.state
                print(state.revision, _digest(state), flush=True)
                await asyncio.sleep(0.003)

        await asyncio.gather(witness(), *map(client, range(CLIENTS)))


def _digest(state: BankState) -> int:
    return zlib.crc32(bank_json.to_json(state).encode())


def one_kill(path: pathlib.Path, run: int, rng: random.Random) -> tuple[dict[int, int], float]:
    """Start the load, kill it at a random moment; returns what it acknowledged (revision -> checksum) and the seconds it ran."""
    command = [sys.executable, __file__, "--child", str(path), "--run", str(run)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        first = child.stdout.readline()
        if not first:
            raise RuntimeError(f"the child of run {run} ended by itself with code {child.wait(START_S)}")
        started = time.monotonic()
        time.sleep(rng.uniform(0.02, 1.5))
        child.send_signal(signal.SIGKILL)
        lines = [first, *child.stdout.read().splitlines()[:-1]]  # the last line may be cut
        return {int(r): int(d) for r, d in map(str.split, lines)}, time.monotonic() - started


def faults_of(path: pathlib.Path, acknowledged: dict[int, int]) -> list[str]:
    """What is wrong with the file."""
    store = Store.open(path)
    try:
        faults = list(verify(store).faults)
        newest = max(acknowledged)
        if store.revision < newest:
            return [*faults, f"revision {newest} was acknowledged, the file has {store.revision}"]
        sample = sorted(acknowledged)[-20:]
        faults += [f"revision {r} is not what was seen" for r in sample if _digest(store.at_revision(r)) != acknowledged[r]]
        by_generation: dict[str, int] = {}
        for row in store.log():
            if row["generation_id"] and row["reason"] != "evict":
                by_generation[row["generation_id"]] = by_generation.get(row["generation_id"], 0) + 1
        kinds: dict[str, str] = store.read(lambda db: dict(db.execute("SELECT id, kind FROM generations")))
        faults += [f"{g}: rows of the log without a generation" for g in by_generation if g not in kinds]
        wrong = [g for g, kind in kinds.items() if kind == "distil" and by_generation.get(g, 0) != 3]
        return faults + [f"{g}: {by_generation.get(g, 0)} of 3 operations" for g in wrong]
    finally:
        store.close()


def main() -> int:
    """Kill, look, go on."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--child", type=pathlib.Path, help=argparse.SUPPRESS)
    parser.add_argument("--run", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child is not None:
        asyncio.run(load(args.child, args.run))
        return 0
    rng, faults, seen, ran_s = random.Random(args.seed), [], 0, 0.0
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "bank.sqlite"
        for kill in range(args.kills):
            acknowledged, took_s = one_kill(path, kill, rng)
            found = faults_of(path, acknowledged)
            seen, ran_s = seen + len(acknowledged), ran_s + took_s
            faults += [f"kill {kill}: {fault}" for fault in found]
            print(f"kill {kill}: {len(acknowledged)} states acknowledged, revision {max(acknowledged)}, {len(found)} faults", flush=True)
        store = Store.open(path)
        verdict = verify(store)
        store.close()
    details: dict[str, Any] = {
        "kills": args.kills,
        "states_acknowledged": seen,
        "seconds_under_load": round(ran_s, 1),
        "revision": verdict.revision,
        "operations": verdict.operations,
        "generations": verdict.generations,
        "faults": faults[:20],
    }
    emit(Result("kill_bank.faults", len(faults), "faults", "0", not faults, details=details), args.out)
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
