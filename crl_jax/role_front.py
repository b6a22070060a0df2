"""A training process that lets others sample from its role: the server of ``crl serve`` in the background.

Owns: the order: an address is taken before models are loaded (`reserved`), requests are accepted when there is a sampler (`open_front`) and
no more when the front is closed. Promises: a port in use, or an address others can reach without a token, is found at once; until the front
opens connections are refused, so clients try again; new weights published to the sampler reach requests in flight as those of the process
itself; an engine that stopped answers 5xx and is raised by `RoleFront.check`; closing has a deadline. Does not: own the sampler (close the
front first) or bring weights to it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import socket
from collections.abc import Iterator

from crl_jax.rollout.shell import Shell
from crl_jax.serving.access import check_open_to
from crl_jax.serving.http import server
from crl_jax.serving.http.app import Front
from crl_jax.serving.http.completions import TextCodec
from crl_jax.serving.sampler import EngineSampler, SamplerClosed

_START_S = 30.0
_END_S = 10.0  # after the grace: cancelled requests end


@dataclasses.dataclass(frozen=True)
class Reserved:
    """An address that is ours, where nothing listens yet, and the token that callers will need."""

    socket: socket.socket
    token: str

    @property
    def url(self) -> str:
        """Where the front will be. An address that stands for all of this machine's is named as it is."""
        host, port = self.socket.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@contextlib.contextmanager
def reserved(host: str, port: int, token: str = "") -> Iterator[Reserved]:
    """Holds the address inside the block; port 0 takes a free one. Raises AccessError and AddressError."""
    check_open_to(host, token)
    with server.bound(server.Address(host, port)) as bound:
        yield Reserved(bound, token)


class RoleFront:
    """A front that accepts requests until it is closed; made by `open_front`, a context manager. For the thread that owns ``shell``."""

    def __init__(self, url: str, front: Front, shell: Shell, running: contextlib.AsyncExitStack, grace_s: float) -> None:
        self.url = url
        self._front, self._shell, self._running, self._grace_s = front, shell, running, grace_s
        self._open = True

    def check(self) -> None:
        """Raises what stopped the engine: every request fails, and will until the process is started again."""
        failure = self._front.sampler.failure
        if failure is not None and not isinstance(failure, SamplerClosed):
            raise failure
        self._shell.check()

    def stats(self) -> dict[str, int | float]:
        """The sampler's counters and the front's own, ``http_...``."""
        return self._front.stats()

    def close(self) -> None:
        """Accept no more; requests in flight get ``grace_s`` to finish. Safe to call twice. Raises TimeoutError past that and 10 s."""
        if self._open:
            self._open = False
            self._shell.finish(self._running.aclose(), self._grace_s + _END_S, f"ending the server at {self.url}")

    def __enter__(self) -> RoleFront:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_front(
    name: str,
    sampler: EngineSampler,
    codec: TextCodec,
    *,
    at: Reserved,
    shell: Shell,
    queue: int,
    constrained: bool = False,
    grace_s: float = 3.0,
) -> RoleFront:
    """Serves ``sampler`` as the model ``name`` on ``shell`` from now on; ``queue`` completions may be in flight (a multiple of the slots).

    ``constrained``: whether its engine has the actions of an environment. Raises AddressError when another socket has come to listen there.
    """
    front = server.front(sampler, codec, name, token=at.token, queue=queue, constrained=constrained)
    running = contextlib.AsyncExitStack()
    shell.call(running.enter_async_context(server.running(front, at.socket, grace_s=grace_s)), _START_S, f"starting a server at {at.url}")
    return RoleFront(at.url, front, shell, running, grace_s)
