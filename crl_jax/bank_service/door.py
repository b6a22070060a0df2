"""Between gRPC and a method of the service: who may call, for how long, how many at once, and what an error becomes.

Owns: the token check, the deadline of a call, the count of calls in flight, the mapping of errors to status codes. Promises: a client gets
a status and a message that says what to do, never a traceback; an error nobody foresaw is written to ``log`` whole. Does not: know what a
method does.
"""

from __future__ import annotations

import asyncio
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from crl_jax.bank_service.limits import Limits, Refused
from crl_jax.errors import UserError
from crl_jax.serving.access import may_enter

OPEN = "/grpc.health.v1.Health/Check"  # answers without a token: load balancers have none, and it tells nothing


class Doorkeeper(grpc.aio.ServerInterceptor):
    """Lets calls in whose metadata has ``authorization: Bearer TOKEN``, and the health check."""

    def __init__(self, token: str, counts: Counter[str]) -> None:
        self._token = token
        self._counts = counts

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        """The handler, or one that refuses, of the same kind."""
        handler = await continuation(handler_call_details)
        given = dict(handler_call_details.invocation_metadata or ()).get("authorization")
        if handler is None or handler_call_details.method == OPEN or may_enter(_text(given), self._token):
            return handler
        self._counts["calls_without_token"] += 1
        kind = f"{'stream' if handler.request_streaming else 'unary'}_{'stream' if handler.response_streaming else 'unary'}"
        make = getattr(grpc, f"{kind}_rpc_method_handler")
        return make(_refuse_stream if handler.response_streaming else _refuse)


class Gate:
    """Mutable: counts calls. ``counts`` has ``calls``, ``calls_<CODE>`` for those that failed; ``running`` and ``most_running``."""

    def __init__(self, limits: Limits, counts: Counter[str], log: Callable[[str], None]) -> None:
        self._limits = limits
        self._counts = counts
        self._log = log
        self.running = 0
        self.most_running = 0

    def stats(self) -> dict[str, float]:
        """The counters and gauges."""
        return {**self._counts, "calls_running": self.running, "calls_most_running": self.most_running}

    def guard(self, name: str, method: Callable[[Any], Awaitable[Any]]) -> Callable[[Any, Any], Awaitable[Any]]:
        """``method`` as a handler of gRPC's."""

        async def call(request: Any, context: Any) -> Any:
            self._counts["calls"] += 1
            self.running += 1
            self.most_running = max(self.most_running, self.running)
            try:
                reply, code, message = await self._answer(name, method, request, context.time_remaining())
            finally:
                self.running -= 1
            if reply is not None:
                return reply
            self._counts[f"calls_{code}"] += 1
            await context.abort(grpc.StatusCode[code], message)

        return call

    async def _answer(self, name: str, method: Callable[[Any], Awaitable[Any]], request: Any, left_s: float | None) -> Any:
        limit_s = min(self._limits.call_timeout_s, self._limits.call_timeout_s if left_s is None else left_s)
        try:
            if self.running > self._limits.calls:
                full = f"{self._limits.calls} calls are in flight, as many as this server takes (--calls)"
                raise Refused("RESOURCE_EXHAUSTED", f"{full}: send fewer at once, and several queries in one call")
            self._limits.check_message(request.ByteSize())
            async with asyncio.timeout(limit_s):
                reply = await method(request)
            self._limits.check_message(reply.ByteSize())
            return reply, "", ""
        except Refused as error:
            return None, error.code, str(error)
        except TimeoutError as error:
            late = str(error) or f"{name} took longer than {limit_s:.3g} s: give it a later deadline, or ask for less"
            return None, "DEADLINE_EXCEEDED", late
        except UserError as error:
            return None, "FAILED_PRECONDITION", str(error)
        except Exception as error:  # the door: the process goes on, the client is told, the log has it whole
            self._log("".join(traceback.format_exception(error)))
            return None, "INTERNAL", f"{name} failed in the server ({type(error).__name__}): its log says why; mend that, start it again"


def _text(value: Any) -> str | None:
    return value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else value


async def _refuse(request: Any, context: Any) -> None:
    del request
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, "send the server's token as metadata: authorization: Bearer TOKEN")


async def _refuse_stream(request: Any, context: Any) -> Any:
    await _refuse(request, context)
    yield  # makes this a generator
