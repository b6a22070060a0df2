"""Small real parts for the tests of the experience bank: an embedder, a scripted extractor, an episode."""

import asyncio
import hashlib

import numpy as np

from crl_jax.experience.protocols import Message
from crl_jax.records import Completion, Condition, Episode, Finish, SamplingParams, Status, Task, TokenLog, Turn


class HashEmbedder:
    """Bag of hashed words: texts that share words are similar, equal texts have cosine 1."""

    dim = 64
    fingerprint = "hash-64"

    def __init__(self) -> None:
        self.calls: list[list[str]] = []

    def embed(self, texts: list[str]) -> np.ndarray:
        self.calls.append(list(texts))
        out = np.zeros((len(texts), self.dim), np.float32)
        for row, text in zip(out, texts, strict=True):
            for word in text.lower().split():
                digest = hashlib.blake2b(word.encode(), digest_size=8).digest()
                row[digest[0] % self.dim] += 1.0 if digest[1] % 2 else -1.0
                row[digest[2] % self.dim] += 0.5
        return out


def render(messages: list[Message]) -> list[int]:
    return [ord(char) for message in messages for char in f"[{message.role}]{message.content}"]


def decode(ids) -> str:
    return "".join(map(chr, ids))


class ScriptedSampler:
    """Answers from a function of the prompt text; ends with stop id 0. ``delay`` seconds may depend on the prompt."""

    def __init__(self, reply, delay=lambda prompt: 0.0) -> None:
        self.reply, self.delay, self.prompts = reply, delay, []
        self.running = self.most_running = 0

    async def complete(self, prompt_ids, params: SamplingParams) -> Completion:
        prompt = decode(prompt_ids)
        self.prompts.append(prompt)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await asyncio.sleep(self.delay(prompt))
            ids = (*map(ord, self.reply(prompt)), 0)
        finally:
            self.running -= 1
        return Completion(ids, (-0.5,) * len(ids), (7,) * len(ids), (0,) * len(ids), Finish.STOP)


def episode(
    name="e0",
    *,
    success=True,
    shown=(),
    asks=(),
    namespace="room",
    status=Status.TERMINATED,
    observation="a dark room",
    goal="find the exit",
):
    turn = Turn(observation, "go east", (0, 1))
    return Episode(
        id=name,
        group_id=f"group-{name}",
        condition=Condition.GUIDED,
        task=Task("toy/room", 1, goal, namespace),
        log=TokenLog.empty(),
        turns=(turn,),
        final_observation="the end",
        status=status,
        success=success,
        reward=float(success),
        shown=tuple(shown),
        asks=tuple(asks),
    )
