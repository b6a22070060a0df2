"""A sampler on another machine: the ``Sampler`` protocol over an OpenAI-compatible server.

Owns: the sessions' token ids and what the server knows of them. Promises: ids in, ids out (text is never tokenized again); the ids here are
the truth, so a server that loses a session, restarts or is repeated a request changes nothing but time; tokens carry the version the server
says sampled them; every wait has a deadline. With our own server only the new ids of a turn travel; with another one all ids do, and its
prefix cache makes that cheap. Does not: transfer weights itself (``publish`` calls the hook given at construction).

Differences to a sampler in this process: ``cancel`` of a request on a server that is not ours ends it with no tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import secrets
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from crl_jax.errors import UserError
from crl_jax.records import Completion, Finish, SamplingParams
from crl_jax.serving.remote_edge import Edge, RemoteError, RemoteRefused, Retry
from crl_jax.serving.remote_wire import Card, LogprobsOf, read_completion, request_body
from crl_jax.serving.sampler import PromptTooLong, SamplerClosed

PublishHook = Callable[[Any, int], None]
_SHORT_S = 10.0  # for closing and cancelling sessions


class CannotPublish(UserError, RuntimeError):
    """A remote sampler that was given no way to bring weights to its server."""


@dataclasses.dataclass(eq=False)
class _Session:
    """``held`` is the server's name for it and ``synced`` how many of ``ids`` it knows there. ``keep``: worth a session on the server."""

    ids: list[int] = dataclasses.field(default_factory=list)
    keep: bool = True
    held: str = ""
    synced: int = 0
    running: asyncio.Task[Completion] | None = None


class RemoteSampler:
    """Made by ``connect``. For one event loop, but for ``publish`` and ``stats``."""

    def __init__(
        self,
        edge: Edge,
        card: Card,
        *,
        publish: PublishHook | None,
        logprobs_of: LogprobsOf,
        request_timeout_s: float,
        republish: Callable[[], None] | None = None,
    ) -> None:
        self.vocab_size, self.max_length, self.version = card.vocab_size, card.max_length, card.version
        self._edge, self._card, self._publish, self._republish = edge, card, publish, republish
        self._handed = card.version  # the newest version given to ``publish``, which the server may have before ``publish`` returns
        self._bringing_back = asyncio.Lock()
        self._logprobs_of: LogprobsOf = logprobs_of
        self._timeout_s = request_timeout_s
        self._sessions: dict[str, _Session] = {}
        self._names = itertools.count()
        self._counts: Counter[str] = Counter()
        self._chores: set[asyncio.Task[None]] = set()
        self._closed = False

    @staticmethod
    async def connect(
        url: str,
        *,
        model: str = "",
        vocab_size: int = 0,
        token: str = "",
        publish: PublishHook | None = None,
        republish: Callable[[], None] | None = None,
        logprobs_of: LogprobsOf = "raw",
        retry: Retry | None = None,
        request_timeout_s: float = 600.0,
        connect_timeout_s: float = 60.0,
    ) -> RemoteSampler:
        """A sampler over the server at ``url``, e.g. ``http://host:8000``. ``vocab_size`` is that of the caller's tokenizer (0: the
        server's); ``publish(params, version)`` brings weights to the server, and ``republish()`` the same ones again to one that restarted
        and samples with its first; ``logprobs_of`` says what a foreign server's log-probs are of.

        Raises RemoteError when the server cannot be used, TimeoutError past ``connect_timeout_s``.
        """
        edge = Edge(url, token=token, retry=retry)
        try:
            reply = await edge.ask("GET", "/v1/models", timeout_s=connect_timeout_s)
            card = Card.read(reply.body, model, vocab_size)
        except BaseException:
            await edge.aclose()
            raise
        return RemoteSampler(edge, card, publish=publish, logprobs_of=logprobs_of, request_timeout_s=request_timeout_s, republish=republish)

    async def open(self) -> str:
        """A new, empty session; the server hears of it with the first request."""
        return self._open(keep=True)

    async def generate(self, session: str, new_ids: Sequence[int], params: SamplingParams) -> Completion:
        """As the protocol says; besides, RemoteError for a server that fails, TimeoutError past ``request_timeout_s``."""
        self._require_open()
        held = self._sessions.get(session)
        if held is None:
            raise KeyError(f"session {session!r} is not open: open() gives a new one")
        if held.running is not None:
            raise ValueError(f"session {session!r} already has a request in flight: await or cancel it first")
        context = [*held.ids, *self._checked(held, new_ids, params)]
        held.running = asyncio.create_task(self._ask(held, context, params))
        try:
            completion = await held.running
        except asyncio.CancelledError:
            self._let_go(held)
            if (task := asyncio.current_task()) is not None and task.cancelling():
                held.running.cancel()
                raise
            self._require_open()
            completion = Completion((), (), (), (), Finish.CANCELLED)  # by ``cancel``: what the server had is not known
        except ValueError:  # refused, PromptTooLong among it: the session is as it was
            raise
        except Exception:
            self._let_go(held)
            raise
        finally:
            held.running = None
        held.ids = [*context, *completion.ids]
        held.synced = len(held.ids) if held.held else 0
        self._count(completion, len(context))
        return completion

    async def close(self, session: str) -> None:
        """Ends the session, here at once; the server is told in the background."""
        held = self._sessions.pop(session, None)
        if held is not None:
            if held.running is not None:
                held.running.cancel()
            self._let_go(held)

    async def complete(self, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        """One completion, without a session on the server."""
        session = self._open(keep=False)
        try:
            return await self.generate(session, prompt_ids, params)
        finally:
            await self.close(session)

    async def cancel(self, session: str) -> None:
        """Ends the session's request: on our server with the tokens it has, on another one with none."""
        held = self._sessions.get(session)
        if held is None or held.running is None:
            return
        self._counts["cancelled"] += 1
        running = held.running
        if held.held:
            with contextlib.suppress(RemoteError, TimeoutError):  # the connection is cut below instead
                await self._edge.ask("POST", f"/v1/sessions/{held.held}/cancel", {}, timeout_s=_SHORT_S)
                await asyncio.wait([running], timeout=_SHORT_S)
        running.cancel()

    async def look(self, timeout_s: float) -> None:
        """Asks whether the server is there and can sample. Raises RemoteError, and TimeoutError past ``timeout_s``."""
        await self._edge.ask("GET", "/health" if self._card.ours else "/v1/models", timeout_s=timeout_s)

    def publish(self, params: Any, version: int) -> None:
        """Brings weights to the server by the hook; blocks until it has them. Raises CannotPublish without a hook."""
        if self._publish is None:
            raise CannotPublish(
                f"the sampler at {self._edge.url} was given no way to publish weights: name a folder the server can read, e.g. "
                "actor.server.weights_folder, and start it with --weights-folder"
            )
        self._handed = version
        self._publish(params, version)
        self.version = version
        self._counts["swaps"] += 1

    def stats(self) -> dict[str, int | float]:
        """Counters since the start; ``retries`` and ``retried_<why>`` are requests that were sent again."""
        names = (
            "decoded_tokens",
            "prompt_tokens",
            "swaps",
            "cancelled",
            "stale_answers",
            "unversioned_answers",
            "republished",
            "sessions_lost",
        )
        found: dict[str, int | float] = {name: self._counts[name] for name in names}
        found |= dict.fromkeys(("requests", "retries", "unavailable"), 0)
        return found | self._edge.counts | {"open_sessions": len(self._sessions)}

    async def aclose(self) -> None:
        """Stops; requests in flight fail with SamplerClosed. Sessions on the server are closed within a deadline, or expire there."""
        self._closed = True
        for name in list(self._sessions):
            await self.close(name)
        if self._chores:
            _, late = await asyncio.wait(self._chores, timeout=_SHORT_S)
            for chore in late:
                chore.cancel()
        await self._edge.aclose()

    # ------------------------------------------------------------------------------------------------ one request

    async def _ask(self, held: _Session, context: list[int], params: SamplingParams) -> Completion:
        """The completion after ``context``. A session the server has lost is opened again, with all ids: as often as a request is sent
        again, for a server can restart more than once while one runs. All of it has one deadline.
        """
        deadline_s = self._edge.now() + self._timeout_s
        for left in reversed(range(self._edge.attempts + 1)):
            if self._card.ours and held.keep and not held.held:
                held.held, held.synced = await self._open_there(deadline_s - self._edge.now()), 0
            room = self.max_length - len(context)
            prompt = context[held.synced :] if held.held else context
            body = request_body(self._card, prompt, params, room=room, session=held.held, logprobs_of=self._logprobs_of)
            known, brought_back = self.version, self._counts["republished"]
            try:
                name = f"crl-{secrets.token_hex(12)}"
                reply = await self._edge.ask("POST", "/v1/completions", body, request_id=name, timeout_s=deadline_s - self._edge.now())
                completion = read_completion(reply, self._card, params)
                lost = self._lost(completion, known)
                completion = self._versioned(completion, lost)
                if lost:
                    await self._bring_back(brought_back, deadline_s)
                return completion
            except RemoteRefused as error:
                if error.code in ("session_not_found", "session_busy") and left:  # busy: our own request whose connection broke
                    self._counts["sessions_lost"] += 1
                    self._let_go(held)
                    continue
                if error.code == "context_length_exceeded":
                    raise PromptTooLong(str(error)) from error
                if error.status == 400:
                    raise ValueError(str(error)) from error
                raise
        raise AssertionError("unreachable: the last round returns or raises")

    def _checked(self, held: _Session, new_ids: Sequence[int], params: SamplingParams) -> list[int]:
        ids = [int(i) for i in new_ids]
        if any(not 0 <= i < self.vocab_size for i in ids):
            raise ValueError(f"token ids must be in 0..{self.vocab_size - 1}, got {min(ids)}..{max(ids)}")
        end = len(held.ids) + len(ids)
        if end == 0:
            raise ValueError("an empty prompt has nothing to sample from: give at least one id")
        if end >= self.max_length:
            raise PromptTooLong(f"{end} ids leave no room for a token within max_length={self.max_length}")
        request_body(self._card, [], params, room=1, session="", logprobs_of=self._logprobs_of)  # refuses what the server cannot do
        return ids

    def _lost(self, completion: Completion, known: int) -> bool:
        """Whether the server samples with weights of before (``known``: the version when it was asked), or with some we never gave it:
        it has restarted with its first ones, whose version may be a later one of another run.
        """
        last = completion.versions[-1:]
        return bool(last) and (last[0] < known or (self._republish is not None and last[0] > max(self._handed, known)))

    def _versioned(self, completion: Completion, lost: bool) -> Completion:
        """With the version in use here when the server says none; one of a server that has ``lost`` ours is counted, not changed."""
        if completion.ids and not completion.versions:
            self._counts["unversioned_answers"] += 1
            return dataclasses.replace(completion, versions=(self.version,) * len(completion.ids))
        if lost or (completion.versions and completion.versions[-1] < self.version):
            self._counts["stale_answers"] += 1
            return completion
        self.version = max(self.version, *completion.versions, 0)
        return completion

    async def _bring_back(self, seen: int, deadline_s: float) -> None:
        """Publishes the newest weights again to a server that has lost them, once for all requests that notice (``seen``: how often it had
        been done when they were sent). Raises what the hook raises, and TimeoutError past the request's deadline.
        """
        if self._republish is None:
            return
        async with asyncio.timeout(max(0.0, deadline_s - self._edge.now())), self._bringing_back:
            if self._counts["republished"] == seen:
                await asyncio.to_thread(self._republish)
                self._counts["republished"] += 1

    def _count(self, completion: Completion, prompt_tokens: int) -> None:
        self._counts["decoded_tokens"] += len(completion.ids)
        self._counts["prompt_tokens"] += prompt_tokens

    # ------------------------------------------------------------------------------------------------ sessions

    def _open(self, *, keep: bool) -> str:
        self._require_open()
        name = f"r{next(self._names)}"
        self._sessions[name] = _Session(keep=keep)
        return name

    def _require_open(self) -> None:
        if self._closed:
            raise SamplerClosed("the sampler is closed")

    async def _open_there(self, timeout_s: float) -> str:
        reply = await self._edge.ask("POST", "/v1/sessions", {}, timeout_s=timeout_s)
        name = reply.body.get("id")
        if not isinstance(name, str) or not name:
            raise RemoteError(f"{self._edge.url}/v1/sessions gave a session without a name: {reply.body}")
        return name

    def _let_go(self, held: _Session) -> None:
        """Forgets the server's session and tells it so in the background: what it holds is not what we hold."""
        name, held.held, held.synced = held.held, "", 0
        if name:
            self._chore(self._delete(name))

    async def _delete(self, name: str) -> None:
        with contextlib.suppress(RemoteError, TimeoutError):  # it expires there by itself
            await self._edge.ask("DELETE", f"/v1/sessions/{name}", timeout_s=_SHORT_S)

    def _chore(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._chores.add(task)
        task.add_done_callback(self._chores.discard)
