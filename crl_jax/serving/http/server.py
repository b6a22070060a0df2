"""The HTTP server: its parts put together, its socket, signals and orderly end.

Owns: the listening socket. Promises: listens on this machine only unless there is a token; SIGINT and SIGTERM end it within
``grace_s`` plus a few seconds, running requests get that long to finish; an address that cannot be used is one line that says why. Does
not: load models.
"""

from __future__ import annotations

import dataclasses
import errno
import pathlib
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from crl_jax.checkpoint.paths import inside
from crl_jax.serving.access import AddressError, check_open_to
from crl_jax.serving.http.answers import Answers
from crl_jax.serving.http.app import Front, make_app, web
from crl_jax.serving.http.completions import Completions, TextCodec
from crl_jax.serving.http.sessions import Sessions
from crl_jax.serving.http.weights import Load, WeightUpdates
from crl_jax.serving.sampler import EngineSampler
from crl_jax.serving.signals import stop_event


@dataclasses.dataclass(frozen=True)
class Address:
    """Where to listen; port 0 takes a free one."""

    host: str = "127.0.0.1"
    port: int = 8000


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


@contextmanager
def bound(address: Address) -> Iterator[socket.socket]:
    """A socket that has the address but does not listen yet. Raises AddressError."""
    where = f"{address.host}:{address.port}"
    try:
        family, kind, number, _, at = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        found = socket.socket(family, kind, number)
    except OSError as error:
        raise AddressError(f"{where} is no address of this machine ({error.strerror}): correct --host") from error
    with found:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port whose last server has just ended is free
        try:
            found.bind(at)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise _in_use(where) from error
            if error.errno == errno.EACCES:
                raise AddressError(f"this user may not listen on {where}: choose a --port above 1023") from error
            raise AddressError(f"cannot listen on {where} ({error.strerror}): correct --host") from error
        yield found


def _in_use(where: str) -> AddressError:
    return AddressError(f"{where} is in use by another program: choose another --port (0 takes a free one)")


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
                raise _in_use(f"{host}:{port}") from error
            raise
        with stop_event() as stop:
            ready(host, port)
            await stop.wait()
        front.completions.closing = True
    finally:
        await runner.cleanup()
