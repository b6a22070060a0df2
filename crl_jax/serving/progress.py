"""Tokens of a request while it still runs: what streaming needs.

Owns: who listens, and how much each has been told. Promises: a listener gets every sampled token once, in order, in its own event loop,
before the request's result; a request without a listener costs nothing. Does not: run on the caller's thread (``report`` is called by the
engine thread after each turn).
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from crl_jax.serving.inbox import Promise
from crl_jax.serving.scheduler import Request, Session


class Sampled(NamedTuple):
    """Newly sampled tokens: tuples of equal length, as in ``Completion``."""

    ids: tuple[int, ...]
    logps: tuple[float, ...]
    versions: tuple[int, ...]
    sampling_logps: tuple[float, ...] = ()


OnTokens = Callable[[Sampled], None]


@dataclasses.dataclass(eq=False)
class _Listener:
    request: Request
    promise: Promise
    on_tokens: OnTokens
    told: int = 0

    def news(self) -> Sampled:
        """What was sampled since the last call."""
        start, r = self.told, self.request
        self.told = len(r.ids)
        return Sampled(tuple(r.ids[start:]), tuple(r.logps[start:]), tuple(r.versions[start:]), tuple(r.sampling_logps[start:]))


class Progress:
    """The listeners of one engine thread."""

    def __init__(self) -> None:
        self._listeners: list[_Listener] = []

    def listen(self, session: Session | None, promise: Promise, on_tokens: OnTokens) -> None:
        """``on_tokens`` hears of the request that ``promise`` stands for; a refused request has nothing to tell."""
        request = None if session is None else session.request
        if request is not None and request.handle is promise:
            self._listeners.append(_Listener(request, promise, on_tokens))

    def report(self, done: Iterable[tuple[Promise, Any]]) -> None:
        """Tells everyone what is new; one wake-up per event loop. ``done`` are the requests that end now: it is their last time."""
        if not self._listeners:
            return
        ended = {id(promise) for promise, _ in done}
        by_loop: defaultdict[asyncio.AbstractEventLoop, list[tuple[_Listener, Sampled]]] = defaultdict(list)
        for listener in self._listeners:
            news = listener.news()
            if news.ids:
                by_loop[listener.promise.loop].append((listener, news))
        self._listeners = [x for x in self._listeners if id(x.promise) not in ended]
        for loop, news in by_loop.items():
            try:
                loop.call_soon_threadsafe(_tell, news)
            except RuntimeError:  # the event loop is closed: nobody can be listening
                gone = {id(listener) for listener, _ in news}
                self._listeners = [x for x in self._listeners if id(x) not in gone]


def _tell(news: list[tuple[_Listener, Sampled]]) -> None:
    for listener, sampled in news:
        if not listener.promise.future.done():  # a caller that gave up hears no more
            listener.on_tokens(sampled)
