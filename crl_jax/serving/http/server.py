"""The HTTP server: its parts put together, its socket, signals and orderly end.

Owns: the listening socket. Promises: listens on this machine only unless there is a token; SIGINT and SIGTERM end it within
``grace_s`` plus a few seconds, running requests get that long to finish; an address that cannot be used is one line that says why. Does
not: load models.
"""

from __future__ import annotations

import errno
import pathlib
import socket
from collections.abc import Callable

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

__all__ = ["Address", "bound", "front", "serve"]


def front(
    sampler: EngineSampler,
    codec: TextCodec,
    model: str,
    *,
    token: str = "",
    queue: int,
    constrained: bool = False,
    weights: tuple[pathlib.Path, Load] | None = None,
    clock: Callable[[], float],
    now: Callable[[], float],
) -> Front:
    """What the routes work with.

    ``weights``: the folder new weights may come from, and what loads a file; ``clock`` counts seconds, ``now`` is the time of day.
    """
    sessions = Sessions(sampler, clock)
    updates = None
    if weights is not None:
        folder, load = weights
        updates = WeightUpdates(sampler, lambda name: inside(folder, name), load)
    completions = Completions(sampler, codec, sessions, model, limit=queue, now=now)
    return Front(sampler, codec, model, completions, sessions, Answers(clock), updates, token, now, constrained)


async def serve(front: Front, listening: socket.socket, *, ready: Callable[[str, int], None], grace_s: float = 3.0) -> None:
    """Serves until a signal comes. ``ready(host, port)`` is called when requests are accepted. Raises AccessError before that, and
    AddressError: of two sockets that have the same address, which the system allows, the first to listen gets it.
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
        with stop_event() as stop:
            ready(host, port)
            await stop.wait()
        front.completions.closing = True
    finally:
        await runner.cleanup()
