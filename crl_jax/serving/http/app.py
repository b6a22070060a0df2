"""The routes.

Owns: which path does what, who may enter, and errors in OpenAI's shape. Promises: every answer but that of /metrics is JSON (or events),
whatever goes wrong; a client that disconnects, or reads nothing of its stream for ``stall_s``, cancels its request. Does not: open sockets
(``server``).

| route | does |
|---|---|
| POST /v1/completions | OpenAI's completions; with ``x-request-id`` a repeated request gets the kept answer |
| GET /v1/models | the model, its ``max_model_len``, ``vocab_size`` and ``weight_version``, and what is offered beyond OpenAI's API |
| POST /v1/sessions, GET and DELETE /v1/sessions/ID, POST /v1/sessions/ID/cancel | conversations whose keys and values stay |
| POST /v1/weights | new weights, where enabled |
| GET /health, /stats, /metrics | is it alive; counters as JSON and for Prometheus |
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import logging
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

from crl_jax.errors import MissingPackage
from crl_jax.serving.access import is_local_request, may_enter
from crl_jax.serving.http.answers import Answers
from crl_jax.serving.http.completions import Completions, TextCodec
from crl_jax.serving.http.errors import ApiError
from crl_jax.serving.http.fields import parse_object
from crl_jax.serving.http.request import CompletionRequest, read_completion
from crl_jax.serving.http.response import event, prometheus
from crl_jax.serving.http.sessions import Sessions
from crl_jax.serving.http.weights import WeightUpdates
from crl_jax.serving.sampler import EngineSampler

try:
    from aiohttp import web
except ModuleNotFoundError as error:
    raise MissingPackage(f"serving over HTTP needs aiohttp ({error}): pip install -e '.[serve]'") from error

_LOG = logging.getLogger(__name__)
BODY_LIMIT_BYTES = 8 << 20
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclasses.dataclass
class Front:
    """What the routes work with. ``token``: what clients must send, empty for none."""

    sampler: EngineSampler
    codec: TextCodec
    model: str
    completions: Completions
    sessions: Sessions
    answers: Answers
    weights: WeightUpdates | None
    token: str
    now: Callable[[], float]
    constrained: bool = False
    stall_s: float = 60.0  # longest wait for the reader of a stream, which has a place among those in flight until it ends
    counts: Counter[str] = dataclasses.field(default_factory=Counter)

    def stats(self) -> dict[str, int | float]:
        """The sampler's counters and the front door's own."""
        own = {
            "http_in_flight": self.completions.in_flight,
            "http_overloaded": self.completions.overloaded,
            "http_answers_repeated": self.answers.repeated,
            "http_sessions": len(self.sessions),
            "http_sessions_expired": self.sessions.expired,
            "http_weights_published": 0 if self.weights is None else self.weights.published,
            "weight_version": self.sampler.version,
        }
        return self.sampler.stats() | own | dict(self.counts)

    def card(self) -> dict[str, Any]:
        """What /v1/models says about the model."""
        return {
            "id": self.model,
            "object": "model",
            "created": int(self.now()),
            "owned_by": "crl_jax",
            "max_model_len": self.sampler.max_length,
            "vocab_size": self.sampler.vocab_size,
            "weight_version": self.sampler.version,
            "offers": {"sessions": True, "constrained": self.constrained, "weights": self.weights is not None},
        }


def make_app(front: Front) -> web.Application:
    """The application with all routes."""
    app = web.Application(middlewares=[_errors(front), _entrance(front)], client_max_size=BODY_LIMIT_BYTES)
    app.router.add_post("/v1/completions", lambda request: _complete(front, request))
    app.router.add_get("/v1/models", lambda request: _models(front, request))
    app.router.add_get("/health", lambda request: _health(front, request))
    app.router.add_get("/stats", lambda request: _stats(front, request))
    app.router.add_get("/metrics", lambda request: _metrics(front, request))
    app.router.add_post("/v1/sessions", lambda request: _open_session(front, request))
    app.router.add_get("/v1/sessions/{name}", lambda request: _show_session(front, request))
    app.router.add_delete("/v1/sessions/{name}", lambda request: _close_session(front, request))
    app.router.add_post("/v1/sessions/{name}/cancel", lambda request: _cancel_session(front, request))
    app.router.add_post("/v1/weights", lambda request: _weights(front, request))
    return app


async def _complete(front: Front, http: web.Request) -> web.StreamResponse:
    raw = await _body(http)
    request = read_completion(parse_object(raw), model=front.model, vocab_size=front.sampler.vocab_size, stop_ids=front.codec.stop_ids)
    given = http.headers.get("x-request-id", "")
    if not (given.isascii() and given.isprintable()):  # it goes back in the body and in a header
        raise ApiError(400, "x-request-id must be printable ASCII characters", code="invalid_request_id")
    name = given or f"cmpl-{secrets.token_hex(12)}"
    if request.stream:
        return await _stream(front, http, request, name)
    digest = hashlib.sha256(raw).hexdigest()
    answer = await front.answers.once(name, digest, lambda: front.completions.answer(request, name))
    return web.Response(body=answer.body, content_type="application/json", headers=answer.headers | {"x-request-id": name})


async def _stream(front: Front, http: web.Request, request: CompletionRequest, name: str) -> web.StreamResponse:
    """Server-sent events. Once the first one is out, an error is the last event and [DONE] does not come."""
    answer = web.StreamResponse(
        headers={
            "Content-Type": "text/event-stream; charset=utf-8",
            "Cache-Control": "no-cache",
            "x-weight-version": str(front.sampler.version),
            "x-request-id": name,
        }
    )
    events = front.completions.events(request, name)
    try:
        first = await anext(events)
        await answer.prepare(http)
        await _send(front, http, answer.write(first))
        try:
            async for part in events:
                await _send(front, http, answer.write(part))
        except ConnectionError:
            raise
        except Exception as error:
            shown = _shown(http, error)
            front.counts[f"http_status_{shown.status}"] += 1  # the status line said 200 by then
            await _send(front, http, answer.write(event(shown.body())))
    finally:
        await events.aclose()  # type: ignore[attr-defined]
    await _send(front, http, answer.write_eof())
    return answer


async def _send(front: Front, http: web.Request, writing: Awaitable[None]) -> None:
    """Waits until a part of a stream is on its way. A client that stays connected and reads nothing is disconnected."""
    try:
        async with asyncio.timeout(front.stall_s):
            await writing
    except TimeoutError as late:
        front.counts["http_stalled"] += 1
        if http.transport is not None:
            http.transport.abort()
        raise ConnectionResetError(f"the client read nothing for {front.stall_s:g} s") from late


async def _models(front: Front, http: web.Request) -> web.Response:
    del http
    return web.json_response({"object": "list", "data": [front.card()]})


async def _health(front: Front, http: web.Request) -> web.Response:
    del http
    if front.completions.closing:
        raise ApiError(503, "the server is shutting down", code="shutting_down", retry_after_s=5)
    if front.sampler.failure is not None:
        raise ApiError(503, f"the engine has stopped ({front.sampler.failure}): start the server again", code="engine_stopped")
    return web.json_response({"status": "ok", "weight_version": front.sampler.version})


async def _stats(front: Front, http: web.Request) -> web.Response:
    del http
    return web.json_response(front.stats())


async def _metrics(front: Front, http: web.Request) -> web.Response:
    del http
    return web.Response(text=prometheus(front.stats()), content_type="text/plain")


async def _open_session(front: Front, http: web.Request) -> web.Response:
    del http
    return web.json_response({"id": await front.sessions.open(), "object": "session", "tokens": 0})


async def _show_session(front: Front, http: web.Request) -> web.Response:
    name = http.match_info["name"]
    held = front.sessions.get(name)
    return web.json_response({"id": name, "object": "session", "tokens": held.tokens, "busy": held.busy})


async def _close_session(front: Front, http: web.Request) -> web.Response:
    name = http.match_info["name"]
    await front.sessions.close(name)
    return web.json_response({"id": name, "object": "session", "deleted": True})


async def _cancel_session(front: Front, http: web.Request) -> web.Response:
    name = http.match_info["name"]
    await front.sessions.cancel(name)
    return web.json_response({"id": name, "object": "session", "cancelled": True})


async def _weights(front: Front, http: web.Request) -> web.Response:
    if front.weights is None:
        raise ApiError(403, "weights cannot be changed here: start the server with --weights-folder FOLDER", code="weights_disabled")
    version = await front.weights.publish(parse_object(await _body(http)))
    return web.json_response({"object": "weights", "version": version}, headers={"x-weight-version": str(version)})


async def _body(http: web.Request) -> bytes:
    if http.content_type != "application/json":  # a web page cannot send this type to another site unasked
        raise ApiError(400, "send the header Content-Type: application/json", code="content_type")
    return await http.read()


def _entrance(front: Front) -> Any:
    @web.middleware
    async def enter(http: web.Request, handler: Handler) -> web.StreamResponse:
        if not may_enter(http.headers.get("Authorization"), front.token):
            raise ApiError(401, "send the server's token: Authorization: Bearer TOKEN", code="wrong_token")
        if not front.token and not is_local_request(http.headers.get("Host", "")):
            raise ApiError(403, "without a token this server answers to the name of this machine only, e.g. 127.0.0.1", code="wrong_host")
        return await handler(http)

    return enter


def _errors(front: Front) -> Any:
    @web.middleware
    async def explain(http: web.Request, handler: Handler) -> web.StreamResponse:
        front.counts["http_requests"] += 1
        try:
            return await handler(http)
        except ConnectionError:  # the client has gone; nobody reads the answer
            raise
        except Exception as error:
            shown = _shown(http, error)
        front.counts[f"http_status_{shown.status}"] += 1
        return web.json_response(shown.body(), status=shown.status, headers=shown.headers())

    return explain


def _shown(http: web.Request, error: Exception) -> ApiError:
    """What a client is told of ``error``; what is no client's fault is also logged."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        return ApiError(413, f"the body is larger than {BODY_LIMIT_BYTES} bytes: send less at a time", code="too_large")
    if isinstance(error, web.RequestPayloadError):
        return ApiError(400, f"the body cannot be read ({error}): send it whole, and encoded as its headers say", code="broken_body")
    if isinstance(error, web.HTTPException):
        return ApiError(error.status, f"{http.method} {http.path}: {error.reason}", code="no_such_route")
    _LOG.error("%s %s", http.method, http.path, exc_info=error)
    return ApiError(500, f"{type(error).__name__}: {error}", code="internal")
