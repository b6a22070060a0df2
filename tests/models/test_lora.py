"""Adapters against the base, against merged weights and against full gradients computed without them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from crl_jax.models import transformer
from crl_jax.models.config import ModelConfig
from crl_jax.models.lora import TARGETS, Lora, attach, init_adapters, merge
from crl_jax.models.params import flatten
from crl_jax.models.safetensors_io import load_params, save_params

CONFIG = ModelConfig("m", vocab_size=13, d_model=8, n_layers=2, n_heads=2, n_kv_heads=1, head_dim=4, d_ff=12, qkv_bias=True)
LORA = Lora(rank=2, alpha=6.0, targets=("q", "v", "down"))
TOKENS = np.random.default_rng(0).integers(0, 13, (2, 5))
POSITIONS = np.array([[0, 1, 2, 3, 4], [0, 1, 2, -1, -1]])


@jax.jit
def logits(params):
    return transformer.unembed(CONFIG, params, transformer.hidden_states(CONFIG, params, TOKENS, POSITIONS)[0])


@pytest.fixture(scope="module")
def base() -> dict:
    return transformer.init(CONFIG, jax.random.key(0))


def adapters(base: dict, *, trained: bool, lora: Lora = LORA) -> dict:
    fresh = init_adapters(base, lora, jax.random.key(1))
    return jax.tree.map(lambda leaf: leaf + 0.1 * np.random.default_rng(2).normal(size=leaf.shape), fresh) if trained else fresh


def test_fresh_adapters_leave_every_logit_as_it_is(base) -> None:
    np.testing.assert_array_equal(logits(attach(base, adapters(base, trained=False), LORA)), logits(base))


def test_merged_weights_give_the_same_logits(base) -> None:
    trained = adapters(base, trained=True)
    unmerged = logits(attach(base, trained, LORA))
    assert np.abs(unmerged - logits(base)).max() > 0.01
    np.testing.assert_allclose(logits(merge(base, trained, LORA)), unmerged, atol=1e-5)


def test_merging_is_base_plus_scaled_product_and_touches_nothing_else(base) -> None:
    trained = adapters(base, trained=True)
    merged, before, change = flatten(merge(base, trained, LORA)), flatten(base), flatten(trained)
    changed = {f"layers.{i}.{name}" for i in range(2) for name in ("attn.q", "attn.v", "mlp.down")}
    for name, leaf in merged.items():
        if name in changed:
            product = np.asarray(change[f"{name}.a"], np.float64) @ np.asarray(change[f"{name}.b"], np.float64)
            np.testing.assert_allclose(leaf, before[name] + 3.0 * product, atol=1e-6)
        else:
            assert leaf is before[name], "an untouched leaf is the base's own array"
    assert set(change) == {f"{name}.{part}" for name in changed for part in "ab"}


def test_gradients_are_those_of_full_fine_tuning_seen_through_the_low_rank(base) -> None:
    """With W = W0 + s a b: dL/db = s a^T dL/dW and dL/da = s dL/dW b^T, where dL/dW is that of the merged model; the base gets nothing."""
    trained = adapters(base, trained=True)
    weights = jnp.asarray(np.random.default_rng(3).normal(size=(2, 5, 13)))

    def loss(params) -> jax.Array:
        return jnp.sum(logits(params) * weights)

    full = flatten(jax.grad(loss)(merge(base, trained, LORA)))
    to_base, found = jax.grad(lambda base, adapters: loss(attach(base, adapters, LORA)), argnums=(0, 1))(base, trained)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(to_base))
    change = flatten(trained)
    for name, gradient in flatten(found).items():
        matrix, part = name[:-2], name[-1]
        whole = np.asarray(full[matrix])
        expected = 3.0 * (whole @ np.asarray(change[f"{matrix}.b"]).T if part == "a" else np.asarray(change[f"{matrix}.a"]).T @ whole)
        np.testing.assert_allclose(gradient, expected, atol=2e-4, err_msg=name)


def test_a_step_on_b_is_the_full_step_projected_on_the_columns_of_a() -> None:
    """One linear layer by hand: from b = 0 with orthonormal a and scale 1, gradient descent moves W by -lr a a^T (x^T dy)."""
    x, dy = np.array([[1.0, 2.0, 3.0]]), np.array([[1.0, -1.0]])
    a = np.array([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]])
    lora = Lora(rank=2, alpha=2.0, targets=("q",))
    base = {"layers": {"0": {"q": jnp.zeros((3, 2))}}}
    start = {"layers": {"0": {"q": {"a": jnp.asarray(a, jnp.float32), "b": jnp.zeros((2, 2))}}}}
    gradient = jax.grad(lambda ad: jnp.sum((jnp.asarray(x, jnp.float32) @ attach(base, ad, lora)["layers"]["0"]["q"]) * dy))(start)
    moved = jax.tree.map(lambda leaf, g: leaf - 0.5 * g, start, gradient)
    np.testing.assert_allclose(merge(base, moved, lora)["layers"]["0"]["q"], [[-0.5, 0.5], [-1.0, 1.0], [0.0, 0.0]])


def test_merged_weights_are_exported_like_any_others(base, tmp_path) -> None:
    merged = merge(base, adapters(base, trained=True), LORA)
    save_params(merged, tmp_path / "merged.safetensors")
    again = load_params(CONFIG, tmp_path / "merged.safetensors")
    jax.tree.map(np.testing.assert_array_equal, again, merged)


def test_an_unknown_target_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"query.*use one or more of \['q', 'k', 'v', 'o', 'gate', 'up', 'down'\]"):
        Lora(rank=4, alpha=8, targets=("query",))
    with pytest.raises(ValueError, match="one or more"):
        Lora(rank=4, alpha=8, targets=())
    with pytest.raises(ValueError, match="at least 1"):
        Lora(rank=0, alpha=8)


def test_every_target_is_a_matrix_of_every_layer(base) -> None:
    everything = Lora(rank=1, alpha=1.0)
    names = {name.rsplit(".", 1)[0] for name in flatten(adapters(base, trained=False, lora=everything))}
    assert names == {
        f"layers.{i}.{part}" for i in range(2) for part in [f"attn.{t}" for t in TARGETS[:4]] + [f"mlp.{t}" for t in TARGETS[4:]]
    }


def test_the_configuration_knows_the_same_targets() -> None:
    from crl_jax.config.roles import LORA_TARGETS

    assert LORA_TARGETS == TARGETS
