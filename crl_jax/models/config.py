"""The shape of a decoder-only transformer.

Owns: ``ModelConfig`` and the consistency rules between its numbers. Promises: a ``ModelConfig`` that exists can be built. Does not: know
presets (``presets``) or arrays (``transformer``).
"""

from __future__ import annotations

import dataclasses
from typing import Literal

Activation = Literal["silu", "gelu_tanh"]


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """How the rotary frequencies are stretched for contexts longer than those of pretraining.

    ``linear``: every frequency is divided by ``factor``. ``llama3`` (Llama 3.1 and later): with wavelengths counted in tokens, those above
    ``original_positions / low_freq_factor`` are divided by ``factor``, those below ``original_positions / high_freq_factor`` are kept, and
    in between the two are mixed linearly in the number of turns over ``original_positions``.
    """

    kind: Literal["linear", "llama3"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_positions: int = 8192

    def __post_init__(self) -> None:
        if self.factor < 1 or not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ValueError(f"{self}: factor must be at least 1 and 0 < low_freq_factor < high_freq_factor")


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Sizes and switches of one decoder-only transformer; the defaults of the switches make it Llama-shaped.

    Sizes: ``d_model`` is the residual width, ``d_ff`` the width of the gated MLP, ``norm_eps`` the epsilon of every RMSNorm,
    ``max_positions`` the longest sequence the model was made for (a limit for callers; RoPE itself has none), ``tie_embeddings`` whether
    the output head is the embedding table.

    Switches, with the family that needs them: ``qkv_bias`` (Qwen2); ``qk_norm``, an RMSNorm of each query and key head before the rotation
    (Qwen3, Gemma 3); ``rope_theta`` and ``rope_scaling``, the base of the rotary frequencies and their stretching (Llama 3); ``window``
    with ``local_layers``, the layers (from 0) that see only the last ``window`` tokens, the token itself among them, and rotate with base
    ``local_rope_theta``, unscaled (None: like the other layers); ``post_norms``, a norm on what attention and MLP add to the residual;
    ``norm_offset``, added to every norm's stored weight (Gemma stores w - 1); ``embed_scale``, the factor on embeddings; ``query_scale``,
    the factor on queries (None: head_dim^-0.5); ``activation`` of the MLP's gate (Gemma 3 for all of them).

    Raises ValueError from the constructor when the numbers do not fit together; the message names the field and what to change.
    """

    name: str
    vocab_size: int
    d_model: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    d_ff: int
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    tie_embeddings: bool = True
    qkv_bias: bool = False
    qk_norm: bool = False
    max_positions: int = 2048
    rope_scaling: RopeScaling | None = None
    window: int = 0
    local_layers: tuple[int, ...] = ()
    local_rope_theta: float | None = None
    post_norms: bool = False
    norm_offset: float = 0.0
    embed_scale: float = 1.0
    query_scale: float | None = None
    activation: Activation = "silu"

    def __post_init__(self) -> None:
        for field in ("vocab_size", "d_model", "n_layers", "n_heads", "n_kv_heads", "head_dim", "d_ff", "max_positions"):
            if getattr(self, field) < 1:
                raise ValueError(f"model `{self.name}`: {field}={getattr(self, field)} must be at least 1")
        if self.n_heads % self.n_kv_heads:
            divisors = [d for d in range(1, self.n_heads + 1) if self.n_heads % d == 0]
            raise ValueError(
                f"model `{self.name}`: n_kv_heads={self.n_kv_heads} does not divide n_heads={self.n_heads}: use one of {divisors}"
            )
        if self.head_dim % 2:
            raise ValueError(f"model `{self.name}`: head_dim={self.head_dim} is odd, RoPE rotates pairs: use {self.head_dim + 1}")
        if self.rope_theta <= 0 or self.norm_eps <= 0:
            raise ValueError(f"model `{self.name}`: rope_theta={self.rope_theta} and norm_eps={self.norm_eps} must be positive")
        if self.local_layers and (self.window < 1 or not set(self.local_layers) <= set(range(self.n_layers))):
            raise ValueError(
                f"model `{self.name}`: local_layers={self.local_layers} with window={self.window} in {self.n_layers} layers: "
                f"the window must be at least 1 and every layer below {self.n_layers}"
            )
        if self.activation not in ("silu", "gelu_tanh"):
            raise ValueError(f"model `{self.name}`: activation={self.activation!r} is unknown: use silu or gelu_tanh")

    @property
    def queries_per_kv(self) -> int:
        """Query heads that share one key/value head."""
        return self.n_heads // self.n_kv_heads


def check_same_model(config: ModelConfig, found: ModelConfig, *, source: str) -> None:
    """Check that two configurations compute the same function; names and ``max_positions`` may differ.

    Raises ValueError naming the fields of ``config`` that disagree with those of ``source``.
    """
    wrong = [
        f"{field.name}={getattr(config, field.name)!r} instead of {getattr(found, field.name)!r}"
        for field in dataclasses.fields(ModelConfig)
        if field.name not in ("name", "max_positions") and getattr(config, field.name) != getattr(found, field.name)
    ]
    if wrong:
        raise ValueError(f"model `{config.name}` is not that of {source} ({', '.join(wrong)}): set the model to {source} itself")
