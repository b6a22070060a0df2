"""Roofline arithmetic on values worked out by hand."""

import pytest

from crl_jax.aot.needed import forward_flops, layer_weights, train_flops
from crl_jax.aot.roofline import intensity, mfu_bound, roofline
from crl_jax.aot.topology import Chip
from crl_jax.models.config import ModelConfig
from crl_jax.models.presets import preset

CHIP = Chip("toy", 2, 100, flops_s=1000.0, hbm_bytes_s=100.0, ici_bytes_s=10.0, dcn_bytes_s=1.0)


def test_the_slowest_resource_sets_the_time() -> None:
    times = roofline(CHIP, flops=4000, hbm_bytes=300, ici_bytes=20, dcn_bytes=1)
    assert (times.compute_s, times.hbm_s, times.ici_axis_s, times.dcn_s) == (4, 3, 2, 1)
    assert times.ici_s == 1, "two axes carry what one chip sends in half the time"
    assert (times.roofline_s, times.serial_s, times.bound) == (4, 10, "compute")
    assert roofline(CHIP, flops=1, hbm_bytes=1, ici_bytes=100).bound == "ici"
    assert intensity(4000, 300) == pytest.approx(40 / 3)
    assert intensity(1, 0) == 0


def test_mfu_bound_is_needed_arithmetic_over_what_the_chips_could_do() -> None:
    assert mfu_bound(CHIP, model_flops=8000, chips=4, seconds=4) == 0.5
    assert mfu_bound(CHIP, model_flops=1, chips=1, seconds=0) == 0


def test_needed_flops_of_a_model_counted_by_hand() -> None:
    config = ModelConfig("m", vocab_size=10, d_model=4, n_layers=2, n_heads=2, n_kv_heads=1, head_dim=2, d_ff=6)
    per_layer = 4 * 4 + 2 * 4 * 2 + 4 * 4 + 3 * 4 * 6  # q, k and v, o, gate and up and down
    assert layer_weights(config) == 2 * per_layer
    pairs = 3 * 4 / 2  # three tokens: 1 + 2 + 3
    forward = 2 * 2 * per_layer * 3 + 2 * (2 * 2 * 2 * 2) * pairs + 2 * 4 * 10 * 1
    assert forward_flops(config, tokens=3, pairs=pairs, logits=1) == forward
    assert train_flops(config, rows=5, length=3, trained=1) == 3 * 5 * forward


@pytest.mark.parametrize(("name", "weights"), [("qwen2.5-7b", 6.525e9), ("qwen3-4b", 3.633e9)])
def test_the_papers_models_have_their_published_size_without_embeddings(name: str, weights: float) -> None:
    """Model cards: 6.53 B and 3.6 B non-embedding parameters."""
    assert layer_weights(preset(name)) == pytest.approx(weights, rel=2e-3)
