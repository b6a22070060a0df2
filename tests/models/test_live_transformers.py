"""Both directions against the transformers library itself, where it is installed: its random models read by us, ours read by it.

What CI checks instead are the golden folders (test_families, test_jinja_chat): the same library wrote those.
"""

import dataclasses

import jax
import numpy as np
import pytest

from crl_jax.models.config import RopeScaling
from crl_jax.models.hf_config import read_hf_config
from crl_jax.models.hf_weights import export_hf
from crl_jax.models.load import load_params
from crl_jax.models.presets import GEMMA3_270M, TINY
from crl_jax.models.transformer import hidden_states, init, unembed

pytestmark = pytest.mark.oracle
REASON = "compares with transformers: pip install torch transformers"
torch = pytest.importorskip("torch", reason=REASON)
transformers = pytest.importorskip("transformers", reason=REASON)

SIZES = {"d_model": 24, "d_ff": 40, "head_dim": 8, "max_positions": 64}
CONFIGS = {
    "llama": dataclasses.replace(
        TINY, **SIZES, tie_embeddings=False, rope_scaling=RopeScaling("llama3", 4.0, low_freq_factor=1.0, original_positions=12)
    ),
    "llama-linear": dataclasses.replace(TINY, **SIZES, rope_scaling=RopeScaling("linear", 3.0)),
    "qwen2-windowed": dataclasses.replace(TINY, **SIZES, qkv_bias=True, window=4, local_layers=(1,), norm_eps=1e-6),
    "qwen3": dataclasses.replace(TINY, **SIZES, qk_norm=True, n_kv_heads=1, rope_theta=1e6, norm_eps=1e-6),
    "gemma3": dataclasses.replace(
        GEMMA3_270M, **SIZES, vocab_size=64, n_layers=2, n_heads=2, window=3, local_layers=(1,), embed_scale=24**0.5, query_scale=8**-0.5
    ),
}
TOKENS = np.random.default_rng(1).integers(0, 64, (1, 20))


def ours(config, params):
    run = jax.jit(lambda params: unembed(config, params, hidden_states(config, params, TOKENS, np.arange(20)[None])[0]))
    return np.asarray(run(params))


def theirs(model):
    with torch.no_grad():
        return model.float().eval()(torch.tensor(TOKENS)).logits.numpy()


@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_goes_to_transformers_and_comes_back(name, tmp_path):
    """Ours -> exported -> its logits; then all its weights are changed, saved by it, and read by us."""
    config = CONFIGS[name]
    params = init(config, jax.random.key(0))
    export_hf(config, params, tmp_path / "out", dtype=np.float32)
    model, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    np.testing.assert_allclose(ours(config, params), theirs(model), atol=1e-4)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path / "back")
    read = read_hf_config(tmp_path / "back")
    assert dataclasses.replace(read, name=config.name, query_scale=config.query_scale) == config
    expected = theirs(model)
    assert np.abs(expected).max() > 0.5
    np.testing.assert_allclose(ours(config, load_params(str(tmp_path / "back"), read, seed=0)), expected, atol=1e-4)
