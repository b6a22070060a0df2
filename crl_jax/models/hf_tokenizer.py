"""The ``tokenizer.json`` of a Hugging Face model folder.

Owns: encoding untrusted text and trusted template text with one ``tokenizers`` engine. Promises: in untrusted text no special token, and no
other marker that the chat template uses (``<think>``, ``<tool_response>``), becomes its id: it is spelled out in ordinary pieces and
decodes to the same text. Does not: add a begin-of-text token (the chat template does), pad or truncate.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
from collections.abc import Iterable, Mapping
from typing import Any

import tokenizers


class HFTokenizer:
    """A tokenizer in the format of the ``tokenizers`` library."""

    def __init__(self, definition: Mapping[str, Any], *, markup: str = ""):
        """``definition`` is the content of a tokenizer.json. Of its added tokens the special ones are inert in text, and so are those that
        occur in ``markup``, the source of the chat template; the rest (runs of spaces or newlines, say) are ordinary pieces of text.
        """
        added = {token["content"]: token for token in definition.get("added_tokens", ())}
        self._special = {text: int(token["id"]) for text, token in added.items() if token["special"]}
        self._markers = {text: int(token["id"]) for text, token in added.items() if token["special"] or (text.strip() and text in markup)}
        tokens = [{**token, "special": text in self._markers} for text, token in added.items()]
        core = tokenizers.Tokenizer.from_str(json.dumps({**definition, "added_tokens": tokens}))
        core.no_padding()
        core.no_truncation()
        core.encode_special_tokens = True  # special tokens in text are text
        self._core = core
        self._special_ids = frozenset(self._special.values())
        longest_first = sorted(self._markers, key=len, reverse=True)
        self._split = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")") if longest_first else None
        self._size = max(core.get_vocab(with_added_tokens=True).values()) + 1

    @classmethod
    def load(cls, folder: str | os.PathLike[str], *, markup: str = "") -> HFTokenizer:
        """The tokenizer of a model folder. Raises FileNotFoundError when it has no tokenizer.json."""
        path = pathlib.Path(folder) / "tokenizer.json"
        if not path.is_file():
            raise FileNotFoundError(
                f"{path} does not exist: write one with transformers.AutoTokenizer.from_pretrained(...).save_pretrained({str(folder)!r})"
            )
        return cls(json.loads(path.read_text(encoding="utf-8")), markup=markup)

    @property
    def vocab_size(self) -> int:
        """One more than the largest id. The model's table may have more rows."""
        return self._size

    @property
    def special(self) -> Mapping[str, int]:
        return self._special

    @property
    def markers(self) -> Mapping[str, int]:
        """The tokens that only a template can put into a sequence: name -> id. Includes ``special``."""
        return self._markers

    def token(self, token_id: int) -> str:
        """The token as the vocabulary spells it; empty for an id without one."""
        return self._core.id_to_token(token_id) or ""

    def encode(self, text: str) -> list[int]:
        return self._core.encode(text, add_special_tokens=False).ids

    def encode_markup(self, text: str) -> list[int]:
        """Ids of trusted text, with its markers as markers: what a template puts around messages."""
        if self._split is None:
            return self.encode(text)
        ids: list[int] = []
        for part in self._split.split(text):
            if part:
                ids += [self._markers[part]] if part in self._markers else self.encode(part)
        return ids

    def encode_at_once(self, text: str) -> list[int]:
        """Ids of a whole rendered conversation as the engine itself finds its special tokens: what ``encode_markup`` must agree with.

        For checks while loading: other threads must not encode meanwhile.
        """
        self._core.encode_special_tokens = False
        ids = self._core.encode(text, add_special_tokens=False).ids
        self._core.encode_special_tokens = True
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ``ids``; special tokens have none, markers that are not special (``<think>``) are shown."""
        return self._core.decode([int(i) for i in ids if int(i) not in self._special_ids], skip_special_tokens=False)
