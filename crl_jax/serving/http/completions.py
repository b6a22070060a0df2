"""From a request to the sampler and back to bytes.

Owns: how many completions may be in flight, and what an error of the sampler means to a client. Promises: a caller that goes away (its
task is cancelled) frees its slots; of several choices either all are answered or none; a request beyond the limit is refused at once
instead of waiting. Does not: know HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any, Protocol

from crl_jax.records import Completion
from crl_jax.serving.http import response
from crl_jax.serving.http.answers import Answer
from crl_jax.serving.http.errors import ApiError
from crl_jax.serving.http.request import CompletionRequest, Prompt
from crl_jax.serving.http.sessions import Sessions
from crl_jax.serving.http.text import TextStream
from crl_jax.serving.progress import OnTokens, Sampled
from crl_jax.serving.sampler import EngineSampler, PromptTooLong, SamplerClosed


class TextCodec(Protocol):
    """What is needed of ``models.codec.ChatCodec``."""

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end a completion."""
        ...

    def encode(self, text: str) -> list[int]:
        """Ids of plain text."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids."""
        ...


class Completions:
    """``limit`` completions may be in flight, running or waiting for a slot. ``now`` is the time of day in seconds."""

    def __init__(
        self, sampler: EngineSampler, codec: TextCodec, sessions: Sessions, model: str, *, limit: int, now: Callable[[], float]
    ) -> None:
        self._sampler, self._codec, self._sessions, self._model, self._now = sampler, codec, sessions, model, now
        self._limit = limit
        self.in_flight = 0
        self.overloaded = 0
        self.closing = False

    async def answer(self, request: CompletionRequest, name: str) -> Answer:
        """The whole answer. Raises ApiError."""
        with self._admitted(request.choices):
            completions = await _all([self._sample(request, k) for k in range(request.choices)])
        decode = self._codec.decode
        choices = [response.whole_choice(request, k, completion, decode) for k, completion in enumerate(completions)]
        version = next((v for c in completions[:1] for v in c.versions[-1:]), self._sampler.version)
        body = self._envelope(name, choices, version) | {"usage": self._usage(request, completions)}
        return Answer(json.dumps(body, ensure_ascii=False, allow_nan=False).encode(), {"x-weight-version": str(version)})

    async def events(self, request: CompletionRequest, name: str) -> AsyncIterator[bytes]:
        """The answer as server-sent events, tokens as they come. Raises ApiError, before the first event for a request that is refused."""
        queue: asyncio.Queue[tuple[int, Sampled | Completion | Exception]] = asyncio.Queue()

        async def run(k: int) -> None:
            try:
                queue.put_nowait((k, await self._sample(request, k, lambda sampled: queue.put_nowait((k, sampled)))))
            except Exception as error:  # reaches the client through the queue
                queue.put_nowait((k, error))

        streams = [_ChoiceStream(request, k, self._codec.decode) for k in range(request.choices)]
        done: list[Completion] = []
        with self._admitted(request.choices):
            tasks = [asyncio.create_task(run(k)) for k in range(request.choices)]
            try:
                while len(done) < request.choices:
                    k, item = await queue.get()
                    if isinstance(item, Exception):
                        raise item
                    choice = streams[k].tokens(item) if isinstance(item, Sampled) else streams[k].end(item)
                    if isinstance(item, Completion):
                        done.append(item)
                    if choice is not None:
                        version = next(iter(item.versions[-1:]), self._sampler.version)
                        yield response.event(self._envelope(name, [choice], version))
            finally:
                await _cancelled(tasks)
        if request.usage_at_end:
            yield response.event(self._envelope(name, [], self._sampler.version) | {"usage": self._usage(request, done)})
        yield response.event("[DONE]")

    @contextlib.contextmanager
    def _admitted(self, choices: int) -> Iterator[None]:
        if self.closing:
            raise ApiError(503, "the server is shutting down: ask another one", code="shutting_down", retry_after_s=5)
        if choices > self._limit:  # waiting would not help
            message = f"{choices} completions are asked for and {self._limit} may be in flight: send several requests, or raise --queue"
            raise ApiError(400, message, param="n", code="too_many_choices")
        if self.in_flight + choices > self._limit:
            self.overloaded += 1
            message = f"{self.in_flight} completions are in flight and {self._limit} may be: try again, or raise --queue"
            raise ApiError(429, message, code="overloaded", retry_after_s=1)
        self.in_flight += choices
        try:
            yield
        finally:
            self.in_flight -= choices

    async def _sample(self, request: CompletionRequest, k: int, on_tokens: OnTokens | None = None) -> Completion:
        prompt, params = request.choice(k)
        ids = self._ids(prompt)
        try:
            if request.session:
                return await self._in_session(request.session, ids, params, on_tokens)
            return await self._sampler.complete(ids, params, on_tokens=on_tokens)
        except PromptTooLong as error:
            raise ApiError(400, f"{error}: shorten the prompt", param="prompt", code="context_length_exceeded") from error
        except (ValueError, TypeError) as error:
            if error is self._sampler.failure:  # not this request's fault
                raise
            raise ApiError(400, str(error), code="invalid_value") from error
        except TimeoutError as error:
            raise ApiError(504, str(error), code="deadline") from error
        except SamplerClosed as error:
            raise ApiError(503, str(error), code="shutting_down", retry_after_s=5) from error

    async def _in_session(self, name: str, ids: list[int], params: Any, on_tokens: OnTokens | None) -> Completion:
        held = self._sessions.begin(name)
        try:
            completion = await self._sampler.generate(held.inner, ids, params, on_tokens=on_tokens)
        except (ValueError, TypeError):  # refused: the session is as it was
            self._sessions.refused(name)
            raise
        except BaseException:
            await self._sessions.close(name)
            raise
        self._sessions.finished(name, len(ids), completion)
        return completion

    def _ids(self, prompt: Prompt) -> list[int]:
        return self._codec.encode(prompt) if isinstance(prompt, str) else list(prompt)

    def _envelope(self, name: str, choices: list[dict[str, Any]], version: int) -> dict[str, Any]:
        return response.envelope(name, self._now(), self._model, choices, version)

    def _usage(self, request: CompletionRequest, completions: Sequence[Completion]) -> dict[str, int]:
        return response.usage(sum(len(self._ids(prompt)) for prompt in request.prompts), completions)


class _ChoiceStream:
    """One choice while it is streamed."""

    def __init__(self, request: CompletionRequest, index: int, decode: response.Decode) -> None:
        self._request, self._index = request, index
        self._text: TextStream = response.text_stream(request, decode)
        self._shown = 0

    def tokens(self, sampled: Sampled) -> dict[str, Any] | None:
        """What to send for new tokens; None for nothing."""
        words = [self._text.push(token) for token in sampled.ids]
        choice = response.part_of_choice(self._request, self._index, words, sampled, self._shown)
        self._shown += len(choice["text"])
        return choice if choice["text"] or self._request.logprobs or self._request.token_ids else None

    def end(self, completion: Completion) -> dict[str, Any]:
        """The last part: text that was held, and why it ended."""
        nothing = response.part_of_choice(self._request, self._index, [], Sampled((), (), ()), self._shown)
        held = self._text.flush()
        return nothing | response.end_of_choice(self._request, completion, self._text) | {"text": held}


async def _all(coroutines: Sequence[Any]) -> list[Completion]:
    """All results; after the first error the others are cancelled."""
    tasks = [asyncio.ensure_future(c) for c in coroutines]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        await _cancelled(tasks)


async def _cancelled(tasks: Sequence[asyncio.Future[Any]]) -> None:
    """Cancels what still runs and waits for its end."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
