"""A synchronous run writes the same bank whatever takes how long."""

import random

import pytest
from experience_toys import HashEmbedder, episode
from manager_toys import add, build, merging, observation, run, teach, texts, update

from crl_jax.experience.bank_json import to_json
from crl_jax.experience.merging import MergePolicy
from crl_jax.experience.reader import Routing
from crl_jax.experience.store import Store
from crl_jax.experience.writer import WritePolicy


def reply(prompt):
    """Episodes that were shown the first lesson replace it, others add theirs: what they were shown decides."""
    if "environment: " not in prompt:
        return merging(prompt)
    return update(f"better {observation(prompt)}", 1) if "old lesson" in prompt else add(observation(prompt))


async def played(seed: int, every_steps: int) -> tuple[str, list[list[str]]]:
    rng = random.Random(seed)
    delays = {"in_turn": True, "distil_concurrency": 4, "merge": MergePolicy(every_steps)}
    embedder = HashEmbedder()
    async with build(reply, lambda prompt: rng.choice([0.0, 0.001, 0.01, 0.03]), embedder=embedder, **delays) as manager:
        for namespace in ("room", "hall"):
            await teach(manager, f"old lesson {namespace}", f"other {namespace}", namespace=namespace)
        for step in (1, 2):
            manager.on_step(step)
            ids = {name: list(space) for name, space in sorted(manager.state.spaces.items())}
            batch = [episode(f"s{step}/{n}/{at}", observation=f"{n} {at}", namespace=at, shown=ids[at][:1]) for n in range(7) for at in ids]
            await manager.observe(batch)
            for one in batch:
                await manager.submit(one)
            assert await manager.drain(20) == 0
        return to_json(manager.state), embedder.calls


@pytest.mark.parametrize("every_steps", [0, 1])
def test_a_synchronous_run_writes_the_same_bank_whatever_takes_how_long(every_steps):
    first, *others = [run(played(seed, every_steps)) for seed in range(4)]
    assert all(other == first for other in others), "entries, ids and which texts were embedded together"


def test_equals_of_other_families_are_ranked_alike_after_a_restart(tmp_path):
    path = tmp_path / "bank.sqlite"

    async def asked(*lessons):
        oldest_goes = WritePolicy(dedup_cosine=2.0, capacity=1)
        async with build(store=Store.open(path), routing=Routing.MIXED, write=oldest_goes) as manager:
            for namespace in lessons:
                await teach(manager, "go north", namespace=namespace)
            return [texts(manager, name) for name in "ab"], [shown.id for shown in await manager.retrieve("c", "go north", peek=True)]

    before = run(asked("b", "a", "b"))
    assert run(asked()) == before
