"""config.json to ModelConfig and back: the published files of real models, and refusals that say what is supported."""

import dataclasses

import pytest

from crl_jax.models.config import RopeScaling, check_same_model
from crl_jax.models.hf_config import from_hf_config, read_hf_config, to_hf_config
from crl_jax.models.presets import PRESETS, TINY
from crl_jax.models.transformer import count_params

# The fields that matter of the files that came with the checkpoints.
QWEN2 = {"model_type": "qwen2", "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1e6, "sliding_window": 32768}
QWEN2 |= {"use_sliding_window": False, "max_position_embeddings": 32768, "max_window_layers": 28}
QWEN3 = {"model_type": "qwen3", "hidden_act": "silu", "rms_norm_eps": 1e-6, "vocab_size": 151936, "attention_bias": False, "head_dim": 128}
QWEN3 |= {"num_key_value_heads": 8, "rope_scaling": None, "sliding_window": None, "tie_word_embeddings": True, "use_sliding_window": False}
PUBLISHED = {
    "qwen2.5-0.5b": {
        **QWEN2,
        "vocab_size": 151936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_attention_heads": 14,
        "num_hidden_layers": 24,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "qwen2.5-7b": {
        **QWEN2,
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_attention_heads": 28,
        "num_hidden_layers": 28,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    },
    "qwen3-0.6b": {
        **QWEN3,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "rope_theta": 1000000,
        "max_position_embeddings": 40960,
    },
    "qwen3-4b-thinking-2507": {
        **QWEN3,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_attention_heads": 32,
        "num_hidden_layers": 36,
        "rope_theta": 5000000,
        "max_position_embeddings": 262144,
    },
    "llama3.2-1b": {
        "model_type": "llama",
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "head_dim": 64,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "max_position_embeddings": 131072,
        "num_attention_heads": 32,
        "num_hidden_layers": 16,
        "num_key_value_heads": 8,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 32.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "vocab_size": 128256,
    },
    "gemma3-270m": {
        "model_type": "gemma3_text",
        "_sliding_window_pattern": 6,
        "attention_bias": False,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 640,
        "intermediate_size": 2048,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 3,
        "max_position_embeddings": 32768,
        "num_attention_heads": 4,
        "num_hidden_layers": 18,
        "num_key_value_heads": 1,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-06,
        "rope_local_base_freq": 10000.0,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "sliding_window": 512,
        "use_bidirectional_attention": False,
        "vocab_size": 262144,
    },
}
PARAMETERS = {
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-4b": 4_022_468_096,
    "llama3.2-1b": 1_235_814_400,
    "gemma3-270m": 268_098_176,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_presets_are_the_published_models(name):
    assert from_hf_config(PUBLISHED[name], name=name) == PRESETS[name]


@pytest.mark.parametrize("name", PARAMETERS)
def test_presets_have_the_published_number_of_parameters(name):
    """Counted on one and two layers: all layers have the same shapes."""
    one, two = (count_params(dataclasses.replace(PRESETS[name], n_layers=n, local_layers=())) for n in (1, 2))
    assert one + (PRESETS[name].n_layers - 1) * (two - one) == PARAMETERS[name]


LINEAR = dataclasses.replace(PRESETS["gemma3-270m"], name="linear", rope_scaling=RopeScaling("linear", 8.0))
WINDOWED = dataclasses.replace(PRESETS["qwen2.5-0.5b"], name="windowed", window=64, local_layers=(22, 23))


@pytest.mark.parametrize("config", [*PRESETS.values(), LINEAR, WINDOWED], ids=lambda config: config.name)
def test_a_config_written_and_read_is_the_same(config):
    fields = to_hf_config(config, dtype="bfloat16")
    check_same_model(from_hf_config(fields, name="x"), config, source="the original")
    assert fields["torch_dtype"] == "bfloat16"


def test_a_mixture_of_families_has_no_config_json():
    with pytest.raises(ValueError, match="Qwen3ForCausalLM"):
        to_hf_config(dataclasses.replace(TINY, qkv_bias=True, qk_norm=True), dtype="float32")


@pytest.mark.parametrize(
    ("base", "change", "words"),
    [
        ("llama3.2-1b", {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"]}, r"mixtral.*llama \(LlamaForCausalLM\)"),
        ("llama3.2-1b", {"model_type": None}, "supported are llama"),
        ("llama3.2-1b", {"attention_bias": True}, "attention_bias=True"),
        ("llama3.2-1b", {"mlp_bias": True}, "mlp_bias"),
        ("llama3.2-1b", {"hidden_act": "gelu"}, "gelu_pytorch_tanh"),
        ("llama3.2-1b", {"hidden_size": None}, "no hidden_size"),
        ("llama3.2-1b", {"partial_rotary_factor": 0.5}, "full rotation"),
        ("llama3.2-1b", {"quantization_config": {"quant_method": "awq"}}, "awq"),
        ("qwen2.5-7b", {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "'yarn'.*llama3"),
        ("gemma3-270m", {"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0"),
        ("gemma3-270m", {"layer_types": ["chunked_attention"] * 18}, "chunked_attention"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(base, change, words):
    with pytest.raises(ValueError, match=words):
        from_hf_config(PUBLISHED[base] | change, name="m")


def test_rotary_fields_of_both_generations_of_the_file_mean_the_same():
    old = PUBLISHED["gemma3-270m"]
    new = {key: value for key, value in old.items() if not key.startswith("rope")}
    new["rope_parameters"] = {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    assert from_hf_config(new, name="g") == from_hf_config(old, name="g")
    old = PUBLISHED["llama3.2-1b"]
    new = {key: value for key, value in old.items() if not key.startswith("rope")}
    new["rope_parameters"] = {**old["rope_scaling"], "rope_theta": 500000.0}
    assert from_hf_config(new, name="l") == from_hf_config(old, name="l")


def test_no_folder(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        read_hf_config(tmp_path)


def test_another_model_is_named_field_by_field():
    with pytest.raises(ValueError, match=r"rope_theta=10000\.0 instead of 50000\.0"):
        check_same_model(TINY, dataclasses.replace(TINY, name="t", rope_theta=50_000.0, max_positions=9), source="t")
