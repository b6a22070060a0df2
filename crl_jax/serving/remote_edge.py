"""The one place where a request to another server may be tried again.

Owns: the connection, the attempts, the waits between them, and their counters. Promises: only what got no whole answer, or
what the server asks to repeat, is repeated (connection errors and 429, 502, 503, 504), at most ``attempts`` times and never past the
deadline; a repeated request has the id of the first. Does not: know what is asked.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from crl_jax.errors import MissingPackage

try:
    import aiohttp
except ModuleNotFoundError as error:
    raise MissingPackage(f"a sampler on another server needs aiohttp ({error}): pip install -e '.[serve]'") from error

_REPEATABLE = (429, 502, 503, 504)
_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=10.0)  # the whole has the deadline of ``ask``


class RemoteError(RuntimeError):
    """The server answered something that cannot be used; the message says what."""


class RemoteUnavailable(RemoteError, ConnectionError):
    """No answer after all attempts."""


class RemoteRefused(RemoteError):
    """The server refuses this request; ``status`` and ``code`` are its own."""

    def __init__(self, message: str, status: int, code: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


@dataclasses.dataclass(frozen=True)
class Retry:
    """Waits double from ``first_wait_s`` to at most ``longest_wait_s``; a server's Retry-After lengthens them."""

    attempts: int = 5
    first_wait_s: float = 0.2
    longest_wait_s: float = 5.0

    def wait_s(self, failed: int, retry_after_s: float) -> float:
        """After ``failed`` attempts."""
        return max(retry_after_s, min(self.longest_wait_s, self.first_wait_s * 2 ** (failed - 1)))


class Reply(NamedTuple):
    """A JSON object and the headers that came with it."""

    body: dict[str, Any]
    headers: Any


class Edge:
    """Requests to one server. For one event loop; ``now`` counts seconds; ``counts`` has ``requests``, ``retries``, ``retried_<why>`` and
    ``unavailable``.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str = "",
        retry: Retry | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._retry, self.now, self._sleep = retry or Retry(), clock, sleep
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._http = aiohttp.ClientSession(headers=headers, connector=aiohttp.TCPConnector(limit=0), timeout=_TIMEOUT)
        self.counts: Counter[str] = Counter()

    @property
    def attempts(self) -> int:
        """How often one request is sent at most."""
        return self._retry.attempts

    async def ask(self, method: str, path: str, body: Any = None, *, request_id: str = "", timeout_s: float) -> Reply:
        """The answer's JSON object.

        Raises RemoteRefused for an error status that is not to be repeated, RemoteUnavailable after the last attempt, TimeoutError past
        ``timeout_s`` (all attempts together), RemoteError for an answer that is no JSON object.
        """
        self.counts["requests"] += 1
        deadline_s = self.now() + timeout_s
        headers = {"x-request-id": request_id} if request_id else {}
        for attempt in range(1, self._retry.attempts + 1):
            try:
                async with asyncio.timeout(max(0.0, deadline_s - self.now())):
                    return await self._once(method, path, body, headers)
            except TimeoutError as error:
                raise TimeoutError(f"{self.url}{path}: no answer within {timeout_s:.4g} s: raise the timeout, or ask for less") from error
            except _Repeat as why:
                await self._wait(why, path, attempt, deadline_s)
        raise AssertionError("unreachable: the last attempt returns or raises")

    async def aclose(self) -> None:
        """Closes all connections."""
        await self._http.close()

    async def _once(self, method: str, path: str, body: Any, headers: dict[str, str]) -> Reply:
        try:
            async with self._http.request(method, self.url + path, json=body, headers=headers, allow_redirects=False) as answer:
                raw = await answer.read()
        except (aiohttp.ClientError, ConnectionError) as error:  # not sent, no answer, or one that broke off
            raise _Repeat("connection", str(error) or type(error).__name__, 0.0) from error
        if answer.status in _REPEATABLE:
            raise _Repeat(str(answer.status), _message(raw, answer.status)[0], _seconds(answer.headers.get("Retry-After", "")))
        if answer.status >= 300:
            message, code = _message(raw, answer.status)
            raise RemoteRefused(f"{self.url}{path}: {message}", answer.status, code)
        try:
            found = json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise RemoteError(f"{self.url}{path} answered {raw[:80]!r}, which is no JSON: is this an OpenAI-compatible server?") from error
        if not isinstance(found, dict):
            raise RemoteError(f"{self.url}{path} answered a JSON {type(found).__name__}, not an object")
        return Reply(found, answer.headers)

    async def _wait(self, why: _Repeat, path: str, attempt: int, deadline_s: float) -> None:
        wait_s = self._retry.wait_s(attempt, why.retry_after_s)
        if attempt == self._retry.attempts or self.now() + wait_s >= deadline_s:
            self.counts["unavailable"] += 1
            raise RemoteUnavailable(f"{self.url}{path}: {why.message} ({attempt} attempts): is the server up and reachable?") from why
        self.counts["retries"] += 1
        self.counts[f"retried_{why.kind}"] += 1
        await self._sleep(wait_s)


class _Repeat(Exception):
    """An attempt that may be made again."""

    def __init__(self, kind: str, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.kind, self.message, self.retry_after_s = kind, message, retry_after_s


def _message(raw: bytes, status: int) -> tuple[str, str]:
    """Message and code of an error in OpenAI's shape, or what there is."""
    try:
        error = json.loads(raw)["error"]
        return f"{status} {error['message']}", str(error.get("code") or "")
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{status} {raw[:200].decode('utf-8', 'replace')}", ""


def _seconds(header: str) -> float:
    """Retry-After in seconds; its other form, a date, counts as none."""
    return float(header) if header.isdecimal() else 0.0
