"""Hugging Face's ``config.json`` to and from ``ModelConfig``.

Owns: the supported families and what each fixes, the reading of every field that changes the result, and the refusal of what the
transformer cannot do. Promises: a configuration that is read means the same model there and here; one that cannot be represented is an
error that names the field, its value and what is supported; nothing is guessed from the name of a folder. Does not: read weights.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from crl_jax.models.config import ModelConfig, RopeScaling

ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
ROPE_TYPES = ("default", "linear", "llama3")


@dataclasses.dataclass(frozen=True)
class Family:
    """What a ``model_type`` fixes: ``switches`` of ModelConfig, and ``defaults`` for fields its config.json may leave out.

    ``off`` are the fields that must be absent, null or false, because the transformer has nothing for them.
    """

    architecture: str
    switches: Mapping[str, Any]
    defaults: Mapping[str, Any]
    off: tuple[str, ...] = ()


_COMMON = {"tie_word_embeddings": False, "rms_norm_eps": 1e-6, "rope_theta": 10_000.0, "hidden_act": "silu"}
_GEMMA = {
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "rope_local_base_freq": 10_000.0,
    "hidden_activation": "gelu_pytorch_tanh",
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
}
FAMILIES: Mapping[str, Family] = {
    "llama": Family("LlamaForCausalLM", {}, _COMMON, off=("attention_bias", "mlp_bias")),
    "qwen2": Family("Qwen2ForCausalLM", {"qkv_bias": True}, _COMMON),
    "qwen3": Family("Qwen3ForCausalLM", {"qk_norm": True}, {**_COMMON, "head_dim": 128}, off=("attention_bias",)),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        {"qk_norm": True, "post_norms": True, "norm_offset": 1.0},
        _GEMMA,
        off=("attention_bias", "attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"),
    ),
}
_SIZES = {
    "vocab_size": "vocab_size",
    "d_model": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "d_ff": "intermediate_size",
    "max_positions": "max_position_embeddings",
}


def read_hf_config(folder: str | os.PathLike[str]) -> ModelConfig:
    """The model of ``folder/config.json``, named after the folder. Raises like ``from_hf_config``, and FileNotFoundError."""
    path = pathlib.Path(folder) / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist: give a Hugging Face model folder (config.json, *.safetensors, tokenizer.json)")
    return from_hf_config(json.loads(path.read_text(encoding="utf-8")), name=path.parent.resolve().name)


def from_hf_config(config: Mapping[str, Any], *, name: str) -> ModelConfig:
    """The model that the fields of a ``config.json`` describe.

    Raises ValueError for an unknown ``model_type``, a missing size, or a feature the transformer does not have; the message says what is
    supported.
    """
    kind = str(config.get("model_type"))
    if kind not in FAMILIES:
        families = ", ".join(f"{known} ({family.architecture})" for known, family in FAMILIES.items())
        raise ValueError(f"model `{name}` has model_type={kind!r} ({config.get('architectures')}): supported are {families}")
    family = FAMILIES[kind]
    fields = {**family.defaults, **{key: value for key, value in config.items() if value is not None}}
    _refuse(name, family, fields)
    missing = [key for key in (*_SIZES.values(), *(("head_dim",) if "head_dim" in family.defaults else ())) if key not in fields]
    if missing:
        raise ValueError(f"model `{name}`: config.json has no {', '.join(missing)}: use the file that came with the weights")
    n_heads = fields["num_attention_heads"]
    theta, scaling, local_theta = _rope(name, fields)
    local = _local_layers(name, kind, fields)
    return ModelConfig(
        name=name,
        **{ours: int(fields[theirs]) for ours, theirs in _SIZES.items()},
        n_kv_heads=int(fields.get("num_key_value_heads", n_heads)),
        head_dim=int(fields.get("head_dim", fields["hidden_size"] // n_heads)),
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=float(fields["rms_norm_eps"]),
        tie_embeddings=bool(fields["tie_word_embeddings"]),
        activation=_activation(name, fields),
        window=int(fields["sliding_window"]) if local else 0,
        local_layers=local,
        local_rope_theta=local_theta if local else None,
        embed_scale=fields["hidden_size"] ** 0.5 if kind == "gemma3_text" else 1.0,
        query_scale=fields["query_pre_attn_scalar"] ** -0.5 if "query_pre_attn_scalar" in family.defaults else None,
        **family.switches,
    )


def to_hf_config(config: ModelConfig, *, dtype: str) -> dict[str, Any]:
    """A ``config.json`` that means ``config``; ``dtype`` is the name of the stored type (``bfloat16``).

    Raises ValueError when no supported family has this combination of switches.
    """
    for kind, family in FAMILIES.items():
        fields = {
            "architectures": [family.architecture],
            "model_type": kind,
            "torch_dtype": dtype,
            **{theirs: getattr(config, ours) for ours, theirs in _SIZES.items()},
            "num_key_value_heads": config.n_kv_heads,
            "head_dim": config.head_dim,
            "rms_norm_eps": config.norm_eps,
            "tie_word_embeddings": config.tie_embeddings,
            "rope_theta": config.rope_theta,
            "rope_scaling": _scaling_fields(config.rope_scaling),
            ("hidden_activation" if "hidden_activation" in family.defaults else "hidden_act"): {
                ours: theirs for theirs, ours in ACTIVATIONS.items()
            }[config.activation],
        }
        if kind == "gemma3_text":
            fields |= {
                "query_pre_attn_scalar": round((config.query_scale or config.head_dim**-0.5) ** -2),  # transformers insists on an integer
                "rope_local_base_freq": config.local_rope_theta,
            }
        if config.local_layers:
            fields |= {
                "sliding_window": config.window,
                "layer_types": ["sliding_attention" if i in config.local_layers else "full_attention" for i in range(config.n_layers)],
            }
            if kind == "qwen2":
                fields["use_sliding_window"], fields["max_window_layers"] = True, min(config.local_layers)
        try:
            back = from_hf_config(fields, name=config.name)
        except ValueError:
            continue  # this family refuses the combination; another may have it
        if _same(back, config):
            return fields
    raise ValueError(f"model `{config.name}` fits none of {[f.architecture for f in FAMILIES.values()]}: {config}")


def _same(a: ModelConfig, b: ModelConfig) -> bool:
    """Whether two configs are one model; the query scale may differ by rounding of its square."""

    def scale(c: ModelConfig) -> float:
        return c.query_scale or c.head_dim**-0.5

    return abs(scale(a) - scale(b)) < 1e-9 and dataclasses.replace(a, query_scale=None) == dataclasses.replace(b, query_scale=None)


def _refuse(name: str, family: Family, fields: Mapping[str, Any]) -> None:
    """Raises ValueError for a feature that changes the result and that the transformer does not have."""
    on = [f"{key}={fields[key]!r}" for key in family.off if fields.get(key)]
    if on:
        raise ValueError(f"model `{name}` ({family.architecture}) uses {', '.join(on)}: not supported, these must be off")
    if fields.get("quantization_config"):
        raise ValueError(
            f"model `{name}` is quantised ({fields['quantization_config'].get('quant_method')}): use its bf16 weights, or GGUF"
        )
    if float(fields.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ValueError(f"model `{name}`: partial_rotary_factor={fields['partial_rotary_factor']}: only full rotation (1.0) is supported")


def _activation(name: str, fields: Mapping[str, Any]) -> Any:
    found = fields.get("hidden_activation", fields.get("hidden_act"))
    if found not in ACTIVATIONS:
        raise ValueError(f"model `{name}`: activation {found!r} is not supported: use one of {sorted(ACTIVATIONS)}")
    return ACTIVATIONS[found]


def _rope(name: str, fields: Mapping[str, Any]) -> tuple[float, RopeScaling | None, float | None]:
    """Base and scaling of the rotary frequencies, and the base of local layers (None: the same as the others).

    The file has them as ``rope_theta`` and ``rope_scaling``, or together in ``rope_parameters``, which may be split by kind of layer.
    """
    parameters = fields.get("rope_parameters") or {}
    by_kind = "full_attention" in parameters
    main = parameters["full_attention"] if by_kind else parameters
    local = fields.get("rope_local_base_freq")
    if by_kind:
        sliding = parameters["sliding_attention"]
        if sliding.get("rope_type", "default") != "default":
            raise ValueError(f"model `{name}`: rope_type={sliding['rope_type']!r} of sliding layers: only `default` is supported")
        local = sliding["rope_theta"]
    scaling = fields.get("rope_scaling") or main
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in ROPE_TYPES:
        raise ValueError(f"model `{name}`: rope_type={kind!r} is not supported: use one of {list(ROPE_TYPES)}")
    theta = float(main.get("rope_theta", fields["rope_theta"]))
    local = None if local is None else float(local)
    if kind == "default":
        return theta, None, local
    if kind == "linear":
        return theta, RopeScaling("linear", float(scaling["factor"])), local
    return (
        theta,
        RopeScaling(
            "llama3",
            factor=float(scaling["factor"]),
            low_freq_factor=float(scaling["low_freq_factor"]),
            high_freq_factor=float(scaling["high_freq_factor"]),
            original_positions=int(scaling["original_max_position_embeddings"]),
        ),
        local,
    )


def _scaling_fields(scaling: RopeScaling | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    if scaling.kind == "linear":
        return {"rope_type": "linear", "factor": scaling.factor}
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_positions,
    }


def _local_layers(name: str, kind: str, fields: Mapping[str, Any]) -> tuple[int, ...]:
    """Layers with a sliding window."""
    layers = range(int(fields["num_hidden_layers"]))
    windowed = kind == "gemma3_text" or bool(fields.get("use_sliding_window"))
    if not windowed or not fields.get("sliding_window"):
        return ()
    if "layer_types" in fields:
        unknown = set(fields["layer_types"]) - {"full_attention", "sliding_attention"}
        if unknown or len(fields["layer_types"]) != len(layers):
            raise ValueError(
                f"model `{name}`: layer_types has {len(fields['layer_types'])} entries for {len(layers)} layers, unknown: "
                f"{sorted(unknown)}; supported are full_attention and sliding_attention, one per layer"
            )
        return tuple(i for i in layers if fields["layer_types"][i] == "sliding_attention")
    if kind == "gemma3_text":
        every = int(fields.get("_sliding_window_pattern", fields["sliding_window_pattern"]))
        return tuple(i for i in layers if (i + 1) % every)
    return tuple(i for i in layers if i >= int(fields.get("max_window_layers", 28)))
