"""JetStream's own protocol over gRPC: its orchestrator service with checks in front and text behind.

Owns: the service, the token check and the port. Promises: what would end the Driver's process (a prompt that is too long, ids outside the
vocabulary) is refused with INVALID_ARGUMENT before it gets there; text never shows half a character; without a token only this machine is
listened to. Does not: carry log-probs, seeds, temperatures, stop strings or weight versions: JetStream's messages have no field for them
(use the HTTP door).

Every request is sampled with the engine's defaults and a seed of its own. It runs in a process of its own: JetStream ends the process when
one of its threads raises. Importing this module imports JetStream.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc

from crl_jax.serving.access import AddressError, check_open_to, may_enter
from crl_jax.serving.http.completions import TextCodec
from crl_jax.serving.http.text import TextStream
from crl_jax.serving.jetstream_driver import ServedEngine, ServingDriver, end_request, orchestrator, placed_requests
from crl_jax.serving.jetstream_import import import_jetstream

pb2: Any = import_jetstream("jetstream.core.proto.jetstream_pb2")
_pb2_grpc: Any = import_jetstream("jetstream.core.proto.jetstream_pb2_grpc")


class Orchestrator(orchestrator.LLMOrchestrator):  # type: ignore[misc, name-defined]
    """JetStream's service; ``codec`` makes ids of a request's text and text of the answer's ids."""

    def __init__(self, driver: ServingDriver, codec: TextCodec, *, vocab_size: int, max_length: int) -> None:
        super().__init__(driver)
        self._codec, self._vocab_size, self._max_length = codec, vocab_size, max_length

    async def Decode(self, request: Any, context: Any = None) -> AsyncIterator[Any]:
        """Token ids, and text for a request that came as text, as they are sampled."""
        as_text = request.WhichOneof("content") == "text_content"
        ids = self._codec.encode(request.text_content.text) if as_text else list(request.token_content.token_ids)
        wrong = self._wrong(ids, request.max_tokens)
        if wrong:
            await orchestrator._abort_or_raise(context, grpc.StatusCode.INVALID_ARGUMENT, wrong)
        inner = pb2.DecodeRequest(token_content=pb2.DecodeRequest.TokenContent(token_ids=ids), max_tokens=request.max_tokens)
        placed: list[Any] = []
        placed_requests.set(placed)
        text = TextStream(self._codec.decode, stop_ids=self._codec.stop_ids)
        try:
            async for part in super().Decode(inner, context):
                if as_text:
                    sample = part.stream_content.samples[0]
                    sample.text = "".join(text.push(token) for token in sample.token_ids)
                yield part
            if as_text and (rest := text.flush()):
                yield pb2.DecodeResponse(stream_content=_content(rest))
        finally:
            for one in placed:
                end_request(one)

    def _wrong(self, ids: Sequence[int], max_tokens: int) -> str:
        """What is wrong with a request; empty when nothing is."""
        if not ids:
            return "an empty prompt has nothing to sample from: give text_content or token_content with at least one token"
        if len(ids) >= self._max_length:
            return f"{len(ids)} ids leave no room for a token within max_length={self._max_length}: shorten the prompt"
        if not all(0 <= i < self._vocab_size for i in ids):
            return f"token ids must be in 0..{self._vocab_size - 1}, got {min(ids)}..{max(ids)}"
        return "" if max_tokens >= 1 else f"max_tokens must be 1 or more, got {max_tokens}"


class _Doorkeeper(grpc.aio.ServerInterceptor):
    """Lets calls in whose metadata has ``authorization: Bearer TOKEN``."""

    def __init__(self, token: str) -> None:
        self._token = token

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        metadata = dict(handler_call_details.invocation_metadata or ())
        handler = await continuation(handler_call_details)
        if handler is None or may_enter(metadata.get("authorization"), self._token):
            return handler
        return (
            grpc.unary_stream_rpc_method_handler(_refuse_stream)
            if handler.response_streaming
            else grpc.unary_unary_rpc_method_handler(_refuse)
        )


def bind(host: str, port: int, token: str) -> tuple[grpc.aio.Server, int]:
    """A gRPC server that has its port (0: a free one) and does not answer yet. Raises AccessError and AddressError."""
    check_open_to(host, token)
    server = grpc.aio.server(interceptors=[_Doorkeeper(token)], options=[("grpc.so_reuseport", 0)])
    try:
        return server, server.add_insecure_port(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
    except RuntimeError as error:
        raise AddressError(
            f"cannot listen on {host}:{port}: it is in use or not this machine's; choose another --port or --host"
        ) from error


def make_service(
    prefill: Sequence[ServedEngine], generate: Sequence[ServedEngine], params: Any, codec: TextCodec, *, queue_limit: int = 256
) -> tuple[Orchestrator, ServingDriver]:
    """The service over these engines (the same one in both lists: prefill and decode take turns on it) and the driver to stop."""
    driver = ServingDriver(prefill, generate, params, queue_limit=queue_limit)
    engine = generate[0]
    return Orchestrator(driver, codec, vocab_size=engine.config.vocab_size, max_length=engine.max_length), driver


def add_service(server: grpc.aio.Server, service: Orchestrator) -> None:
    """Lets ``server`` answer JetStream's calls."""
    _pb2_grpc.add_OrchestratorServicer_to_server(service, server)


def _content(text: str) -> Any:
    return pb2.DecodeResponse.StreamContent(samples=[pb2.DecodeResponse.StreamContent.Sample(text=text)])


async def _refuse(request: Any, context: Any) -> None:
    del request
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, "send the server's token as metadata: authorization: Bearer TOKEN")


async def _refuse_stream(request: Any, context: Any) -> AsyncIterator[Any]:
    await _refuse(request, context)
    yield  # makes this a generator
