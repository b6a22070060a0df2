"""Text to token ids and back, with the role markers of a chat template.

Owns: how a message becomes ids. Promises: special tokens inside a text are inert; rendering a conversation message by message gives the
ids of rendering it at once. Does not: keep any conversation (the token log does).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

from crl_jax.models.chat import ChatTemplate
from crl_jax.models.tokenizer import Tokenizer


class Message(Protocol):
    """One chat message: its role (system, user, assistant, tool) and its text."""

    @property
    def role(self) -> str:
        """Who speaks; one of `crl_jax.models.chat.ROLES`."""
        ...

    @property
    def content(self) -> str:
        """What is said."""
        ...


@dataclasses.dataclass(frozen=True)
class ChatCodec:
    """A tokenizer with its chat template."""

    tokenizer: Tokenizer
    chat: ChatTemplate

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end a reply."""
        return tuple(self.chat.stop_ids)

    def encode(self, text: str) -> list[int]:
        """Ids of plain text."""
        return list(self.tokenizer.encode(text))

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids."""
        return self.tokenizer.decode(list(ids))

    def open(self, role: str, after: str | None = None) -> list[int]:
        """Ids that begin a message of ``role`` after one of role ``after`` (None: the first message)."""
        return list(self.chat.open(role, after))

    def close(self, role: str = "user") -> list[int]:
        """Ids that end a message of ``role``."""
        return list(self.chat.close(role))

    def reply(self) -> list[int]:
        """Ids that begin a reply to be sampled."""
        return list(self.chat.reply())

    def after_reply(self) -> list[int]:
        """Ids the template puts after the stop token the model sampled."""
        return list(self.chat.after_reply())

    def render(self, messages: Sequence[Message]) -> list[int]:
        """A whole prompt that ends with the beginning of a reply."""
        ids: list[int] = []
        before: str | None = None
        for message in messages:
            ids += [*self.open(message.role, before), *self.encode(message.content), *self.close(message.role)]
            before = message.role
        return ids + self.reply()
