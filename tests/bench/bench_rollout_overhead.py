"""What the experience bank costs a rollout; the last line is one JSON object.

Usage:  python tests/bench/bench_rollout_overhead.py [--blocks 6] [--reply-ms 1000] [--entries 20000] [--out FILE.json]

The same episodes are collected with and without experience, in blocks that take turns (ABBA...). Real: the collector, the environments
(NetHack dungeons in a worker process), the tokenizer, the manager with its store on disk, MiniLM embeddings, a ScaNN index of 20,000
entries, Eq. 6, distillation and adaptive merging in the background while the next batch is collected. Stubbed: both models; every reply
of the actor takes the same time and says what its seed says, so both sides play the same actions whatever the prompt holds (search-and-ask
is off: a question would add a turn). With experience a batch includes retrieval and handing its episodes over (usage, credit, distillation
queue); what the extractor makes of them overlaps with the next batches, as in training. The first batch of a block is not counted.

A reply takes one second, assumed for a large actor that plays 128 episodes at once; ``--reply-ms`` changes it, and the milliseconds that a
batch takes longer are reported beside the share.

The value is time with experience over time without, minus one.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import pathlib
import random
import statistics
import sys
import tempfile
import time
import zlib
from collections.abc import Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

import numpy as np

from crl_jax import lookup
from crl_jax.config.load import load
from crl_jax.config.schema import Config
from crl_jax.experience.bank import Author
from crl_jax.experience.buffer import TrainingBuffer
from crl_jax.experience.manager import ExperienceManager
from crl_jax.experience.manager_options import ManagerOptions
from crl_jax.experience.merging import MergePolicy
from crl_jax.experience.retrieve import Diversity
from crl_jax.experience.scann_index import ScannIndex
from crl_jax.experience.store import Store
from crl_jax.experience.writer import WritePolicy, Writer
from crl_jax.models.codec import ChatCodec
from crl_jax.models.embedder import MiniLM
from crl_jax.models.load import load_codec
from crl_jax.records import BankOp, Completion, Episode, Finish, OpKind, SamplingParams
from crl_jax.rollout.bank import ManagedBank
from crl_jax.rollout.collector import Collector, CollectSettings
from crl_jax.rollout.pool import EnvPool
from crl_jax.rollout.tasks import TaskStream
from crl_jax.telemetry.result import Result, emit
from envs import registry

ROOT = pathlib.Path(__file__).resolve().parents[2]
GROUPS, GROUP_SIZE, BATCHES = 16, 8, 5
FILLER = "filler "  # texts that stand for what a long run has left in the bank; their vectors are random
GOAL = 0.02


class ConstantSampler:
    """Every reply takes ``reply_s``; which action it is follows from the request's seed."""

    version, max_length = 0, 4096

    def __init__(self, codec: ChatCodec, actions: Sequence[str], reply_s: float) -> None:
        self._replies = [(*codec.encode(action), codec.stop_ids[0]) for action in actions]
        self._reply_s = reply_s

    async def open(self) -> str:
        """A session."""
        return ""

    async def generate(self, session: str, new_ids: Sequence[int], params: SamplingParams) -> Completion:
        """One action."""
        await asyncio.sleep(self._reply_s)
        ids = random.Random(params.seed).choice(self._replies)
        return Completion(ids, (-1.0,) * len(ids), (0,) * len(ids), (0,) * len(ids), Finish.STOP)

    async def close(self, session: str) -> None:
        """Nothing to free."""


class ConstantExtractor:
    """A lesson about the goal of every episode, after ``reply_s``."""

    def __init__(self, reply_s: float) -> None:
        self._reply_s = reply_s

    async def complete(self, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        """One response."""
        await asyncio.sleep(self._reply_s)
        rng = random.Random(zlib.crc32(bytes(i & 255 for i in prompt_ids)))
        room, way = rng.choice(["amber", "ivory", "cobalt", "quiet"]), rng.choice(["west", "east"])
        lesson = f"in {room} rooms number {rng.randrange(10**6)} go {way} first"
        ids = (*map(ord, json.dumps([{"op": "add", "experience": lesson}])), 0)
        return Completion(ids, (-1.0,) * len(ids), (0,) * len(ids), (0,) * len(ids), Finish.STOP)


class FilledEmbedder(MiniLM):
    """MiniLM, except that filler texts have random vectors."""

    def embed(self, texts: list[str]) -> np.ndarray:
        """One row per text."""
        if texts and all(text.startswith(FILLER) for text in texts):
            return np.stack([np.random.default_rng(zlib.crc32(text.encode())).normal(size=self.dim) for text in texts]).astype(np.float32)
        return super().embed(texts)


def fill(store: Store, embedder: FilledEmbedder, entries: int, namespace: str) -> None:
    """So many entries, written as any other."""
    writer = Writer(store, embedder, lambda: ScannIndex(embedder.dim), WritePolicy(capacity=2 * entries, dedup_cosine=2.0))
    for start in range(0, entries, 1000):
        ops = [BankOp(OpKind.ADD, f"{FILLER}{n}") for n in range(start, min(entries, start + 1000))]
        writer.write(ops, namespace=namespace, author=Author("", 0, 0))
    writer.index.close()


def manager_of(store: Store, embedder: FilledEmbedder, reply_s: float, entries: int) -> ExperienceManager:
    """The manager as a run has it, with a stubbed extractor."""
    return ExperienceManager(
        store=store,
        embedder=embedder,
        make_index=lambda: ScannIndex(embedder.dim),
        sampler=ConstantExtractor(reply_s),
        render=lambda messages: [ord(c) for m in messages for c in m.content],
        decode=lambda ids: "".join(map(chr, ids)),
        buffer=TrainingBuffer(batch_size=64, capacity=256, max_age_steps=8),
        options=ManagerOptions(
            SamplingParams(64, stop_ids=(0,)),
            diversity=Diversity(),
            write=WritePolicy(capacity=2 * entries, dedup_cosine=0.95),
            merge=MergePolicy(every_steps=0, redundancy=0.2),
            queue_size=4 * GROUPS * GROUP_SIZE,
            distil_concurrency=64,
        ),
    )


class Side:
    """One of the two ways to collect."""

    def __init__(self, collector: Collector, stream: TaskStream, manager: ExperienceManager | None) -> None:
        self._collector, self._stream, self._manager = collector, stream, manager
        self.batches_s: list[float] = []
        self.step = 0
        self.played: list[tuple[int, bool]] = []  # turns and success of every episode

    async def block(self, *, count: bool) -> None:
        """A few batches; the first of them is not counted."""
        for n in range(BATCHES):
            self.step += 1
            started = time.perf_counter()
            episodes = await self._batch()
            took = time.perf_counter() - started
            if n and count:
                self.batches_s.append(took)
            self.played += [(len(e.turns), e.success) for e in episodes]
        if self._manager is not None:
            await self._manager.drain(300.0)

    async def _batch(self) -> list[Episode]:
        tasks = self._stream.tasks(self.step * GROUPS, GROUPS)
        groups = await self._collector.groups(tasks, batch_id=f"s{self.step}")
        episodes = [episode for group in groups for episode in group.episodes]
        if self._manager is not None:
            self._manager.on_step(self.step)
            await self._manager.observe(episodes)
            for episode in episodes:
                await self._manager.submit(episode)
        return episodes


async def measure(config: Config, args: argparse.Namespace, folder: pathlib.Path) -> dict[str, Any]:
    """Both sides, block by block."""
    tasks = lookup.run_tasks(config)
    goals = tasks.stream.goals
    codec = load_codec(config.actor.tokenizer)
    actions = list(dict.fromkeys(a for goal in goals for a in registry.spec(goal.env).actions))
    sampler = ConstantSampler(codec, actions, args.reply_ms / 1000)
    embedder, store = FilledEmbedder(), Store.open(folder / "bank.sqlite")
    fill(store, embedder, args.entries, goals[0].namespace)
    settings = CollectSettings(
        group_size=GROUP_SIZE,
        guided=GROUP_SIZE // 2,
        sampling=SamplingParams(12, stop_ids=codec.stop_ids, seed=1),
        ask_uses=0,
        envs=tasks.envs,
    )
    prompts = lookup.actor_prompts(config.actor.prompt)
    async with contextlib.AsyncExitStack() as stack:
        pool = await stack.enter_async_context(EnvPool(workers=1, call_timeout_s=60.0))
        manager = await stack.enter_async_context(manager_of(store, embedder, args.reply_ms / 1000, args.entries))
        stream = TaskStream(goals, 0)
        plain = Side(Collector(pool, sampler, codec, prompts, None, settings), stream, None)
        guided = Side(Collector(pool, sampler, codec, prompts, ManagedBank(manager), settings), stream, manager)
        await plain.block(count=False)
        await guided.block(count=False)
        for n in range(args.blocks):
            for side in (plain, guided) if n % 2 == 0 else (guided, plain):
                await side.block(count=True)
            print(
                f"block {n}: without {statistics.median(plain.batches_s):.3f} s, with {statistics.median(guided.batches_s):.3f} s",
                flush=True,
            )
        stats = manager.stats()
    store.close()
    if plain.played != guided.played:
        raise RuntimeError("the two sides did not play the same episodes: the comparison means nothing")
    without, with_ = statistics.median(plain.batches_s), statistics.median(guided.batches_s)
    return {
        "overhead": with_ / without - 1,
        "overhead_of_means": statistics.mean(guided.batches_s) / statistics.mean(plain.batches_s) - 1,
        "without_s": without,
        "with_s": with_,
        "without_quartiles_s": statistics.quantiles(plain.batches_s, n=4),
        "with_quartiles_s": statistics.quantiles(guided.batches_s, n=4),
        "added_ms_per_batch": 1000 * (with_ - without),
        "batches": len(plain.batches_s),
        "episodes_per_batch": GROUPS * GROUP_SIZE,
        "turns_per_episode": round(statistics.mean(turns for turns, _ in plain.played), 2),
        "reply_ms": args.reply_ms,
        "entries": stats["entries"],
        "searches": stats["searches"],
        "embed_calls": stats["embed_calls"],
        "distilled": stats["generations_distil"],
        "entries_written": stats["entries_written"],
        "search_ms_mean": 1000 * stats["search_latency_s"] / stats["searches"],
    }


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--reply-ms", type=float, default=1000.0)
    parser.add_argument("--entries", type=int, default=20_000)
    parser.add_argument("--out", type=pathlib.Path)
    args = parser.parse_args()
    config = load(ROOT / "configs" / "quickstart.yaml")
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(measure(config, args, pathlib.Path(folder)))
    overhead = found.pop("overhead")
    emit(Result("rollout_overhead.with_experience", overhead, "share", f"<= {GOAL}", overhead <= GOAL, details=found), args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
