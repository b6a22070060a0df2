"""How completions are written.

Owns: the JSON of answers and of stream events, in OpenAI's shape with vLLM's ``token_ids`` and our own ``token_versions``,
``token_states``, ``sampling_logprobs`` and ``weight_version``. Promises: ``token_logprobs`` are those of ``Completion.logps`` (the full
softmax at the request's temperature), ``sampling_logprobs`` those of ``Completion.sampling_logps``; all per-token lists of a choice have
one entry per sampled id, the stop id included; ``tokens`` joined are ``text``. Does not: sample.

``weight_version`` is the version that sampled the last token of the answer (of its first choice), or that of the weights in use when there
is no token.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from crl_jax.records import Completion, Finish
from crl_jax.serving.http.request import CompletionRequest
from crl_jax.serving.http.text import TextStream, pieces
from crl_jax.serving.progress import Sampled

Decode = Callable[[Sequence[int]], str]


def text_stream(request: CompletionRequest, decode: Decode) -> TextStream:
    """The text of one choice of ``request``."""
    return TextStream(decode, stop_strings=request.params.stop_strings, stop_ids=request.params.stop_ids)


def whole_choice(request: CompletionRequest, index: int, completion: Completion, decode: Decode) -> dict[str, Any]:
    """One finished choice."""
    text = text_stream(request, decode)
    words = pieces(text, completion.ids)
    sampled = Sampled(completion.ids, completion.logps, completion.versions, completion.sampling_logps)
    found = part_of_choice(request, index, words, sampled) | end_of_choice(request, completion, text)
    if any(completion.states):
        found["token_states"] = list(completion.states)
    return found


def part_of_choice(request: CompletionRequest, index: int, words: Sequence[str], sampled: Sampled, offset: int = 0) -> dict[str, Any]:
    """Some tokens of a choice, ``words`` being what each shows; ``offset`` is the length of the text before them."""
    choice: dict[str, Any] = {"index": index, "text": "".join(words), "logprobs": None, "finish_reason": None, "stop_reason": None}
    if request.logprobs:
        offsets = [offset + sum(map(len, words[:i])) for i in range(len(words))]
        names = [f"token_id:{i}" for i in sampled.ids] if request.tokens_as_ids else list(words)
        choice["logprobs"] = {
            "tokens": names,
            "token_logprobs": list(sampled.logps),
            "top_logprobs": None,
            "text_offset": offsets,
            "sampling_logprobs": list(sampled.sampling_logps),
        }
    if request.token_ids:
        choice |= {"token_ids": list(sampled.ids), "token_versions": list(sampled.versions)}
    return choice


def end_of_choice(request: CompletionRequest, completion: Completion, text: TextStream) -> dict[str, Any]:
    """Why it ended: ``stop_reason`` is the stop id or the stop string."""
    reason: int | str | None = None
    if completion.finish == Finish.STOP:
        last = completion.ids[-1] if completion.ids else None
        reason = last if last in request.params.stop_ids else text.stop_string or None
    return {"finish_reason": completion.finish.value, "stop_reason": reason}


def envelope(name: str, created_s: float, model: str, choices: list[dict[str, Any]], version: int) -> dict[str, Any]:
    """What is around choices, in answers and events."""
    return {
        "id": name,
        "object": "text_completion",
        "created": int(created_s),
        "model": model,
        "choices": choices,
        "weight_version": version,
    }


def usage(prompt_tokens: int, completions: Sequence[Completion]) -> dict[str, int]:
    """Token counts of a request: each prompt once, every sampled token."""
    sampled = sum(len(completion.ids) for completion in completions)
    return {"prompt_tokens": prompt_tokens, "completion_tokens": sampled, "total_tokens": prompt_tokens + sampled}


def event(value: dict[str, Any] | str) -> bytes:
    """One server-sent event."""
    data = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, allow_nan=False)
    return f"data: {data}\n\n".encode()


def prometheus(counters: dict[str, int | float], prefix: str = "crl_serve_") -> str:
    """Counters in Prometheus' text format."""
    return "".join(f"# TYPE {prefix}{name} untyped\n{prefix}{name} {value}\n" for name, value in sorted(counters.items()))
