"""The one place where a call of the bank's client may be tried again.

Owns: the connection, the attempts, the waits between them, how many calls are on their way at once, their counters. Promises: only what
got no answer is repeated (UNAVAILABLE, a connection that broke, the deadline of an attempt), at most ``attempts`` times and never past the
call's deadline; a repeated message is the same message, with the same request id. Does not: know what is asked.
"""

from __future__ import annotations

import asyncio
import dataclasses
import pathlib
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

from crl_jax.bank_service.limits import MESSAGE_BYTES
from crl_jax.errors import MissingPackage, UserError

try:
    import grpc

    from crl_jax.bank_service import bank_pb2 as pb
except ModuleNotFoundError as missing:
    raise MissingPackage(f"a bank on another server needs gRPC ({missing}): pip install -e '.[bank]'") from missing

SERVICE = pb.DESCRIPTOR.services_by_name["Bank"].full_name
_LOST = {grpc.StatusCode.UNAVAILABLE: "unavailable", grpc.StatusCode.CANCELLED: "cancelled", grpc.StatusCode.DEADLINE_EXCEEDED: "deadline"}


class BankUnavailable(UserError, ConnectionError):
    """No answer after all attempts."""


class BankRefused(UserError, RuntimeError):
    """The server refuses this call; ``code`` is the name of gRPC's status, the message is the server's."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


@dataclasses.dataclass(frozen=True)
class Retry:
    """Waits double from ``first_wait_s`` to at most ``longest_wait_s``, each drawn between half of that and all of it; one attempt has at
    most ``attempt_s``."""

    attempts: int = 20
    first_wait_s: float = 0.1
    longest_wait_s: float = 5.0
    attempt_s: float = 30.0

    def wait_s(self, failed: int, rng: random.Random) -> float:
        """After ``failed`` attempts."""
        longest = min(self.longest_wait_s, self.first_wait_s * 2 ** min(30, failed - 1))
        return longest * (0.5 + 0.5 * rng.random())


@dataclasses.dataclass(frozen=True)
class Address:
    """``grpc://host:port``, or ``grpcs://host:port`` with TLS (``root``: the PEM file of who signed the server's certificate, None: the
    system's). ``server_name``: of the certificate, if it is not the host. Make it with `of`."""

    target: str
    tls: bool
    root: pathlib.Path | None = None
    server_name: str = ""

    @staticmethod
    def of(url: str, root: pathlib.Path | None = None, server_name: str = "") -> Address:
        """Raises ValueError for another form."""
        scheme, _, target = url.rstrip("/").partition("://")
        if scheme not in ("grpc", "grpcs") or not target or "/" in target:
            raise ValueError(f"{url!r} is no address of a bank: write grpc://HOST:PORT, or grpcs://HOST:PORT for one with TLS")
        if root is not None and scheme != "grpcs":
            raise ValueError(f"a root certificate goes with TLS: write grpcs://{target}")
        return Address(target, scheme == "grpcs", root, server_name)


class Edge:
    """Calls to one server, for the event loop it is made on. ``counts`` has ``calls``, ``retries``, ``retried_<why>``, ``unavailable`` and
    ``refused_<CODE>``; ``most`` calls are on their way at once, ``waiting`` says how many wait for their turn."""

    def __init__(
        self,
        address: Address,
        *,
        token: str = "",
        retry: Retry | None = None,
        message_bytes: int = MESSAGE_BYTES,
        most: int = 64,
        rng: random.Random | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._address, self._retry, self._message_bytes = address, retry or Retry(), message_bytes
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()
        self._rng, self._clock, self._sleep = rng or random.Random(0), clock, sleep
        self._channel = _channel(address, message_bytes)
        self._turns = asyncio.Semaphore(most)
        self.counts: Counter[str] = Counter()
        self.running = self.waiting = 0

    async def call(self, method: str, request: Any, reply: Any, *, timeout_s: float, attempt_s: float | None = None) -> Any:
        """The answer, of type ``reply``.

        Raises BankRefused for what the server does not do, BankUnavailable after the last attempt, TimeoutError past ``timeout_s`` (all
        attempts and the wait for a turn together).
        """
        if request.ByteSize() > self._message_bytes:
            self.counts["refused_RESOURCE_EXHAUSTED"] += 1
            size = f"{method}: a message of {request.ByteSize()} bytes, {self._message_bytes} at most"
            raise BankRefused(f"{size}: send it in several calls, or raise --message-mib and bank.server.message_mib", "RESOURCE_EXHAUSTED")
        self.counts["calls"] += 1
        end_s = self._clock() + timeout_s
        self.waiting += 1
        try:
            async with asyncio.timeout(timeout_s):
                await self._turns.acquire()
        except TimeoutError as error:
            raise TimeoutError(f"{method}: no turn within {timeout_s:.4g} s, the calls before it are not answered") from error
        finally:
            self.waiting -= 1
        self.running += 1
        try:
            return await self._attempts(method, request, reply, end_s, timeout_s, attempt_s or self._retry.attempt_s)
        finally:
            self.running -= 1
            self._turns.release()

    async def aclose(self) -> None:
        """Close the connection; calls on their way end."""
        await self._channel.close(None)

    async def _attempts(self, method: str, request: Any, reply: Any, end_s: float, timeout_s: float, attempt_s: float) -> Any:
        send = self._channel.unary_unary(
            f"/{SERVICE}/{method}", request_serializer=type(request).SerializeToString, response_deserializer=reply.FromString
        )
        for attempt in range(1, self._retry.attempts + 1):
            left_s = max(0.001, end_s - self._clock())
            try:
                return await send(request, timeout=min(attempt_s, left_s), metadata=self._metadata)
            except grpc.aio.AioRpcError as error:
                await self._after(error, method, attempt, end_s, timeout_s)
        raise AssertionError("unreachable: the last attempt returns or raises")

    async def _after(self, error: grpc.aio.AioRpcError, method: str, attempt: int, end_s: float, timeout_s: float) -> None:
        """Wait before the next attempt, or raise."""
        code, said = error.code(), error.details() or error.code().name
        if code not in _LOST:
            self.counts[f"refused_{code.name}"] += 1
            raise BankRefused(f"{method} at {self._address.target}: {said}", code.name) from error
        wait_s = self._retry.wait_s(attempt, self._rng)
        if self._clock() >= end_s or (self._clock() + wait_s >= end_s and code is grpc.StatusCode.DEADLINE_EXCEEDED):
            late = f"{method} at {self._address.target}: no answer within {timeout_s:.4g} s ({said})"
            raise TimeoutError(f"{late}: is the server overloaded? ask for less, or give it more time") from error
        if attempt == self._retry.attempts or self._clock() + wait_s >= end_s:
            self.counts["unavailable"] += 1
            gone = f"{method} at {self._address.target}: {said} ({attempt} attempts)"
            raise BankUnavailable(f"{gone}: is the bank's server up and reachable, with TLS or without as the address says?") from error
        self.counts["retries"] += 1
        self.counts[f"retried_{_LOST[code]}"] += 1
        await self._sleep(wait_s)


def _channel(address: Address, message_bytes: int) -> grpc.aio.Channel:
    options: list[tuple[str, Any]] = [
        ("grpc.max_receive_message_length", message_bytes + 2**20),
        ("grpc.max_send_message_length", message_bytes + 2**20),
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1_000),
        ("grpc.enable_retries", 0),  # the edge repeats, and counts
        ("grpc.enable_http_proxy", 0),
    ]
    if not address.tls:
        return grpc.aio.insecure_channel(address.target, options)
    if address.server_name:
        options.append(("grpc.ssl_target_name_override", address.server_name))
    try:
        root = None if address.root is None else address.root.read_bytes()
    except OSError as error:
        raise BankRefused(
            f"root certificate {address.root} cannot be read ({error.strerror}): correct bank.server.tls_root", "TLS"
        ) from error
    return grpc.aio.secure_channel(address.target, grpc.ssl_channel_credentials(root), options)
