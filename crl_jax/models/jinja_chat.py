"""A checkpoint's own chat template, taken apart into what stands around messages.

Owns: rendering a jinja chat template in a sandbox, finding by probe conversations what it puts before, between and after messages, and the
check that a conversation built piece by piece has the ids of one rendered at once. Promises: a template that does not grow by appending is
refused with the conversation that shows it. Does not: run the template after loading; every later prompt is made of the pieces found here.

What the pieces follow and what not:

- A message's text goes in as it is; a template that strips it differs for texts with outer white space.
- A sampled reply stays as it was sampled. Templates that remove earlier reasoning when they render a history (Qwen3) are not followed
  there: the ids a model has seen and sampled are the record.
- No clock is given to the template, so one that prints today's date prints its built-in one.
- Where a template has no role for tool results, they are given as user messages.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox

from crl_jax.models.chat import ChatTemplate
from crl_jax.models.codec import ChatCodec
from crl_jax.models.hf_tokenizer import HFTokenizer

# Conversations that end before a reply; between them they show every pair of neighbours an episode or a prompt has.
PROBES = (
    ("user",),
    ("system", "user"),
    ("user", "assistant", "user"),
    ("system", "user", "assistant", "user", "assistant", "user"),
    ("user", "assistant", "tool"),
    ("user", "assistant", "tool", "assistant", "user"),
)
TEXTS = ("You see 3 doors.\nOne is open", "north", "it's dark, isn't it", "go 12 steps", "look", "nothing")
SAMPLED = None  # the neighbour of a message that a reply is sampled after


class _Message:
    def __init__(self, role: str, content: str):
        self.role, self.content = role, content


class TemplateRenderer:
    """A chat template and the special tokens it may name (``bos_token``, ``eos_token``)."""

    def __init__(self, source: str, tokens: Mapping[str, str], *, name: str):
        """Raises ValueError when the source is no valid template."""
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise
        self._tokens, self.name = dict(tokens), name
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"the chat template of {name} is no valid jinja template (line {error.lineno}: {error.message})") from error

    def render(self, messages: Iterable[tuple[str, str]], *, reply: bool) -> str | None:
        """The text of (role, content) pairs, with the beginning of a reply if ``reply``. None when the template refuses them."""
        turns = [{"role": role, "content": content} for role, content in messages]
        try:
            return self._template.render(messages=turns, add_generation_prompt=reply, tools=None, documents=None, **self._tokens)
        except (jinja2.TemplateError, TypeError):  # TypeError: the template did arithmetic on something this conversation lacks
            return None

    def around(self, roles: Sequence[str], *, reply: bool) -> list[str] | None:
        """What stands before, between and after messages of these roles: one text more than there are roles.

        None when the template refuses them, or does not show each message exactly once and in order.
        """
        marks = [f"probe{i}mark" for i in range(len(roles))]
        rest = self.render(zip(roles, marks, strict=True), reply=reply)
        if rest is None or any(rest.count(mark) != 1 for mark in marks):
            return None
        pieces: list[str] = []
        for mark in marks:
            before, found, rest = rest.partition(mark)
            if not found:
                return None
            pieces.append(before)
        return [*pieces, rest]


def template_codec(tokenizer: HFTokenizer, renderer: TemplateRenderer, *, stop_ids: Sequence[int] = ()) -> ChatCodec:
    """The tokenizer with the template's pieces as a ``ChatTemplate``.

    ``stop_ids`` are further ids that end a reply, besides the one the template puts after it (``generation_config.json``). Raises
    ValueError when the template cannot be used that way; the message shows the conversation.
    """
    gaps, tails = _gaps(renderer)
    closings = {role: _closing([gap for (before, _), gap in gaps.items() if before == role], tails.get(role)) for role in tails}
    openings: dict[tuple[str | None, str], str] = {}
    replies: dict[str, str] = {}
    for (before, role), gap in gaps.items():
        text = gap if before is None else gap.removeprefix(closings[before])
        if role is SAMPLED:
            replies[str(before)] = text
        else:
            openings[before, str(role)] = text
    if len(set(replies.values())) > 1:
        raise ValueError(f"the chat template of {renderer.name} begins a reply in several ways {replies}: not supported")
    encode = tokenizer.encode_markup
    after_reply = encode(closings["assistant"])
    if not after_reply or after_reply[0] not in tokenizer.markers.values():
        raise ValueError(
            f"the chat template of {renderer.name} puts {closings['assistant']!r} after a reply, which does not begin with a special "
            "token: a reply would have no end; use a template that ends replies with one"
        )
    chat = ChatTemplate(
        headers={},
        stop_ids=tuple(dict.fromkeys((after_reply[0], *stop_ids))),
        after_stop=tuple(after_reply[1:]),
        openings={pair: tuple(encode(text)) for pair, text in openings.items()},
        closings={role: tuple(encode(text)) for role, text in closings.items()},
        reply_header=tuple(encode(next(iter(replies.values())))),
    )
    codec = ChatCodec(tokenizer, chat)
    _check_incremental(codec, tokenizer, renderer)
    return codec


def _gaps(renderer: TemplateRenderer) -> tuple[dict[tuple[str | None, str | None], str], dict[str, str | None]]:
    """What the template puts between neighbours, and after a conversation's last message, by role.

    Neighbours are (role before, or None at the beginning; role after, or ``SAMPLED``).
    """
    gaps: dict[tuple[str | None, str | None], str] = {}
    tails: dict[str, str | None] = {}
    for roles in PROBES:
        around = renderer.around(roles, reply=True)
        if around is None:
            continue
        for before, after, gap in zip((None, *roles), (*roles, SAMPLED), around, strict=True):
            if gaps.setdefault((before, after), gap) != gap:
                raise ValueError(
                    f"the chat template of {renderer.name} is not incremental: between {before or 'the beginning'} and "
                    f"{after or 'a reply'} it puts {gaps[before, after]!r} in one conversation and {gap!r} in another ({', '.join(roles)})"
                )
    if ("user", SAMPLED) not in gaps or ("assistant", "user") not in gaps:
        raise ValueError(
            f"the chat template of {renderer.name} does not render user, assistant, user with each text once: use a chat template that does"
        )
    for roles in (("system",), ("user",), ("user", "assistant"), ("user", "assistant", "tool")):
        if any(before == roles[-1] for before, _ in gaps):
            around = renderer.around(roles, reply=False)
            tails[roles[-1]] = None if around is None else around[-1]
    if ("assistant", "tool") not in gaps:
        gaps |= {("assistant", "tool"): gaps["assistant", "user"], ("tool", SAMPLED): gaps["user", SAMPLED]}
        gaps["tool", "assistant"] = gaps["user", "assistant"]
        tails["tool"] = tails["user"]
    return gaps, tails


def _closing(gaps: Sequence[str], tail: str | None) -> str:
    """What follows a message whatever comes next: the end of a conversation if every gap begins with it, else what the gaps share."""
    if tail is not None and all(gap.startswith(tail) for gap in gaps):
        return tail
    return os.path.commonprefix(list(gaps))


def _check_incremental(codec: ChatCodec, tokenizer: HFTokenizer, renderer: TemplateRenderer) -> None:
    for roles in PROBES:
        messages = list(zip(roles, TEXTS, strict=False))
        at_once = renderer.render(messages, reply=True)
        if at_once is None or renderer.around(roles, reply=True) is None:
            continue
        grown = codec.render([_Message(role, text) for role, text in messages])
        expected = tokenizer.encode_at_once(at_once)
        if grown != expected:
            raise ValueError(
                f"the chat template of {renderer.name} is not incremental for {', '.join(roles)}: at once it is {at_once!r}, ids "
                f"{expected}; message by message the ids are {grown}. Put a template that only appends into "
                "chat_template.jinja of the model folder"
            )


def _tojson(value: Any, indent: int | None = None) -> str:
    """JSON without HTML escapes, as templates of language models expect."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
