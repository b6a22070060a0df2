"""Who may use a server of ours.

Owns: the rule that a server without a token listens on this machine only, and the comparison of tokens. Promises: a comparison takes the
same time whatever the wrong token is. Does not: read files or environment variables.
"""

from __future__ import annotations

import hmac
import ipaddress

from crl_jax.errors import UserError


class AccessError(UserError, ValueError):
    """A server that would be open to anyone, or a token nobody could send."""

    exit_code = 2


class AddressError(UserError, OSError):
    """An address that cannot be listened on."""


def is_loopback(host: str) -> bool:
    """Whether ``host`` (a name or an address, with or without brackets) is this machine alone."""
    name = host.strip("[]")
    if name.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def check_open_to(host: str, token: str) -> None:
    """Raises AccessError for a host other than this machine without a token, and for a token that cannot be a header's value."""
    if not token and not is_loopback(host):
        raise AccessError(f"--host {host or repr('')} can be reached from other machines: give a token with --token-file, or use 127.0.0.1")
    if token and (not token.isascii() or not token.isprintable() or " " in token):
        raise AccessError("the token must be printable ASCII characters without spaces: it travels in a header")


def may_enter(authorization: str | None, token: str) -> bool:
    """Whether the value of an ``Authorization`` header (``Bearer TOKEN``) is right; everything is when there is no token.

    Bytes of the header that are no text are just wrong.
    """
    if not token:
        return True
    scheme, _, given = (authorization or "").partition(" ")
    return hmac.compare_digest(given.strip().encode(errors="surrogatepass"), token.encode()) and scheme.lower() == "bearer"


def is_local_request(host_header: str) -> bool:
    """Whether a ``Host`` header names this machine: a web page that had its own name point here sends another one."""
    name = host_header.rsplit(":", 1)[0] if host_header.count(":") == 1 or host_header.startswith("[") else host_header
    return is_loopback(name if not host_header.endswith("]") else host_header)
