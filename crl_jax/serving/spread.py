"""Several servers as one sampler: every session on the one that has the fewest.

Owns: which server a session or a completion goes to, and which servers are away. Promises: a session stays where it was opened; a server
that does not answer (after its own repeats) is left out, counted, and looked at again in the background, at growing intervals, when work
comes: nobody waits for it while another is up; a completion that failed for its server alone is asked of another one, once. Does not:
repeat requests (``remote_edge``) or move a session.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import itertools
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from crl_jax.records import Completion, SamplingParams
from crl_jax.serving.remote import CannotPublish, RemoteSampler
from crl_jax.serving.remote_edge import RemoteRefused, RemoteUnavailable
from crl_jax.serving.remote_weights import ServerAway, WeightFiles
from crl_jax.serving.sampler import SamplerClosed

Connect = Callable[[], Awaitable[RemoteSampler]]
_LOOK_S = 10.0  # one look at a server


class NoServer(RemoteUnavailable):
    """None of the servers answers."""


@dataclasses.dataclass(frozen=True)
class Backoff:
    """Seconds until a server that is away is looked at again: ``first_s``, then double, at most ``longest_s``."""

    first_s: float = 1.0
    longest_s: float = 30.0

    def wait_s(self, failed: int) -> float:
        """After ``failed`` looks or requests in a row."""
        return min(self.longest_s, self.first_s * 2 ** min(failed - 1, 30))


@dataclasses.dataclass(eq=False)
class _Server:
    """``sampler`` is there from the first connection on; ``sessions`` also counts completions; ``error`` is why it is away."""

    url: str
    connect: Connect
    sampler: RemoteSampler | None = None
    up: bool = False
    failed: int = 0
    again_s: float = 0.0
    sessions: int = 0
    error: BaseException | None = None
    look: asyncio.Task[None] | None = None


class SpreadSampler:
    """A ``Sampler``. For one event loop, but for ``publish`` and ``stats``. ``vocab_size`` and ``max_length`` are 0 before the first
    connection (`connected`); ``version`` is the smallest of the servers that are up.

    ``connect`` has a way to each server by its url. ``patience_s``: how long a session or a completion waits for a server while none
    answers; 0 raises NoServer at once, naming all. ``files``: where `publish` writes weights; each server's own hook then takes the file's
    name. ``tell`` hears of every change. ``clock`` counts seconds.
    """

    def __init__(
        self,
        connect: Mapping[str, Connect],
        *,
        patience_s: float = 0.0,
        backoff: Backoff | None = None,
        files: WeightFiles | None = None,
        tell: Callable[[str], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.vocab_size = self.max_length = self.version = 0
        self._servers = [_Server(url, way) for url, way in connect.items()]
        self._patience_s, self._backoff, self._files, self._tell, self._clock = patience_s, backoff or Backoff(), files, tell, clock
        self._sessions: dict[str, tuple[_Server, str]] = {}
        self._names = itertools.count()
        self._next = 0
        self._counts: Counter[str] = Counter()
        self._wrong: Exception | None = None  # a server that cannot be used: raised by everything from then on
        self._closing = asyncio.Event()

    async def connected(self, patience_s: float = 0.0) -> None:
        """Connect to every server. Raises what a server that cannot be used raised, and NoServer when some do not answer in time."""
        end_s = self._clock() + patience_s
        while missing := [server for server in self._servers if server.sampler is None]:
            await asyncio.wait([self._look_at(server) for server in missing])
            self._require_open()
            missing = [server for server in missing if server.sampler is None]
            if missing and self._clock() >= end_s:
                raise NoServer(_away(missing)) from missing[0].error
            if missing:
                await self._pause(min(server.again_s for server in missing))

    async def open(self) -> str:
        server, sampler = await self._choose()
        name = f"s{next(self._names)}"
        server.sessions += 1
        self._sessions[name] = (server, await sampler.open())
        return name

    async def generate(self, session: str, new_ids: Sequence[int], params: SamplingParams) -> Completion:
        """As the protocol says. A server that fails is left out from then on; the session stays on it, and ends with the error."""
        self._require_open()
        if session not in self._sessions:
            raise KeyError(f"session {session!r} is not open: open() gives a new one")
        server, inner = self._sessions[session]
        assert server.sampler is not None
        with self._watched(server):
            return await server.sampler.generate(inner, new_ids, params)

    async def close(self, session: str) -> None:
        server, inner = self._sessions.pop(session, (None, ""))
        if server is not None and server.sampler is not None:
            server.sessions -= 1
            await server.sampler.close(inner)

    async def complete(self, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        """As the protocol says. When its server fails another one is asked; while none answers it waits up to ``patience_s``."""
        last: _Server | None = None
        end_s = self._clock() + self._patience_s
        while True:
            server, sampler = await self._choose()
            if last is not None:
                self._counts["moved" if server is not last else "asked_again"] += 1
            server.sessions += 1
            try:
                with self._watched(server):
                    return await sampler.complete(prompt_ids, params)
            except (RemoteUnavailable, RemoteRefused) as error:
                if not _is_away(error) or (last is not None and self._clock() >= end_s):
                    raise
            finally:
                server.sessions -= 1
            last = server

    async def cancel(self, session: str) -> None:
        server, inner = self._sessions.get(session, (None, ""))
        if server is not None and server.sampler is not None:
            await server.sampler.cancel(inner)

    def publish(self, params: Any, version: int) -> None:
        """Writes the weights once and brings them to all servers at the same time; blocks until they have them. A server that is away gets
        them when it answers again. Raises CannotPublish without ``files``, PublishFailed when one refuses them, NoServer when none is up.
        """
        if self._files is None:
            raise CannotPublish(f"the servers {_urls(self._servers)} were given no way to publish weights: set server.weights_folder")
        name = self._files.write(params, version)
        with concurrent.futures.ThreadPoolExecutor(len(self._servers)) as pool:
            reached = list(pool.map(lambda server: self._bring(server, name, version), self._servers))
        if not any(reached):
            raise NoServer(_away(self._servers)) from self._servers[0].error
        self._files.prune()
        self.version = self._smallest()
        self._counts["swaps"] += 1

    def stats(self) -> dict[str, int | float]:
        """The servers' counters, added up (``swaps`` are publishes to all), ``servers`` and how many are ``servers_up``, ``marked_down``,
        looks at servers that did not answer (``looks_failed``), completions that were ``moved`` or ``asked_again``."""
        found: dict[str, int | float] = {}
        for server in self._servers:
            for key, value in ({} if server.sampler is None else server.sampler.stats()).items():
                found[key] = found.get(key, 0) + value
        own = ("marked_down", "looks_failed", "moved", "asked_again", "swaps")
        gauges = {"servers": len(self._servers), "servers_up": sum(server.up for server in self._servers)}
        return found | {name: self._counts[name] for name in own} | gauges

    async def aclose(self) -> None:
        self._closing.set()
        looks = [server.look for server in self._servers if server.look is not None]
        for look in looks:
            look.cancel()
        await asyncio.gather(*looks, return_exceptions=True)
        await asyncio.gather(*(server.sampler.aclose() for server in self._servers if server.sampler is not None))

    # ------------------------------------------------------------------------------------------------ which server

    async def _choose(self) -> tuple[_Server, RemoteSampler]:
        """The server for something new. Has those that are away looked at, if it is time; waits for that only while none is up."""
        end_s = self._clock() + self._patience_s
        while True:
            self._require_open()
            now_s = self._clock()
            for server in self._servers:
                if not server.up and now_s >= server.again_s:
                    self._look_at(server)
            if (found := self._fewest()) is not None:
                return found
            if looks := [server.look for server in self._servers if server.look is not None]:
                await asyncio.wait(looks, return_when=asyncio.FIRST_COMPLETED)
            elif now_s >= end_s:
                raise NoServer(_away(self._servers)) from self._servers[0].error
            else:
                await self._pause(min(end_s, *(server.again_s for server in self._servers)))

    def _fewest(self) -> tuple[_Server, RemoteSampler] | None:
        """The server that is up and has the fewest sessions; among equals in turn."""
        order = [*self._servers[self._next :], *self._servers[: self._next]]
        up = [(server, server.sampler) for server in order if server.up and server.sampler is not None]
        if not up:
            return None
        found = min(up, key=lambda pair: pair[0].sessions)
        self._next = (self._servers.index(found[0]) + 1) % len(self._servers)
        return found

    def _look_at(self, server: _Server) -> asyncio.Task[None]:
        """One look for all who want it."""
        if server.look is None:
            server.look = asyncio.create_task(self._look(server))
        return server.look

    async def _look(self, server: _Server) -> None:
        try:
            if server.sampler is None:
                sampler = await server.connect()
                self.vocab_size = self.vocab_size or sampler.vocab_size
                self.max_length = min(self.max_length or sampler.max_length, sampler.max_length)
                server.sampler = sampler
            else:
                await server.sampler.look(_LOOK_S)
        except Exception as error:  # the door: nobody may be waiting for this look, so whoever asks next gets what is no matter of time
            if not _is_away(error):
                self._wrong = error
                return
            self._counts["looks_failed"] += 1
            self._leave_out(server, error)
        else:
            if server.failed:
                self._tell(f"{server.url} answers again")
            server.up, server.failed = True, 0
            self.version = self._smallest()
        finally:
            server.look = None

    @contextlib.contextmanager
    def _watched(self, server: _Server) -> Any:
        """What the error of a request means for its server."""
        try:
            yield
        except Exception as error:
            if _is_away(error) and server.up:
                self._counts["marked_down"] += 1
                self._leave_out(server, error)
            raise
        finally:
            self.version = self._smallest()

    def _leave_out(self, server: _Server, error: BaseException) -> None:
        server.up, server.error = False, error
        server.failed += 1
        wait_s = self._backoff.wait_s(server.failed)
        server.again_s = self._clock() + wait_s
        self._tell(f"{error or type(error).__name__}; looking again in {wait_s:g} s")

    def _bring(self, server: _Server, name: str, version: int) -> bool:
        """In a thread of its own. What is away is given the version, so that its next answer shows it has older weights."""
        if server.sampler is None:
            return False
        try:
            server.sampler.publish(name, version)
        except ServerAway as error:
            server.sampler.version = version
            self._counts["marked_down"] += server.up
            self._leave_out(server, error)
            return False
        return True

    def _smallest(self) -> int:
        known = [(server.up, server.sampler.version) for server in self._servers if server.sampler is not None]
        return min([version for up, version in known if up] or [version for _, version in known], default=0)

    def _require_open(self) -> None:
        if self._closing.is_set():
            raise SamplerClosed("the sampler is closed")
        if self._wrong is not None:
            raise self._wrong

    async def _pause(self, until_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._closing.wait(), max(0.0, until_s - self._clock()))


def _is_away(error: BaseException) -> bool:
    """Whether the server is the reason, and may be there again later: no answer, a late one, or one that says it has failed."""
    return isinstance(error, RemoteUnavailable | TimeoutError) or (isinstance(error, RemoteRefused) and error.status >= 500)


def _urls(servers: Sequence[_Server]) -> str:
    return ", ".join(server.url for server in servers)


def _away(servers: Sequence[_Server]) -> str:
    return f"no server answers of {_urls(servers)}: {'; '.join(str(server.error) for server in servers)}"
