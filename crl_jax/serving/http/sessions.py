"""Conversations that stay open between requests.

Owns: which sessions clients have, and when they end. Promises: a session's content is always known to its client: after anything but a
finished completion or a refusal it is closed; a session nobody used for ``idle_s`` is closed when another one is opened; there are never
more than ``limit``. Does not: hold tokens (the sampler does).
"""

from __future__ import annotations

import dataclasses
import secrets
from collections import OrderedDict
from collections.abc import Callable

from crl_jax.records import Completion
from crl_jax.serving.http.errors import ApiError
from crl_jax.serving.sampler import Sampler


@dataclasses.dataclass
class Held:
    """A session of the sampler and how many of its tokens the client knows."""

    inner: str
    used_s: float
    tokens: int = 0
    busy: bool = False


class Sessions:
    """The open sessions by the name their client has. For one event loop."""

    def __init__(self, sampler: Sampler, clock: Callable[[], float], *, limit: int = 4096, idle_s: float = 900.0) -> None:
        self._sampler, self._clock, self._limit, self._idle_s = sampler, clock, limit, idle_s
        self._held: OrderedDict[str, Held] = OrderedDict()  # longest unused first
        self.expired = 0

    def __len__(self) -> int:
        return len(self._held)

    async def open(self) -> str:
        """A new session's name. Raises ApiError (429) at the limit."""
        now_s = self._clock()
        for name in [n for n, held in self._held.items() if not held.busy and now_s - held.used_s > self._idle_s]:
            self.expired += 1
            await self.close(name)
        if len(self._held) >= self._limit:
            raise ApiError(429, f"{self._limit} sessions are open: close some, or try later", code="too_many_sessions", retry_after_s=5)
        name = f"session-{secrets.token_hex(12)}"
        self._held[name] = Held(await self._sampler.open(), now_s)
        return name

    def get(self, name: str) -> Held:
        """Raises ApiError (404) for one that is not open (any more)."""
        held = self._held.get(name)
        if held is None:
            message = (
                f"session {name!r} is not open (closed, idle for {self._idle_s:g} s, or ended by an error): POST /v1/sessions for a new one"
            )
            raise ApiError(404, message, param="session", code="session_not_found")
        return held

    def begin(self, name: str) -> Held:
        """The session, for one request at a time. Raises ApiError: 404, or 409 while another request runs."""
        held = self.get(name)
        if held.busy:
            raise ApiError(
                409, f"session {name!r} has a request in flight: wait for it, or cancel it", param="session", code="session_busy"
            )
        held.busy, held.used_s = True, self._clock()
        self._held.move_to_end(name)
        return held

    def finished(self, name: str, new_tokens: int, completion: Completion) -> None:
        """The request of ``begin`` is answered with ``completion``."""
        held = self._held.get(name)
        if held is not None:
            held.busy, held.used_s, held.tokens = False, self._clock(), held.tokens + new_tokens + len(completion.ids)

    def refused(self, name: str) -> None:
        """The request of ``begin`` changed nothing."""
        if name in self._held:
            self._held[name].busy = False

    async def cancel(self, name: str) -> None:
        """Ends the session's request with what it has sampled."""
        await self._sampler.cancel(self.get(name).inner)

    async def close(self, name: str) -> None:
        """Ends the session; unknown names are a no-op."""
        held = self._held.pop(name, None)
        if held is not None:
            await self._sampler.close(held.inner)
