"""Importing JetStream's engine interface without paying for TensorFlow.

``jetstream.engine.engine_api`` itself needs only JAX and Flax, but it imports a tokenizer module that imports ``seqio``, which loads
TensorFlow (about 20 s and 1 GB) for two class names: a vocabulary base class and a SentencePiece vocabulary. Our engine builds its own
tokenizer and uses neither.

Owns: placing a stand-in for ``seqio`` while JetStream's modules are first imported, under a lock, and taking it away again.
Promises: if ``seqio`` is already imported the real one is used; afterwards ``import seqio`` elsewhere still gives the real package.
Consequence: in a process where this ran first, JetStream's own SentencePiece tokenizer raises a RuntimeError that says so; import
``seqio`` before this module to have it.
"""

from __future__ import annotations

import importlib
import sys
import threading
import types
from typing import Any

_LOCK = threading.Lock()
_NAMES = ("seqio", "seqio.vocabularies")


class _Vocabulary:
    """Takes the place of seqio's vocabulary classes; cannot be made."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError(
            "JetStream was imported without seqio: run `import seqio` before crl_jax.serving.jetstream_engine to use its vocabularies"
        )


def import_jetstream(module: str = "jetstream.engine.engine_api") -> Any:
    """The named JetStream module. Raises ImportError with the line that installs it when JetStream is absent."""
    with _LOCK:
        placed = "seqio" not in sys.modules and "jetstream.engine.token_utils" not in sys.modules
        if placed:
            package, vocabularies = (types.ModuleType(name) for name in _NAMES)
            vocabularies.Vocabulary = vocabularies.SentencePieceVocabulary = _Vocabulary  # type: ignore[attr-defined]
            package.vocabularies = vocabularies  # type: ignore[attr-defined]
            sys.modules.update(zip(_NAMES, (package, vocabularies), strict=True))
        try:
            return importlib.import_module(module)
        except ModuleNotFoundError as error:
            raise ImportError(f"{module} needs JetStream ({error}): pip install -e .[jetstream]") from error
        finally:
            if placed:
                for name in _NAMES:
                    sys.modules.pop(name, None)
