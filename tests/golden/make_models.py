"""Makes the tiny Hugging Face model folders beside this file, and what `transformers` computes with them.

    python tests/golden/make_models.py            # needs torch and transformers; the files were made with the versions in made_with.json

Each folder has random weights (saved by transformers itself), `expected.npz` (token ids [2, T] and float32
logits [2, T, V] of each sequence alone) and config.json. The weights are rounded to the type they are stored as before the logits are
computed. Together the folders cover float32, bfloat16 and float16, one file and several with an index, tied and untied heads.
"""

import json
import pathlib
import shutil

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, Qwen2Config, Qwen3Config

HERE = pathlib.Path(__file__).parent
LENGTH = 24
SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "max_position_embeddings": 128}
SIZES |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}

# The long wavelengths of llama3 scaling start at original / low = 16 tokens here, so that short sequences see all three ranges.
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
MODELS = {
    "llama": (
        LlamaConfig(**SIZES, num_hidden_layers=2, num_key_value_heads=2, rope_parameters=LLAMA3_ROPE, tie_word_embeddings=True),
        torch.float32,
        "5GB",
    ),
    "qwen2": (Qwen2Config(**SIZES, num_hidden_layers=2, num_key_value_heads=2, tie_word_embeddings=False), torch.bfloat16, "16KB"),
    "qwen3": (
        Qwen3Config(**SIZES, num_hidden_layers=2, num_key_value_heads=1, head_dim=16, tie_word_embeddings=True),
        torch.float16,
        "5GB",
    ),
    "gemma3": (
        Gemma3TextConfig(
            **SIZES,
            num_hidden_layers=2,
            num_key_value_heads=1,
            head_dim=16,
            query_pre_attn_scalar=24,
            sliding_window=5,
            layer_types=["sliding_attention", "full_attention"],
        ),
        torch.bfloat16,
        "5GB",
    ),
}


def random_model(config, dtype, seed):
    """A model whose every weight, biases and norms too, is random and exactly representable in ``dtype``; computes in float32."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.15) if parameter.ndim > 1 else parameter.add_(0.3 * torch.randn_like(parameter))
            parameter.copy_(parameter.to(dtype))  # not model.to(dtype).float(): that would round its rotary frequencies too
    return model


def expected(model, tokens):
    """Logits of each row alone, float32."""
    with torch.no_grad():
        return np.stack([model(torch.tensor(row)[None]).logits[0].numpy() for row in tokens])


def main():
    for seed, (name, (config, dtype, shard)) in enumerate(MODELS.items()):
        folder = HERE / name
        shutil.rmtree(folder, ignore_errors=True)
        model = random_model(config, dtype, seed)
        tokens = np.random.default_rng(seed).integers(0, 64, (2, LENGTH)).astype(np.int32)
        logits = expected(model, tokens)
        model.to(dtype).save_pretrained(folder, max_shard_size=shard)
        (folder / "generation_config.json").unlink(missing_ok=True)
        np.savez_compressed(folder / "expected.npz", tokens=tokens, logits=logits)
        print(name, sorted(p.name for p in folder.iterdir()), float(np.abs(logits).max()))
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    (HERE / "made_with.json").write_text(json.dumps(versions) + "\n")


if __name__ == "__main__":
    main()
