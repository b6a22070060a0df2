"""A socket to listen on.

Owns: the way from an address a person gives to a bound socket. Promises: an address that cannot be used is one line that says why, before
anything else has started. Does not: listen, or know a protocol.
"""

from __future__ import annotations

import dataclasses
import errno
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from crl_jax.serving.access import AddressError


@dataclasses.dataclass(frozen=True)
class Address:
    """Where to listen; port 0 takes a free one."""

    host: str = "127.0.0.1"
    port: int = 8000


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
                raise in_use(where) from error
            if error.errno == errno.EACCES:
                raise AddressError(f"this user may not listen on {where}: choose a --port above 1023") from error
            raise AddressError(f"cannot listen on {where} ({error.strerror}): correct --host") from error
        yield found


def in_use(where: str) -> AddressError:
    """What is raised for an address that another program listens on."""
    return AddressError(f"{where} is in use by another program: choose another --port (0 takes a free one)")
