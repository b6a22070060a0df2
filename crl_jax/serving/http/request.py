"""What a completions request asks for.

Owns: the fields of OpenAI's completions API that are understood here, vLLM's additions (``top_k``, ``min_p``, ``stop_token_ids``,
``ignore_eos``, ``return_token_ids``, ``return_tokens_as_token_ids``) and our own (``session``, ``constrained``). Promises: what cannot be
done as asked is refused, never ignored; every choice has a seed of its own. Does not: tokenize or sample.
"""

from __future__ import annotations

import dataclasses
import secrets
from typing import Any

from crl_jax.records import SamplingParams
from crl_jax.seeds import derive_seed
from crl_jax.serving.http.errors import ApiError
from crl_jax.serving.http.fields import Fields

MAX_CHOICES = 128  # prompts x n of one request
MAX_STOP_STRINGS = 16
MAX_TOKENS = 16  # sampled when a request does not say, as OpenAI's API does
_INT32 = 2**31 - 1
Prompt = str | tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class CompletionRequest:
    """One request. ``params.seed`` is that of the first choice; the others' follow from it."""

    prompts: tuple[Prompt, ...]
    params: SamplingParams
    n: int = 1
    stream: bool = False
    usage_at_end: bool = False  # of a stream
    logprobs: bool = False
    token_ids: bool = False
    tokens_as_ids: bool = False
    session: str = ""

    def choice(self, index: int) -> tuple[Prompt, SamplingParams]:
        """Prompt and parameters of the choice ``index`` (prompt-major)."""
        seed = self.params.seed if index == 0 else derive_seed(self.params.seed, "choice", index)
        return self.prompts[index // self.n], dataclasses.replace(self.params, seed=seed)

    @property
    def choices(self) -> int:
        """How many completions are asked for."""
        return len(self.prompts) * self.n


def read_completion(body: dict[str, Any], *, model: str, vocab_size: int, stop_ids: tuple[int, ...]) -> CompletionRequest:
    """The request in ``body``; ``stop_ids`` end a completion unless ``ignore_eos`` is set.

    Raises ApiError: 404 for another model, else 400.
    """
    fields = Fields(body)
    asked = fields.text("model", model)
    if asked != model:
        raise ApiError(
            404, f"model `{asked}` is not served here: use `{model}`, or leave `model` out", param="model", code="model_not_found"
        )
    session, prompt = fields.text("session"), fields.raw("prompt")
    prompts: tuple[Prompt, ...] = ((),) if session and prompt == [] else _prompts(prompt, vocab_size)  # a session goes on as it is
    params = _sampling(fields, vocab_size, stop_ids)
    n = fields.integer("n", 1, 1, MAX_CHOICES)
    stream = fields.flag("stream")
    request = CompletionRequest(
        prompts,
        params,
        n=n,
        stream=stream,
        usage_at_end=_usage_at_end(fields.raw("stream_options"), stream),
        logprobs=_logprobs(fields),
        token_ids=fields.flag("return_token_ids"),
        tokens_as_ids=fields.flag("return_tokens_as_token_ids"),
        session=session,
    )
    fields.text("user")
    fields.only("echo", False, because="the prompt is not sent back")
    fields.only("best_of", n, because="only the n completions asked for are sampled")
    fields.only("suffix", "", because="text cannot be inserted between two others")
    for name, neutral in (("presence_penalty", 0), ("frequency_penalty", 0), ("repetition_penalty", 1)):
        fields.only(name, neutral, because="penalties would make the log-probs depend on more than the model")
    fields.finish()
    if request.choices > MAX_CHOICES:
        raise ApiError(400, f"{len(prompts)} prompts x n={n} are more than {MAX_CHOICES} completions: send several requests", param="n")
    if request.session and request.choices > 1:
        raise ApiError(400, "a session has one conversation: send one prompt with n=1, or open more sessions", param="session")
    return request


def _sampling(fields: Fields, vocab_size: int, stop_ids: tuple[int, ...]) -> SamplingParams:
    top_id = vocab_size - 1
    stops = fields.integers("stop_token_ids", top_id)
    ignored = fields.flag("ignore_eos")
    seed = fields.optional_integer("seed", -(2**63), 2**63 - 1)
    return SamplingParams(
        max_new_tokens=fields.integer("max_tokens", MAX_TOKENS, 1, _INT32),
        temperature=fields.number("temperature", 1.0, 0.0, 1e6),
        top_p=fields.number("top_p", 1.0, 1e-12, 1.0),
        top_k=max(0, fields.integer("top_k", 0, -1, _INT32)),  # vLLM writes -1 for off
        min_p=fields.number("min_p", 0.0, 0.0, 1.0),
        stop_ids=tuple(dict.fromkeys((*stops, *(() if ignored else stop_ids)))),
        stop_strings=fields.strings("stop", MAX_STOP_STRINGS),
        forbidden_ids=_forbidden(fields.raw("logit_bias"), top_id),
        seed=secrets.randbits(31) if seed is None else seed & _INT32,
        constrained=fields.flag("constrained"),
    )


def _prompts(value: Any, vocab_size: int) -> tuple[Prompt, ...]:
    """A string, a list of ids, or a list of either."""
    many = value if isinstance(value, list) and not _is_ids(value) else [value]
    if not many or not all(isinstance(p, str) or _is_ids(p) for p in many):
        raise ApiError(400, "`prompt` must be a string, a list of token ids, or a list of either", param="prompt", code="invalid_value")
    for ids in many:
        if not isinstance(ids, str) and not all(0 <= i < vocab_size for i in ids):
            message = f"token ids of `prompt` must be in 0..{vocab_size - 1}, got {min(ids)}..{max(ids)}"
            raise ApiError(400, message, param="prompt", code="invalid_value")
    return tuple(p if isinstance(p, str) else tuple(p) for p in many)


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(i) is int for i in value)


def _is_id(text: str, top_id: int) -> bool:
    return text.isdecimal() and len(text) <= len(str(_INT32)) and int(text) <= top_id  # the length first: int() refuses a long one


def _logprobs(fields: Fields) -> bool:
    """None is off; 0 is the chosen token's log-prob, which is what the engine keeps."""
    wanted = fields.optional_integer("logprobs", 0, 20)
    if wanted:
        message = f"`logprobs`: {wanted} asks for the likeliest tokens beside the chosen one, which are not kept: use 0"
        raise ApiError(400, message, param="logprobs", code="unsupported")
    return wanted is not None


def _forbidden(value: Any, top_id: int) -> tuple[int, ...]:
    """``logit_bias`` with -100 everywhere forbids its ids."""
    if value is None:
        return ()
    if not isinstance(value, dict) or not all(_is_id(key, top_id) for key in value):
        raise ApiError(
            400, f"`logit_bias` must be an object with token ids up to {top_id} as keys", param="logit_bias", code="invalid_value"
        )
    if not all(type(bias) in (int, float) and bias == -100 for bias in value.values()):
        message = "`logit_bias`: only -100, which forbids a token, is understood: other values would change what the log-probs mean"
        raise ApiError(400, message, param="logit_bias", code="unsupported")
    return tuple(int(key) for key in value)


def _usage_at_end(value: Any, stream: bool) -> bool:
    if value is None:
        return False
    if not stream or not isinstance(value, dict):
        raise ApiError(400, '`stream_options` is an object that goes with "stream": true', param="stream_options", code="invalid_value")
    options = Fields(value)
    wanted = options.flag("include_usage")
    options.finish()
    return wanted
