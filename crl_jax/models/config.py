"""The shape of a decoder-only transformer.

Owns: ``ModelConfig`` and the consistency rules between its numbers. Promises: a ``ModelConfig`` that exists can be built. Does not: know
presets (``presets``) or arrays (``transformer``).
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Sizes and switches of one Llama-shaped transformer (``qkv_bias`` for Qwen2, ``qk_norm`` for Qwen3).

    ``d_model`` is the residual width, ``d_ff`` the SwiGLU width, ``rope_theta`` the base of the rotary frequencies, ``norm_eps`` the
    epsilon of every RMSNorm, ``max_positions`` the longest sequence the model was made for (a limit for callers; RoPE itself has none),
    ``tie_embeddings`` whether the output head is the embedding table.

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

    @property
    def queries_per_kv(self) -> int:
        """Query heads that share one key/value head."""
        return self.n_heads // self.n_kv_heads
