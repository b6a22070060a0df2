"""The seams of the experience manager: what it needs from models and chat templates, and nothing more.

Owns: structural types only. The sampler of ``crl_jax.serving`` and the embedder of ``crl_jax.models`` satisfy them without importing this
file.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from jaxtyping import Float

from crl_jax.records import Completion, SamplingParams


class Message(NamedTuple):
    """One chat message. ``role`` is system, user or assistant; ``content`` is text in which special tokens are inert."""

    role: str
    content: str


class Render(Protocol):
    """Chat messages to prompt ids, ending with the opened assistant turn. ``content`` must be encoded without special tokens."""

    def __call__(self, messages: Sequence[Message], /) -> Sequence[int]: ...


class Decode(Protocol):
    """Sampled ids to text; special tokens (the stop token) are left out or appear as text, the parser accepts both after the answer."""

    def __call__(self, ids: Sequence[int], /) -> str: ...


class Words(Protocol):
    """A tokenizer with its chat template: `Render`, `Decode`, and the ids that end a completion."""

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end a completion."""
        ...

    def render(self, messages: Sequence[Message], /) -> Sequence[int]:
        """As `Render`."""
        ...

    def decode(self, ids: Sequence[int], /) -> str:
        """As `Decode`."""
        ...


class Completer(Protocol):
    """The part of the Sampler protocol that the extractor needs."""

    async def complete(self, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        """One completion of a prompt, without a session."""
        ...


class Embedder(Protocol):
    """Texts to vectors. ``fingerprint`` names model and pooling: vectors with different fingerprints are never compared."""

    @property
    def dim(self) -> int:
        """Length of a vector."""
        ...

    @property
    def fingerprint(self) -> str:
        """Name of model and pooling."""
        ...

    def embed(self, texts: list[str], /) -> Float[np.ndarray, "n d"]:
        """One float32 row per text. Called from the search and the writer thread, at times from both at once."""
        ...
