"""What a chat template puts around messages, as token ids.

Owns: ``ChatTemplate`` and the two templates in use (ChatML, micro). Promises: what stands around a message does not depend on the messages
beside it, so a conversation can grow by appending. Does not: encode texts (``codec`` does), or add a default system message.

An assistant turn is ``open("assistant")``, the sampled ids, then ``after_reply()`` if the last sampled id is a stop id, else ``close()``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from crl_jax.models.tokenizer import Tokenizer

ROLES = ("system", "user", "assistant", "tool")


@dataclasses.dataclass(frozen=True)
class ChatTemplate:
    """Ids around each message. ``stop_ids`` end a sampled reply; ``after_stop`` is what ``close()`` has after the stop id."""

    headers: Mapping[str, tuple[int, ...]]
    stop_ids: tuple[int, ...]
    after_stop: tuple[int, ...] = ()

    def open(self, role: str) -> list[int]:
        """Ids before a message of ``role``. Raises ValueError naming the roles."""
        if role not in self.headers:
            raise ValueError(f"unknown chat role `{role}`: use one of {list(self.headers)}")
        return list(self.headers[role])

    def close(self) -> list[int]:
        """Ids after a message that was not sampled, or after a reply that was cut before its stop id."""
        return [self.stop_ids[0], *self.after_stop]

    def after_reply(self) -> list[int]:
        """Ids after a sampled stop id."""
        return list(self.after_stop)


def chatml(tokenizer: Tokenizer) -> ChatTemplate:
    """``<|im_start|>role\\n`` text ``<|im_end|>\\n``, the template of SmolLM2 and Qwen."""
    start, end = _special(tokenizer, "<|im_start|>"), _special(tokenizer, "<|im_end|>")
    headers = {role: (start, *tokenizer.encode(f"{role}\n")) for role in ROLES}
    return ChatTemplate(headers, stop_ids=(end,), after_stop=tuple(tokenizer.encode("\n")))


def micro_chat(tokenizer: Tokenizer) -> ChatTemplate:
    """One special token per role before the text and ``<|end|>`` after it."""
    headers = {role: (_special(tokenizer, f"<|{role}|>"),) for role in ROLES}
    return ChatTemplate(headers, stop_ids=(_special(tokenizer, "<|end|>"),))


def _special(tokenizer: Tokenizer, name: str) -> int:
    if name not in tokenizer.special:
        raise ValueError(f"the tokenizer has no special token {name}: it has {sorted(tokenizer.special)}; use the template made for it")
    return tokenizer.special[name]
