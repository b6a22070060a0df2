"""Text to token ids and back.

Owns: the ``Tokenizer`` protocol, byte-level BPE (real models) and longest-match pieces (micro models). Promises: text is untrusted, so a
special token spelled out in it becomes ordinary ids, never the special one; special ids enter a sequence only through a chat template. Does
not: decide what surrounds a message (``chat``), pad or truncate.
"""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, runtime_checkable

import tokenizers
from tokenizers import decoders, models, pre_tokenizers


@runtime_checkable
class Tokenizer(Protocol):
    """What the rest of the system needs of a tokenizer. Decoding is for reading: ids are the record and are never made again from text."""

    @property
    def vocab_size(self) -> int:
        """Number of ids, special ones included."""
        ...

    @property
    def special(self) -> Mapping[str, int]:
        """Special tokens, name -> id."""
        ...

    def encode(self, text: str) -> list[int]:
        """Ids of ``text``; special tokens spelled in it are inert."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ``ids``; special tokens have none."""
        ...


class ByteLevelBPE:
    """Byte-level BPE with single digits split off first (SmolLM's pre-tokenizer). Any text round-trips."""

    def __init__(self, core: tokenizers.Tokenizer, special: Mapping[str, int]):
        self._core = core
        self._special = dict(special)
        self._special_ids = frozenset(special.values())

    @classmethod
    def build(cls, vocab: Mapping[str, int], merges: Sequence[tuple[str, str]], special: Mapping[str, int]) -> ByteLevelBPE:
        """From a vocabulary (special tokens included) and ranked merges. The special tokens are not registered with the engine: that keeps
        them inert, because no merge produces them.
        """
        core = tokenizers.Tokenizer(models.BPE(vocab=dict(vocab), merges=list(merges)))
        core.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        core.decoder = decoders.ByteLevel()
        return cls(core, special)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> ByteLevelBPE:
        """Read what ``save`` wrote."""
        stored = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
        return cls(tokenizers.Tokenizer.from_str(json.dumps(stored["tokenizer"])), stored["special"])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write one JSON file, atomically."""
        target = pathlib.Path(path)
        temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
        temporary.write_text(json.dumps({"special": self._special, "tokenizer": json.loads(self._core.to_str())}), encoding="utf-8")
        os.replace(temporary, target)

    @property
    def vocab_size(self) -> int:
        return self._core.get_vocab_size()

    @property
    def special(self) -> Mapping[str, int]:
        return self._special

    def token(self, token_id: int) -> str:
        """The token as the vocabulary spells it; empty for an id without one."""
        return self._core.id_to_token(token_id) or ""

    def encode(self, text: str) -> list[int]:
        return self._core.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Iterable[int]) -> str:
        return self._core.decode([int(i) for i in ids if int(i) not in self._special_ids], skip_special_tokens=False)


UNKNOWN = "<unk>"


class PieceTokenizer:
    """A fixed list of text pieces (words, often with their leading space, and characters), the longest match first.

    Concatenation is decoding, so text made of known pieces round-trips exactly. Each character no piece starts at becomes the id of
    ``<unk>``, which has no text.

    Vocabulary file: one piece per line as a JSON string, so spaces and newlines are exact; ``special "<|end|>"`` for a special token
    (``<unk>`` among them); empty lines and lines that start with ``#`` are skipped. The n-th entry has id n.
    """

    def __init__(self, pieces: Sequence[str], special: Mapping[str, int]):
        """``pieces[i]`` is the text of id i; ``special`` names the ids that are special. Raises ValueError for a repeated or empty piece or
        no ``<unk>``.
        """
        if UNKNOWN not in special:
            raise ValueError(f'the piece vocabulary has no {UNKNOWN}: add the line: special "{UNKNOWN}"')
        self._pieces = tuple(pieces)
        self._special = dict(special)
        special_ids = frozenset(special.values())
        self._ids: dict[str, int] = {}
        lengths: dict[str, set[int]] = {}
        for i, piece in enumerate(pieces):
            if i in special_ids:
                continue
            if not piece or piece in self._ids:
                raise ValueError(f"piece {i} of the vocabulary, {piece!r}, is {'repeated' if piece else 'empty'}: remove its line")
            self._ids[piece] = i
            lengths.setdefault(piece[0], set()).add(len(piece))
        self._lengths = {first: sorted(found, reverse=True) for first, found in lengths.items()}
        self._texts = tuple("" if i in special_ids else piece for i, piece in enumerate(pieces))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> PieceTokenizer:
        """Read a vocabulary file. Raises ValueError naming the line that is not a piece."""
        pieces: list[str] = []
        special: dict[str, int] = {}
        for number, line in enumerate(pathlib.Path(path).read_text(encoding="utf-8").split("\n"), start=1):
            entry = line.strip()
            if not entry or entry.startswith("#"):
                continue
            is_special = entry.startswith("special ")
            try:
                piece = json.loads(entry.removeprefix("special "))
            except json.JSONDecodeError as error:
                raise ValueError(f'{path}:{number}: {entry!r} is no JSON string: write it as " north" in double quotes') from error
            if not isinstance(piece, str):
                raise ValueError(f"{path}:{number}: {entry!r} is no JSON string: put it in double quotes")
            if is_special:
                special[piece] = len(pieces)
            pieces.append(piece)
        return cls(pieces, special)

    @property
    def vocab_size(self) -> int:
        return len(self._pieces)

    @property
    def special(self) -> Mapping[str, int]:
        return self._special

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        unknown, start, end = self._special[UNKNOWN], 0, len(text)
        while start < end:
            for length in self._lengths.get(text[start], ()):
                found = self._ids.get(text[start : start + length])
                if found is not None:
                    ids.append(found)
                    start += length
                    break
            else:
                ids.append(unknown)
                start += 1
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        return "".join(self._texts[int(i)] for i in ids)
