"""An experience manager on a scripted extractor and a hashing embedder, and short ways to teach it."""

import asyncio
import json

from experience_toys import HashEmbedder, ScriptedSampler, decode, episode, render

from crl_jax.experience.buffer import TrainingBuffer
from crl_jax.experience.index import ExactIndex
from crl_jax.experience.manager import ExperienceManager
from crl_jax.experience.manager_options import ManagerOptions
from crl_jax.experience.merging import MergePolicy
from crl_jax.experience.retrieve import Diversity
from crl_jax.experience.store import Store
from crl_jax.experience.writer import WritePolicy
from crl_jax.records import SamplingParams

NOTHING = '[{"op":"return"}]'


def add(*texts):
    return json.dumps([{"op": "add", "experience": text} for text in texts])


def update(text, *targets):
    return json.dumps([{"op": "update", "targets": targets, "experience": text}])


def observation(prompt):
    return prompt.split("environment: ")[1].split("\n")[0]


def echo(prompt):
    """Each episode teaches its first observation; merges keep everything; questions get an answer."""
    if "[user]<lesson>" in prompt:
        return "<answer>go north</answer>"
    return add(observation(prompt)) if "environment: " in prompt else NOTHING


def build(reply=echo, delay=lambda prompt: 0.0, *, store=None, embedder=None, index=ExactIndex, buffer=None, **options):
    embedder = embedder or HashEmbedder()
    settings = {"merge": MergePolicy(0), "diversity": Diversity(recent_steps=0), "write": WritePolicy(dedup_cosine=2.0), **options}
    return ExperienceManager(
        store=store or Store.open(":memory:"),
        embedder=embedder,
        make_index=lambda: index(embedder.dim),
        sampler=ScriptedSampler(reply, delay),
        render=render,
        decode=decode,
        buffer=TrainingBuffer(batch_size=2, capacity=64) if buffer is None else buffer,  # an empty one is falsy
        options=ManagerOptions(SamplingParams(64, stop_ids=(0,)), **settings),
    )


async def teach(manager, *observations, namespace="room", shown=()):
    for text in observations:
        assert await manager.submit(episode(f"e-{text}", observation=text, namespace=namespace, shown=shown))
    assert await manager.drain(20) == 0


def texts(manager, namespace="room"):
    return [entry.text for entry in manager.state.space(namespace).values()]


def run(story):
    return asyncio.run(asyncio.wait_for(story, 60))


def merging(prompt):
    if "environment: " in prompt:
        return add(observation(prompt))
    items = [line.split(". ", 1)[1] for line in prompt.split("\n") if line[:1].isdigit()]
    return "broken" if "fail" in prompt else update(" ".join(items), *range(1, len(items) + 1))
