"""A sampler's request as an OpenAI-compatible server wants it, and its answer as a ``Completion``.

Owns: what is sent to our own server and to others (vLLM and what speaks its API), and every check of what comes back. Promises: token ids
are those the server sampled, never made from text; an answer whose lists differ in length, whose ids are not in the vocabulary or whose
log-probs are not finite is an error; log-probs are those ``Completion`` promises, or the request is refused.

What another server's log-probs are of is not in its answers, so the caller says it: ``raw`` (vLLM's default: the logits as they are, so
only temperature 0 and 1 can be asked for) or ``processed`` (after temperature and truncation, so truncation must be off).
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from typing import Any, Literal

from crl_jax.records import Completion, Finish, SamplingParams
from crl_jax.serving.remote_edge import RemoteError, Reply

_ROUNDING = 1e-3  # a log-prob of a certain token may come out a little above 0, the more so in bfloat16
LogprobsOf = Literal["raw", "processed"]
_FINISH = {"stop": Finish.STOP, "length": Finish.LENGTH, "abort": Finish.CANCELLED, "cancelled": Finish.CANCELLED}


@dataclasses.dataclass(frozen=True)
class Card:
    """What a server says of its model in /v1/models. ``ours``: it is a ``crl serve``, which keeps sessions."""

    model: str
    max_length: int
    vocab_size: int
    version: int = 0
    ours: bool = False
    constrained: bool = False

    @staticmethod
    def read(body: dict[str, Any], model: str, vocab_size: int) -> Card:
        """The card of ``model`` ('' = the only one). ``vocab_size`` is what the caller's tokenizer has; 0: what the server says.

        Raises RemoteError when the model is not there or a number is missing.
        """
        with _readable("its models"):
            return Card._read(body, model, vocab_size)

    @staticmethod
    def _read(body: dict[str, Any], model: str, vocab_size: int) -> Card:
        cards = [c for c in body.get("data") or [] if isinstance(c, dict)]
        names = [c.get("id") for c in cards]
        found = [c for c in cards if c.get("id") == model] if model else cards
        if len(found) != 1:
            raise RemoteError(f"the server has the models {names}: {'correct' if model else 'set'} the model's name")
        (card,) = found
        offers = card.get("offers") or {}
        size, length = vocab_size or card.get("vocab_size", 0), card.get("max_model_len", 0)
        if not (isinstance(size, int) and size > 0 and isinstance(length, int) and length > 1):
            raise RemoteError(f"the server does not say max_model_len and vocab_size of {card.get('id')}: give vocab_size")
        ours = card.get("owned_by") == "crl_jax"
        version = card.get("weight_version", 0)
        return Card(str(card["id"]), length, size, version if type(version) is int else 0, ours, bool(offers.get("constrained")))


def request_body(
    card: Card, prompt: list[int], params: SamplingParams, *, room: int, session: str, logprobs_of: LogprobsOf
) -> dict[str, Any]:
    """The JSON object to post. Raises ValueError for parameters the server has no way to honour."""
    if params.constrained and not card.constrained:
        fix = "serve a recipe with env.constrained=true by `crl serve`, or set env.constrained=false"
        raise ValueError(f"this server samples no constrained actions: {fix}")
    if not card.ours:
        _check_logprobs(params, logprobs_of)
    body: dict[str, Any] = {
        "model": card.model,
        "prompt": prompt,
        "max_tokens": min(params.max_new_tokens, room),
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "min_p": params.min_p,
        "seed": params.seed & 0x7FFFFFFF,
        "stop": list(params.stop_strings),
        "stop_token_ids": list(params.stop_ids),
        "ignore_eos": True,  # what stops it is in stop_ids
        "logprobs": 0 if card.ours else 1,  # 0 is "off" for some servers
        "return_token_ids": True,
    }
    if params.forbidden_ids:
        body["logit_bias"] = {str(i): -100 for i in params.forbidden_ids}
    if card.ours:
        return body | ({"session": session} if session else {}) | ({"constrained": True} if params.constrained else {})
    return body | {"return_tokens_as_token_ids": True, "skip_special_tokens": False}


def read_completion(reply: Reply, card: Card, params: SamplingParams) -> Completion:
    """The completion in an answer; ``versions`` is empty when the server says none. Raises RemoteError for anything that cannot be."""
    with _readable("a completion"):
        return _read_completion(reply, card, params)


@contextlib.contextmanager
def _readable(what: str) -> Iterator[None]:
    """A list where a number should be, and the like, is a RemoteError too."""
    try:
        yield
    except (TypeError, ValueError, LookupError, AttributeError, OverflowError) as error:
        raise RemoteError(f"the server sent {what} in another form than OpenAI's ({type(error).__name__}: {error})") from error


def _read_completion(reply: Reply, card: Card, params: SamplingParams) -> Completion:
    choices = reply.body.get("choices")
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise RemoteError(f"the server sent {len(choices) if isinstance(choices, list) else 'no'} choices, one was asked for")
    (choice,) = choices
    finish = _FINISH.get(choice.get("finish_reason"))
    if finish is None:
        raise RemoteError(f"the server ended a completion with finish_reason={choice.get('finish_reason')!r}")
    logprobs = choice.get("logprobs") or {}
    ids = _ids(choice, logprobs)
    logps = logprobs.get("token_logprobs") or []
    versions = choice.get("token_versions")
    if versions is None:
        versions = [version] * len(ids) if (version := _version(reply)) is not None else []
    states, sampling = choice.get("token_states") or [0] * len(ids), logprobs.get("sampling_logprobs") or []
    lengths = {"token ids": len(ids), "log-probs": len(logps), "states": len(states)}
    lengths |= ({"versions": len(versions)} if versions else {}) | ({"sampling log-probs": len(sampling)} if sampling else {})
    if len(set(lengths.values())) > 1:
        raise RemoteError(f"the server sent lists of different lengths: {lengths}")
    if not all(type(i) is int and 0 <= i < card.vocab_size for i in ids):
        raise RemoteError(f"the server sent token ids outside the vocabulary 0..{card.vocab_size - 1}: {ids[:8]}")
    numbers = [*logps, *sampling]
    if not all(isinstance(x, int | float) and math.isfinite(x) and x <= _ROUNDING for x in numbers):
        raise RemoteError(f"the server sent log-probs that are none, one or more of {numbers[:8]}")
    if not all(type(x) is int and 0 <= x < 2**31 for x in (*versions, *states)):
        raise RemoteError("the server sent versions or states that are no whole numbers from 0 to 2^31 - 1")
    if (not ids and finish != Finish.CANCELLED) or len(ids) > params.max_new_tokens:
        raise RemoteError(f"the server sent {len(ids)} tokens, 1 to {params.max_new_tokens} were asked for")
    return Completion(tuple(ids), tuple(map(float, logps)), tuple(versions), tuple(states), finish, tuple(map(float, sampling)))


def _check_logprobs(params: SamplingParams, logprobs_of: LogprobsOf) -> None:
    truncated = params.top_p < 1 or params.top_k > 0 or params.min_p > 0 or params.forbidden_ids
    if logprobs_of == "raw" and params.temperature not in (0, 1):
        raise ValueError(
            f"temperature {params.temperature:g}: this server's log-probs are those at temperature 1, not what a learner needs: start it "
            "with --logprobs-mode processed_logprobs and say logprobs: processed, or sample at temperature 1"
        )
    if logprobs_of == "processed" and truncated and params.temperature != 0:
        raise ValueError(
            "top_p, top_k, min_p and forbidden ids: this server's log-probs are those after truncation, not what a learner needs: switch "
            "them off, or say logprobs: raw and sample at temperature 1"
        )


def _ids(choice: dict[str, Any], logprobs: dict[str, Any]) -> list[Any]:
    """``token_ids``, or ``token_id:N`` among the tokens."""
    ids = choice.get("token_ids")
    if isinstance(ids, list):
        return ids
    tokens = logprobs.get("tokens")
    if isinstance(tokens, list) and all(isinstance(t, str) and t.removeprefix("token_id:").isdecimal() for t in tokens):
        return [int(t.removeprefix("token_id:")) for t in tokens if t.startswith("token_id:")]
    raise RemoteError("the server sends no token ids: it must know return_token_ids or return_tokens_as_token_ids (vLLM does)")


def _version(reply: Reply) -> Any:
    """The one version of an answer: in the body, else in the header, else None."""
    found = reply.body.get("weight_version")
    if found is None:
        header = reply.headers.get("x-weight-version")
        if header is None:
            return None
        if not header.strip().isdecimal():
            raise RemoteError(f"the server sent x-weight-version: {header!r}, which is no whole number")
        found = int(header)
    return found
