"""What a chat template puts around messages, as token ids.

Owns: ``ChatTemplate`` and two built-in templates (ChatML, micro); ``jinja_chat`` makes one from a checkpoint's own. Promises: what stands
around a message depends on its role and the role before it only, so a conversation can grow by appending. Does not: encode texts
(``codec`` does).

A sampled turn is ``reply()``, the sampled ids, then ``after_reply()`` if the last sampled id is a stop id, else ``close("assistant")``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from crl_jax.models.tokenizer import Tokenizer

ROLES = ("system", "user", "assistant", "tool")


@dataclasses.dataclass(frozen=True)
class ChatTemplate:
    """Ids around each message. ``stop_ids`` end a sampled reply; ``after_stop`` is what ``close()`` has after the stop id.

    ``headers`` has what stands before a message of each role. Where that is not the same everywhere, ``openings`` has it for a role after
    another one, ``(None, role)`` at the beginning of a conversation (a begin-of-text token, a default system message). ``closings`` has
    what stands after a message of a role, where it is not the stop id and ``after_stop``. ``reply_header`` is what stands before a reply
    that is to be sampled, where it is not the header of an assistant message.
    """

    headers: Mapping[str, tuple[int, ...]]
    stop_ids: tuple[int, ...]
    after_stop: tuple[int, ...] = ()
    openings: Mapping[tuple[str | None, str], tuple[int, ...]] = dataclasses.field(default_factory=dict)
    closings: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    reply_header: tuple[int, ...] | None = None

    def open(self, role: str, after: str | None = None) -> list[int]:
        """Ids before a message of ``role`` that follows one of role ``after`` (None: it is the first). Raises ValueError naming what the
        template knows.
        """
        found = self.openings.get((after, role), self.headers.get(role))
        if found is None:
            known = [*self.headers, *(f"{r} {f'after {a}' if a else 'first'}" for a, r in self.openings)]
            raise ValueError(f"unknown chat role `{role}` {f'after `{after}`' if after else 'at the beginning'}: use one of {known}")
        return list(found)

    def close(self, role: str = "user") -> list[int]:
        """Ids after a message of ``role`` that was not sampled, or (assistant) after a reply that was cut before its stop id."""
        return list(self.closings.get(role, (self.stop_ids[0], *self.after_stop)))

    def reply(self) -> list[int]:
        """Ids before a reply that is to be sampled; the message before it is closed."""
        return list(self.headers["assistant"] if self.reply_header is None else self.reply_header)

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
