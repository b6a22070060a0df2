"""From a learner on data=2, fsdp=2, tensor=2 to samplers on eight devices: what arrives, what is refused, and what is sampled after."""

import asyncio
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from crl_jax.models import transformer
from crl_jax.models.lora import Lora, init_adapters, merge
from crl_jax.models.params import flatten, unflatten
from crl_jax.models.transposed import Transposed, transposed
from crl_jax.records import SamplingParams
from crl_jax.serving.engine import SlotEngine
from crl_jax.serving.publisher import Publisher, Serving
from crl_jax.serving.sampler import EngineSampler
from crl_jax.sharding import rules
from crl_jax.sharding.adapters import adapter_shardings
from crl_jax.sharding.checksum import ChecksumMismatch
from crl_jax.sharding.mesh import make_mesh
from crl_jax.sharding.reshard import serving_mesh
from crl_jax.sharding.rules import param_shardings

TIED = transformer.ModelConfig("tied", 40, 16, 1, 8, 8, 4, 32)
UNTIED = transformer.ModelConfig("untied", 40, 16, 1, 8, 8, 4, 32, tie_embeddings=False)
LORA = Lora(rank=2, alpha=4.0, targets=("q", "o", "up"))
LENGTH = 32


class Listener:
    """A sampler that keeps what is published to it."""

    params, version = None, 0

    def publish(self, params, version) -> None:
        self.params, self.version = params, version


@functools.cache
def learner_mesh() -> jax.sharding.Mesh:
    return make_mesh(2, 2, 2)


def random_weights(config, seed: int) -> dict:
    """On the host; large enough for clear winners."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(np.float32), transformer.param_shapes(config))


def on_learner(config, seed: int) -> dict:
    return jax.device_put(random_weights(config, seed), param_shardings(config, learner_mesh()))


@functools.cache
def doubled():
    return jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf * 2, tree), donate_argnums=0)


@pytest.mark.parametrize(
    ("config", "tensor", "dtype"), [(TIED, 2, jnp.float32), (UNTIED, 4, jnp.bfloat16), (UNTIED, 8, jnp.float32)], ids=["2", "4", "8"]
)
def test_R15_P06_every_copy_of_every_leaf_is_the_trainers_and_the_trainer_keeps_its_own(config, tensor, dtype) -> None:
    listener, trainer, values = Listener(), on_learner(config, 0), random_weights(config, 0)
    serving = Serving(serving_mesh(learner_mesh(), tensor), dtype)
    publisher = Publisher.of_weights(listener, config, learner_mesh(), serving)
    published = publisher.publish(trainer, 7)
    assert listener.version == published.version == 7
    assert published.nbytes == transformer.count_params(config) * jnp.dtype(dtype).itemsize
    assert len(published.checksum) == 8
    moved = doubled()(trainer)  # the trainer's next step gives its buffers away
    served = flatten(listener.params)
    assert served.keys() == flatten(values).keys()
    for name, leaf in served.items():
        assert len(leaf.addressable_shards) == 8
        for shard in leaf.addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), flatten(values)[name].astype(dtype)[shard.index], err_msg=name)
        leaf.delete()
    jax.tree.map(lambda new, old: np.testing.assert_array_equal(np.asarray(new), old * 2), moved, values)


def test_R15_on_one_cpu_the_transposed_layout_is_compared_in_the_plain_order() -> None:
    mesh, listener = make_mesh(1, 1, 1, jax.devices()[:1]), Listener()
    publisher = Publisher.of_weights(listener, TIED, mesh, Serving(mesh, jnp.float32, transposed))
    trainer = jax.device_put(random_weights(TIED, 0), param_shardings(TIED, mesh))
    published = publisher.publish(trainer, 1)
    q = listener.params["layers"]["0"]["attn"]["q"]
    assert isinstance(q, Transposed)
    np.testing.assert_array_equal(q.stored, trainer["layers"]["0"]["attn"]["q"].T)
    wide = Publisher.of_weights(Listener(), TIED, learner_mesh(), Serving(learner_mesh()))
    assert wide.publish(on_learner(TIED, 0), 1).checksum == published.checksum, "the same values on another mesh"
    turned = publisher.transfer.copy

    def mixed_up(params):
        served = turned(params)
        served["layers"]["0"]["attn"]["q"] = Transposed(served["layers"]["0"]["attn"]["k"].stored)
        return served

    publisher.transfer.copy = mixed_up
    with pytest.raises(ChecksumMismatch, match=r"layers\.0\.attn\.q"):
        publisher.publish(trainer, 2)
    with pytest.raises(ValueError, match="a serving layout is for one device"):
        Publisher.of_weights(listener, TIED, learner_mesh(), Serving(learner_mesh(), jnp.float32, transposed))


def test_one_flipped_bit_on_one_device_is_named_and_the_sampler_keeps_what_it_had() -> None:
    listener, trainer = Listener(), on_learner(TIED, 0)
    publisher = Publisher.of_weights(listener, TIED, learner_mesh(), Serving(serving_mesh(learner_mesh(), 2)))
    publisher.publish(trainer, 1)
    kept, copy = listener.params, publisher.transfer.copy

    def damaged(params):
        flat = flatten(copy(params))
        leaf = flat["layers.0.mlp.up"]
        parts = [np.array(shard.data) for shard in leaf.addressable_shards]
        parts[5].view(np.uint32)[3, 1] ^= np.uint32(1)  # the last bit of one number, in the memory of the sixth device
        arrays = [jax.device_put(part, shard.device) for part, shard in zip(parts, leaf.addressable_shards, strict=True)]
        flat["layers.0.mlp.up"] = jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, arrays)
        return unflatten(flat)

    publisher.transfer.copy = damaged
    with pytest.raises(ChecksumMismatch, match=r"layers\.0\.mlp\.up \(the served copy 2 of 4\)"):
        publisher.publish(trainer, 2)
    assert (listener.version, listener.params) == (1, kept)


@pytest.mark.parametrize(("config", "name"), [(TIED, "embed.table"), (UNTIED, "head.kernel")])
def test_R15_a_missing_mapping_or_leaf_is_an_error_and_nothing_is_filled_in(config, name, monkeypatch) -> None:
    listener = Listener()
    publisher = Publisher.of_weights(listener, config, learner_mesh(), Serving(learner_mesh()))
    flat = flatten(on_learner(config, 0))
    leaf = flat.pop(name)
    with pytest.raises(ValueError, match=f"missing: {name}"):
        publisher.publish(unflatten(flat), 1)
    with pytest.raises(ValueError, match=r"unexpected: extra\.kernel"):
        publisher.publish(unflatten(flat | {name: leaf, "extra.kernel": leaf}), 1)
    assert listener.version == 0

    def forgetful(params):
        return unflatten({key: value for key, value in flatten(params).items() if key != name})

    alone = make_mesh(1, 1, 1, jax.devices()[:1])
    with pytest.raises(ValueError, match=f"serving layout do not fit the model.*missing: {name}"):
        Publisher.of_weights(listener, config, alone, Serving(alone, jnp.float32, forgetful))
    monkeypatch.setattr(rules, "RULES", tuple(rule for rule in rules.RULES if rule.pattern.replace("\\", "") != name))
    with pytest.raises(ValueError, match=f"`{name}` has no partition rule"):
        Publisher.of_weights(listener, config, learner_mesh(), Serving(learner_mesh()))


@pytest.mark.parametrize("tensor", [None, 4], ids=["same mesh", "replicas"])
def test_adapters_alone_give_the_weights_of_a_full_merge(tensor) -> None:
    mesh, listener = learner_mesh(), Listener()
    serving = Serving(mesh if tensor is None else serving_mesh(mesh, tensor))
    base = on_learner(UNTIED, 0)
    rng = np.random.default_rng(1)
    adapters = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(np.float32), init_adapters(base, LORA, jax.random.key(0)))
    trained = jax.device_put(adapters, adapter_shardings(adapters, mesh))
    publisher = Publisher.of_adapters(listener, UNTIED, mesh, serving, lora=LORA, base=base, adapters=trained)
    published = publisher.publish(trained, 1)
    assert published.nbytes == sum(leaf.nbytes for leaf in jax.tree.leaves(adapters)) < transformer.count_params(UNTIED) * 4
    assert list(published.seconds) == ["copy", "checksum", "merge", "swap"]
    expected = merge(random_weights(UNTIED, 0), adapters, LORA)
    where = flatten(param_shardings(UNTIED, serving.mesh))
    for name, leaf in flatten(listener.params).items():
        assert leaf.sharding.is_equivalent_to(where[name], leaf.ndim)
        np.testing.assert_allclose(leaf, flatten(expected)[name], rtol=1e-6, atol=1e-6, err_msg=name)
    for leaf in jax.tree.leaves((base, trained)):
        assert not leaf.is_deleted()
    with pytest.raises(ValueError, match=r"missing: layers\.0\.mlp\.up\.b"):
        publisher.publish(unflatten({k: v for k, v in flatten(trained).items() if k != "layers.0.mlp.up.b"}), 2)


@functools.cache
def _forced():
    def logits(params, tokens, positions):
        return transformer.unembed(UNTIED, params, transformer.hidden_states(UNTIED, params, tokens, positions)[0])[0]

    return jax.jit(logits)


def greedy(params, prompt, n: int) -> list[int]:
    """By the uncached model on one device."""
    ids = list(prompt)
    for _ in range(n):
        tokens = np.zeros((1, LENGTH), np.int32)
        tokens[0, : len(ids)] = ids
        positions = np.where(np.arange(LENGTH) < len(ids), np.arange(LENGTH), -1)[None]
        ids.append(int(np.asarray(_forced()(params, tokens, positions))[len(ids) - 1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("tensor", [2, 8])
def test_R14_requests_in_flight_go_on_with_the_published_weights_and_change_version_once(tensor) -> None:
    target = serving_mesh(learner_mesh(), tensor)
    engine = SlotEngine(UNTIED, max_slots=4, max_length=LENGTH, chunk_buckets=(16,), max_steps=4, mesh=target, split_rows=True)
    prompts = [np.random.default_rng(i).integers(0, 40, 10 + i).tolist() for i in range(6)]
    prompts[3] = prompts[0]  # copied from a slot of another replica
    ask = SamplingParams(12, temperature=0.0)
    assert engine.row_buckets == (4,)
    old, new = on_learner(UNTIED, 0), on_learner(UNTIED, 1)

    async def main():
        first = Listener()
        publisher = Publisher.of_weights(first, UNTIED, learner_mesh(), Serving(target))
        publisher.publish(old, 0)
        sampler = EngineSampler(engine, first.params)
        publisher.sampler = sampler
        plain, calls = engine.generate, []

        def publish_before_second(*args, **kwargs):
            calls.append(1)
            if len(calls) == 2:
                publisher.publish(new, 1)
            return plain(*args, **kwargs)

        engine.generate = publish_before_second
        crowd = await asyncio.gather(*(sampler.complete(prompt, ask) for prompt in prompts))
        later = await sampler.complete(prompts[0], ask)
        stats = sampler.stats()
        await sampler.aclose()
        engine.generate = plain
        return crowd, later, stats

    async def fresh():
        listener = Listener()
        Publisher.of_weights(listener, UNTIED, learner_mesh(), Serving(target)).publish(new, 0)
        sampler = EngineSampler(engine, listener.params)
        completion = await sampler.complete(prompts[0], ask)
        await sampler.aclose()
        return completion

    crowd, later, stats = asyncio.run(main())
    assert stats["swaps"] == 1
    assert stats["shared_tokens"] >= len(prompts[0]) - 1
    splits = [completion.versions.count(0) for completion in crowd]
    assert splits[:4] == [8] * 4, "two dispatches of four tokens were on their way"
    for prompt, completion, split in zip(prompts, crowd, splits, strict=True):
        assert completion.versions == (0,) * split + (1,) * (12 - split)
        before = list(completion.ids[:split])
        assert before == greedy(random_weights(UNTIED, 0), prompt, split)
        assert list(completion.ids[split:]) == greedy(random_weights(UNTIED, 1), [*prompt, *before], 12 - split)
    assert later.versions == (1,) * 12
    own = engine.init_decode_state().cache.k[0][0].addressable_shards
    assert {shard.data.shape[:2] for shard in own} == {(4 * tensor // 8, 8 // tensor)} if tensor < 8 else {(4, 1)}, "rows over replicas"
    again = asyncio.run(fresh())
    assert later.ids == again.ids
    np.testing.assert_allclose(later.logps, again.logps, atol=1e-5)


def test_without_checksums_nothing_is_compared() -> None:
    listener = Listener()
    publisher = Publisher.of_weights(listener, TIED, learner_mesh(), Serving(learner_mesh()), checksum=False)
    published = publisher.publish(on_learner(TIED, 0), 3)
    assert (published.checksum, list(published.seconds), listener.version) == ("", ["copy", "swap"], 3)
