"""How many programs real parts compile: at most one per bucket, and none after the first use of each."""

import asyncio

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from toy_model import VOCAB, sample

from crl_jax.learner import objective
from crl_jax.models import transformer
from crl_jax.models.config import ModelConfig
from crl_jax.records import SamplingParams
from crl_jax.role import Buckets, Role
from crl_jax.serving import programs
from crl_jax.serving.constraint import ActionTrie
from crl_jax.serving.engine import SlotEngine
from crl_jax.serving.sampler import EngineSampler
from crl_jax.sharding.mesh import make_mesh

CONFIG = ModelConfig(name="counted", vocab_size=VOCAB, d_model=8, n_layers=1, n_heads=1, n_kv_heads=1, head_dim=8, d_ff=8)
ROWS, LENGTH = 4, 24


pytestmark = pytest.mark.usefixtures("compiled_in_haste")


class Nobody:
    """A sampler that takes weights and does nothing."""

    def publish(self, params, version) -> None:
        self.params, self.version = params, version


def role_with(buckets: Buckets) -> Role:
    return Role(
        "actor",
        model_config=CONFIG,
        params=jax.tree.map(lambda leaf: np.full(leaf.shape, 0.01, np.float32), transformer.param_shapes(CONFIG)),
        optimizer=optax.sgd(1e-3),  # small programs: what is counted does not depend on it
        objective=objective.actor(),
        sampler=Nobody(),  # type: ignore[arg-type]
        buckets=buckets,
        temperature=1.0,
        allowed=None,
        mesh=make_mesh(1, 1, 1, jax.devices()[:1]),
    )


def batches(count: int):
    """Batches of a run: as many samples as the bucket or fewer (episodes get lost), some of them with equal beginnings."""
    rng = np.random.default_rng(0)
    for i in range(count):
        kinds = [(int(rng.integers(2, LENGTH - 9)), int(rng.integers(1, 7))) for _ in range(1 + i % ROWS)]
        yield [sample(np.random.default_rng(j // 2), prompt, reply, 1.0) for j, (prompt, reply) in enumerate(kinds)]


@pytest.mark.parametrize("packing", ["padded", "prefixes"])
def test_a_role_compiles_at_most_one_program_per_bucket(packing) -> None:
    """Twenty different batches through a real role, then all of them again: nothing new is compiled, whatever is published between."""
    buckets = Buckets.of(rows=ROWS, max_length=LENGTH, max_tokens=8, packing=packing)
    role, shapes = role_with(buckets), set()
    for samples in batches(20):
        role.update(samples)
        shapes.add(jax.tree.map(np.shape, buckets.batch(samples)))
    role.publish()
    compiled = role._step._cache_size()  # type: ignore[attr-defined]
    sizes = [(s.tokens, s.mask) for s in shapes]
    assert {rows for (rows, _), _ in sizes} <= set(buckets.rows)
    assert {length for (_, length), _ in sizes} <= set(buckets.lengths)
    assert {tokens for _, (_, tokens) in sizes} <= set(buckets.tokens)
    assert {sequences // rows for (rows, _), (sequences, _) in sizes} <= set(buckets.sequences or (1,))
    assert 1 < compiled == len(shapes) <= len(buckets.rows) * len(buckets.lengths) * len(buckets.tokens) * max(1, len(buckets.sequences))
    for samples in batches(6):
        role.update(samples)
    assert role._step._cache_size() == compiled  # type: ignore[attr-defined]
    assert role.publisher.transfer.copy.program._cache_size() == 1
    assert (role.published.version, role.version) == (1, 1)
    assert role.published.metrics().keys() == {"version", "bytes", "seconds", "copy_s", "checksum_s", "swap_s"}


def test_an_engine_compiles_at_most_one_program_per_bucket_also_while_it_evaluates() -> None:
    """Rollouts and evaluation (greedy, sampled, constrained, any number at once, new weights between) share the programs of the buckets."""
    trie = ActionTrie.build([(3, 1), (4, 5, 1)])
    sizes = {"max_slots": 4, "max_length": 32, "row_buckets": (2,), "chunk_buckets": (8,)}
    engine = SlotEngine(CONFIG, trie=trie, **sizes)
    params = jax.tree.map(lambda leaf: jnp.full(leaf.shape, 0.01), transformer.param_shapes(CONFIG))
    before = programs.extend._cache_size(), programs.generate._cache_size()
    rng = np.random.default_rng(0)

    async def play() -> list[tuple[int, int]]:
        sampler, seen = EngineSampler(engine, params), []
        for turn in range(12):
            waiting = []
            for i in range(1 + turn % 6):  # more at once than there are slots
                how = SamplingParams(
                    int(rng.integers(1, 12)), temperature=(0.0, 0.7, 1.0)[i % 3], top_p=(1.0, 0.9)[i % 2], top_k=i % 3, seed=turn,
                    constrained=(turn + i) % 4 == 0, stop_ids=(1,),
                )  # fmt: skip
                waiting.append(sampler.complete(rng.integers(0, VOCAB, int(rng.integers(1, 20))).tolist(), how))
            await asyncio.gather(*waiting)
            sampler.publish(jax.tree.map(jnp.copy, params), turn + 1)
            seen.append((programs.extend._cache_size() - before[0], programs.generate._cache_size() - before[1]))
        await sampler.aclose()
        return seen

    seen = asyncio.run(play())
    rows, chunks = len(engine.row_buckets), len(engine.chunk_buckets)
    assert 1 <= seen[-1][0] <= rows * chunks
    assert 1 <= seen[-1][1] <= rows
    assert seen[7] == seen[-1], "after every bucket was used once nothing new is compiled"
