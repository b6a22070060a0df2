"""The HTTP server: its parts put together, its socket, signals and orderly end.

Owns: the listening socket. Promises: listens on this machine only unless there is a token; its end (`serve`: SIGINT and SIGTERM) takes at
most ``grace_s`` plus a few seconds, running requests get that long to finish; an address that cannot be used is one line that says why.
Does not: load models.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import pathlib
import socket
import time
from collections.abc import AsyncIterator, Callable

from crl_jax.checkpoint.paths import inside
from crl_jax.serving.access import check_open_to
from crl_jax.serving.http.answers import Answers
from crl_jax.serving.http.app import Front, make_app, web
from crl_jax.serving.http.completions import Completions, TextCodec
from crl_jax.serving.http.sessions import Sessions
from crl_jax.serving.http.weights import Load, WeightUpdates
from crl_jax.serving.listening import Address, bound, in_use
from crl_jax.serving.sampler import EngineSampler
from crl_jax.serving.signals import stop_event

__all__ = ["Address", "bound", "front", "running", "serve"]


def time_of_day() -> float:
    """Seconds since 1970."""
    return datetime.datetime.now(datetime.UTC).timestamp()


def front(
    sampler: EngineSampler,
    codec: TextCodec,
    model: str,
    *,
    token: str = "",
    queue: int,
    constrained: bool = False,
    weights: tuple[pathlib.Path, Load] | None = None,
    clock: Callable[[], float] = time.monotonic,
    now: Callable[[], float] = time_of_day,
) -> Front:
    """What the routes work with, ``model`` being its name for clients and ``queue`` the completions in flight at most.

    ``weights``: the folder new weights may come from, and what loads a file; ``clock`` counts seconds, ``now`` is the time of day.
    """
    sessions = Sessions(sampler, clock)
    updates = None
    if weights is not None:
        folder, load = weights
        updates = WeightUpdates(sampler, lambda name: inside(folder, name), load)
    completions = Completions(sampler, codec, sessions, model, limit=queue, now=now)
    return Front(sampler, codec, model, completions, sessions, Answers(clock), updates, token, now, constrained)


@contextlib.asynccontextmanager
async def running(front: Front, listening: socket.socket, *, grace_s: float = 3.0) -> AsyncIterator[tuple[str, int]]:
    """Serves inside the block, on its event loop; gives host and port. At the end requests get ``grace_s`` to finish, then they are
    cancelled. Raises AccessError before it begins, and AddressError: of two sockets that have the same address, which the system allows,
    the first to listen gets it.
    """
    host, port = listening.getsockname()[:2]
    check_open_to(host, front.token)
    runner = web.AppRunner(make_app(front), handler_cancellation=True, access_log=None, shutdown_timeout=grace_s)
    await runner.setup()
    try:
        try:
            await web.SockSite(runner, listening).start()
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise in_use(f"{host}:{port}") from error
            raise
        yield host, port
    finally:
        front.completions.closing = True
        await runner.cleanup()


async def serve(front: Front, listening: socket.socket, *, ready: Callable[[str, int], None], grace_s: float = 3.0) -> None:
    """`running` until a signal comes. ``ready(host, port)`` is called when requests are accepted."""
    async with running(front, listening, grace_s=grace_s) as (host, port):
        with stop_event() as stop:
            ready(host, port)
            await stop.wait()
