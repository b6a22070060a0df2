"""How the layers are run in training must not change what they compute: remat, scan, picked positions, compute type, attention kernels."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from crl_jax.models.attention import Scope, attention_for, best_kernel, cudnn_attention, einsum_attention, splash_attention, visible
from crl_jax.models.config import ModelConfig
from crl_jax.models.forward import Execution
from crl_jax.models.matmul import matmul
from crl_jax.models.transformer import hidden_states, init

SMALL = ModelConfig(name="s", vocab_size=32, d_model=16, n_layers=3, n_heads=4, n_kv_heads=2, head_dim=4, d_ff=24, qkv_bias=True)
RNG = np.random.default_rng(0)
TOKENS = RNG.integers(0, 32, (2, 9))
POSITIONS = np.array([[0, 1, 2, 3, 4, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5, 6, -1, -1]])
SEGMENTS = np.array([[0] * 5 + [1] * 4, [0] * 7 + [-1] * 2])
READ = np.array([[3, 6, 8], [0, 5, 6]])
WIDE = np.concatenate([READ] * 3, axis=1)  # as many reads as positions


@pytest.fixture(scope="module")
def params():
    return init(SMALL, jax.random.key(0))


def gradient(params, how: Execution, read=READ):
    def loss(params):
        hidden, _ = hidden_states(SMALL, params, TOKENS, POSITIONS, segments=SEGMENTS, read=read, how=how)
        picked = hidden if read is not None else jnp.take_along_axis(hidden, READ[..., None], axis=1)
        return jnp.sum(picked.astype(jnp.float32) ** 3)

    return jax.jit(jax.value_and_grad(loss))(params)


@pytest.fixture(scope="module")
def plain(params):
    return gradient(params, Execution(), read=None)


def test_reading_as_many_positions_as_there_are(params):
    hidden = [hidden_states(SMALL, params, TOKENS, POSITIONS, segments=SEGMENTS, read=r)[0] for r in (WIDE, READ, None)]
    np.testing.assert_allclose(hidden[0][:, :3], hidden[1], atol=1e-5)
    np.testing.assert_allclose(hidden[0], jnp.take_along_axis(hidden[2], WIDE[..., None], axis=1), atol=1e-5)


@pytest.mark.parametrize(
    "how",
    [
        Execution(),
        Execution(remat="full"),
        Execution(remat="dots"),
        Execution(remat="attention", scan_layers=True),
    ],
    ids=["read", "full", "dots", "attention-scan"],
)
def test_running_it_otherwise_gives_the_same_loss_and_gradient(params, plain, how):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5, rtol=1e-4), gradient(params, how), plain)


def kept(params, remat, capsys) -> set[str]:
    """Shapes of the arrays that the forward pass keeps for the backward pass."""

    def loss(params):
        return hidden_states(SMALL, params, TOKENS, POSITIONS, segments=SEGMENTS, how=Execution(remat=remat))[0].sum()

    jax.ad_checkpoint.print_saved_residuals(loss, params)
    lines = capsys.readouterr().out.splitlines()
    return {line.split()[0] for line in lines if "from the argument" not in line}


def test_remat_keeps_what_it_says(params, capsys):
    """The widest arrays, the MLP's [18 tokens, 24], are kept without remat, by neither `full` nor `attention`."""
    assert "f32[2,9,24]" in kept(params, "none", capsys)
    full, attention = kept(params, "full", capsys), kept(params, "attention", capsys)
    assert "f32[2,9,24]" not in full | attention
    assert {"f32[2,9,4,4]", "f32[2,9,2,4]"} <= attention, "queries, keys and values"
    assert not {"f32[2,9,4,4]", "f32[2,9,2,4]"} & full


def test_remat_dots_keeps_the_products_with_weights(params, capsys):
    assert "f32[2,9,24]" in kept(params, "dots", capsys)


def products(depth: int) -> int:
    """Matrix products in the compiled forward pass of a scanned model."""
    config = dataclasses.replace(SMALL, n_layers=depth)
    params = jax.eval_shape(lambda: init(config, jax.random.key(0)))
    run = jax.jit(lambda p: hidden_states(config, p, TOKENS, POSITIONS, how=Execution(scan_layers=True))[0])
    return run.lower(params).compile().as_text().count("dot(")


def test_a_scanned_program_does_not_grow_with_depth():
    assert products(2) == products(5) > 0


def test_bfloat16_compute_with_float32_weights_stays_within_its_bound(params, plain):
    """8 bits of mantissa: the loss and the whole gradient within 5 % of float32, each array's gradient within 10 %, all in float32."""
    loss, grads = gradient(params, Execution(dtype=jnp.bfloat16))
    assert float(loss) == pytest.approx(float(plain[0]), rel=0.05)
    apart, size = [], []
    for half, full in zip(jax.tree.leaves(grads), jax.tree.leaves(plain[1]), strict=True):
        assert half.dtype == jnp.float32
        apart.append(np.linalg.norm(half - full))
        size.append(np.linalg.norm(full))
        assert apart[-1] <= 0.1 * size[-1] + 1e-3
    assert np.linalg.norm(apart) <= 0.05 * np.linalg.norm(size)


def test_mixed_matmul_sums_its_gradient_in_float32():
    """4096 rows of 1/64: a bfloat16 sum would stop growing at 4 (1/64 is below half a step there); the exact gradient is 64."""
    x, kernel = jnp.full((4096, 1), 1 / 64, jnp.bfloat16), jnp.ones((1, 1))
    out, pull = jax.vjp(matmul, x, kernel)
    assert out.dtype == jnp.bfloat16
    _, slope = pull(jnp.ones_like(out))
    assert slope.dtype == jnp.float32
    assert float(slope[0, 0]) == 64.0


def heads(t: int, q: int = 2, kv: int = 1, h: int = 8, rows: int = 1):
    return (jnp.asarray(RNG.normal(size=(rows, t, n, h)), jnp.float32) for n in (q, kv, kv))


def naive(q, k, v, mask):
    """Attention one query at a time, by definition."""
    q, k, v = (np.asarray(x) for x in (q, k, v))
    out = np.zeros(q.shape)
    for b, t, h in np.ndindex(*q.shape[:3]):
        head = h // (q.shape[2] // k.shape[2])
        keys = np.flatnonzero(mask[b, t])
        scores = np.exp(k[b, keys, head] @ q[b, t, h])
        out[b, t, h] = scores / scores.sum() @ v[b, keys, head] if len(keys) else 0
    return out.reshape(*q.shape[:2], -1)


def test_einsum_in_blocks_of_queries_equals_the_definition_also_with_shared_prefixes():
    t = 150  # two blocks
    q, k, v = heads(t)
    segments = np.repeat([[0, 1, 2]], 50, axis=1)
    prefixes = np.where(segments == 2, 0, segments)
    positions = np.concatenate([np.arange(50), np.arange(50), 50 + np.arange(50)])[None]
    mask = visible(jnp.asarray(positions), jnp.asarray(segments), jnp.asarray(prefixes))
    assert np.asarray(mask).sum(axis=-1)[0, [0, 49, 50, 99, 100, 149]].tolist() == [1, 50, 1, 50, 51, 100]
    out = einsum_attention(q, k, v, Scope(mask, jnp.asarray(segments), jnp.asarray(prefixes)))
    np.testing.assert_allclose(out, naive(q, k, v, np.asarray(mask)), atol=1e-5)


@pytest.mark.parametrize("window", [None, 9])
def test_splash_in_interpret_mode_equals_einsum_with_its_gradient(window):
    """Two sequences and padding; with a window of 9 (Gemma 3's local layers) a query sees itself and the 8 tokens before it."""
    t = 128
    q, k, v = heads(t)
    positions = np.concatenate([np.arange(70), np.arange(50), np.full(8, -1)])[None]
    segments = np.concatenate([np.zeros(70), np.ones(50), np.full(8, -1)])[None].astype(np.int32)
    mask = np.asarray(visible(jnp.asarray(positions), jnp.asarray(segments), None))
    if window is not None:
        mask = mask & (positions[:, None, :] > positions[:, :, None] - window)
        assert mask[0, 60].nonzero()[0].tolist() == list(range(52, 61))
    scope = Scope(jnp.asarray(mask), jnp.asarray(segments), None, window)
    weights = jnp.asarray(RNG.normal(size=(1, t, 16)) * (positions >= 0)[..., None], jnp.float32)

    def loss(attend, *qkv):
        return jnp.sum(attend(*qkv, scope) * weights)

    def splash(*args):
        return splash_attention(*args, interpret=True)

    for got, want in zip(
        jax.value_and_grad(lambda *a: loss(splash, *a), argnums=(0, 1, 2))(q, k, v)[1],
        jax.value_and_grad(lambda *a: loss(einsum_attention, *a), argnums=(0, 1, 2))(q, k, v)[1],
        strict=True,
    ):
        np.testing.assert_allclose(got, want, atol=2e-4)


def test_kernels_are_chosen_by_platform_and_refuse_what_they_cannot_do():
    half, full = np.dtype(jnp.bfloat16), np.dtype(np.float32)
    assert best_kernel("cpu", half, shared_prefixes=False) == "einsum"
    assert best_kernel("gpu", half, shared_prefixes=True) == "cudnn"
    assert best_kernel("gpu", full, shared_prefixes=False) == "einsum"
    assert best_kernel("tpu", full, shared_prefixes=False) == "splash"
    assert best_kernel("tpu", half, shared_prefixes=True) == "einsum"
    assert attention_for("splash") is splash_attention
    q, k, v = heads(4)
    scope = Scope(jnp.ones((1, 4, 4), bool), jnp.zeros((1, 4), jnp.int32), jnp.zeros((1, 4), jnp.int32))
    with pytest.raises(ValueError, match="compute_dtype=bfloat16"):
        cudnn_attention(q, k, v, scope)
    with pytest.raises(ValueError, match="packing `sequences`"):
        splash_attention(q, k, v, scope)
    with pytest.raises(ValueError, match="read all positions"):
        splash_attention(q[:, :2], k, v, scope)
