"""Partition rules and the mesh on eight virtual devices."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from crl_jax.models.params import flatten
from crl_jax.models.presets import MICRO, PRESETS, TINY
from crl_jax.models.transformer import hidden_states, init, init_cache, param_shapes, unembed
from crl_jax.sharding.mesh import AXES, make_mesh
from crl_jax.sharding.rules import (
    RULES,
    batch_sharding,
    cache_sharding,
    check_divisible,
    param_shardings,
    replicated,
    rule_for,
    shard_params,
)

ONE_LAYER = dataclasses.replace(TINY, n_layers=1)
EVERYTHING = dataclasses.replace(ONE_LAYER, name="everything", tie_embeddings=False, qkv_bias=True, qk_norm=True, post_norms=True)
TOKENS = np.random.default_rng(0).integers(0, 64, (8, 6))
POSITIONS = np.tile(np.arange(6), (8, 1))


@pytest.fixture(scope="module")
def meshes():
    return make_mesh(1, 1, 1, jax.devices()[:1]), make_mesh(2, 2, 2)


def logits_and_gradient(params, tokens, positions):
    def loss(params):
        logits = unembed(EVERYTHING, params, hidden_states(EVERYTHING, params, tokens, positions)[0])
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1)), logits

    gradient, logits = jax.grad(loss, has_aux=True)(params)
    return logits, gradient


def test_logits_and_gradients_do_not_depend_on_the_mesh(meshes):
    params = init(EVERYTHING, jax.random.key(0))
    results = []
    for mesh in meshes:
        rows, shardings = batch_sharding(mesh), param_shardings(EVERYTHING, mesh)
        run = jax.jit(logits_and_gradient, in_shardings=(shardings, rows, rows), out_shardings=(rows, shardings))
        results.append(run(shard_params(params, mesh), jax.device_put(TOKENS, rows), jax.device_put(POSITIONS, rows)))
    (one, one_gradient), (eight, eight_gradient) = results
    np.testing.assert_allclose(one, eight, atol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), one_gradient, eight_gradient)
    assert eight_gradient["layers"]["0"]["mlp"]["up"].sharding.shard_shape((32, 64)) == (16, 32)


def test_cached_states_do_not_depend_on_the_mesh(meshes):
    params = init(ONE_LAYER, jax.random.key(0))

    def states(params, tokens, positions, cache):
        return hidden_states(ONE_LAYER, params, tokens, positions, cache=cache)

    results = []
    for mesh in meshes:
        rows, places = batch_sharding(mesh), cache_sharding(ONE_LAYER, mesh)
        cache = jax.device_put(init_cache(ONE_LAYER, 8, 16), places)
        run = jax.jit(states, out_shardings=(rows, places))
        results.append(run(shard_params(params, mesh), jax.device_put(TOKENS, rows), jax.device_put(POSITIONS, rows), cache))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), *results)
    assert results[1][1].k[0][0].sharding.shard_shape((8, 2, 8, 16)) == (2, 1, 8, 16)


@pytest.mark.parametrize("config", [*PRESETS.values(), EVERYTHING], ids=lambda config: config.name)
def test_every_parameter_has_exactly_one_rule(config):
    for name, leaf in flatten(param_shapes(dataclasses.replace(config, n_layers=1, local_layers=()))).items():
        assert len(rule_for(name).axes) == leaf.ndim, name
        assert sum(bool(re.fullmatch(rule.pattern, name)) for rule in RULES) == 1, name


def test_every_rule_is_used():
    names = [*flatten(param_shapes(EVERYTHING))]
    assert all(any(re.fullmatch(rule.pattern, name) for name in names) for rule in RULES)


def test_an_unknown_parameter_is_an_error(meshes):
    with pytest.raises(ValueError, match=r"layers\.0\.attn\.gate.*rules\.py"):
        shard_params({"layers": {"0": {"attn": {"gate": jnp.zeros((2, 2))}}}}, meshes[0])


@pytest.mark.parametrize(
    ("config", "shape", "words"),
    [
        (
            dataclasses.replace(MICRO, n_heads=6, vocab_size=1026),
            (1, 1, 3),
            r"`tensor`=3 does not divide n_kv_heads=2 of model `micro` \(layers\.0\.attn\.k\): use 1 or 2",
        ),
        (TINY, (1, 3, 1), r"`fsdp`=3 does not divide d_model=32 of model `tiny` \(embed\.table\): use 1, 2 or 4"),
        (dataclasses.replace(TINY, vocab_size=63), (1, 1, 2), r"vocab_size=63 .* use 1 or 3, or pad the vocabulary to 64 entries"),
    ],
)
def test_a_model_that_does_not_fit_the_mesh_says_what_does(config, shape, words):
    with pytest.raises(ValueError, match=words):
        check_divisible(config, make_mesh(*shape, jax.devices()[: np.prod(shape)]))


def test_mesh(meshes):
    assert meshes[1].axis_names == AXES
    assert meshes[1].axis_types == (AxisType.Auto,) * 3
    assert dict(meshes[1].shape) == {"data": 2, "fsdp": 2, "tensor": 2}
    with pytest.raises(ValueError, match="needs 6 devices, 8 given"):
        make_mesh(1, 3, 2)


def test_P07_random_values_do_not_depend_on_the_number_of_devices(meshes):
    values = []
    for count in (1, 4):
        mesh = make_mesh(count, 1, 1, jax.devices()[:count])
        sharding = NamedSharding(mesh, PartitionSpec("data"))
        values.append(np.asarray(jax.jit(lambda key: jax.random.normal(key, (8,)), out_shardings=sharding)(jax.random.key(0))))
    np.testing.assert_array_equal(values[0], values[1])
    np.testing.assert_allclose(values[0][:3], [1.6226, 2.0253, -0.4336], atol=1e-4)
    one, eight = (
        jax.jit(init, static_argnums=0, out_shardings=param_shardings(ONE_LAYER, mesh))(ONE_LAYER, jax.random.key(5)) for mesh in meshes
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), one, eight)
    assert replicated(meshes[1]).is_fully_replicated
