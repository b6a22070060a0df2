"""What the bank's service takes at most, and how it says no.

Owns: ``Limits``, ``Refused`` and the checks of sizes and ids. Promises: a refusal names the limit and what to do. Does not: know gRPC's
codes as numbers (``door`` maps the names).
"""

from __future__ import annotations

import dataclasses
from typing import Literal

Code = Literal["INVALID_ARGUMENT", "NOT_FOUND", "FAILED_PRECONDITION", "RESOURCE_EXHAUSTED", "ALREADY_EXISTS"]

MESSAGE_BYTES = 32 * 2**20


class Refused(Exception):
    """A call the service does not carry out; ``code`` is the name of gRPC's status."""

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(message)
        self.code: Code = code


@dataclasses.dataclass(frozen=True)
class Limits:
    """Of one message in bytes, of one call in items, of one text in characters; ``calls`` in flight; ``call_timeout_s`` for a call that
    brings no deadline or a later one."""

    message_bytes: int = MESSAGE_BYTES
    queries: int = 1024
    episodes: int = 1024
    ops: int = 1024
    page: int = 1000
    text_chars: int = 20_000
    calls: int = 256
    call_timeout_s: float = 600.0

    def check_count(self, what: str, count: int, most: int) -> None:
        """RESOURCE_EXHAUSTED for more than ``most``, INVALID_ARGUMENT for none."""
        if count > most:
            raise Refused("RESOURCE_EXHAUSTED", f"{count} {what} in one call, {most} at most: send them in several calls")
        if count < 1:
            raise Refused("INVALID_ARGUMENT", f"no {what} in the call: send at least one")

    def check_text(self, what: str, text: str) -> None:
        """RESOURCE_EXHAUSTED for a text that is too long."""
        if len(text) > self.text_chars:
            raise Refused("RESOURCE_EXHAUSTED", f"{what} has {len(text)} characters, {self.text_chars} at most: shorten it")

    def check_message(self, size: int) -> None:
        """RESOURCE_EXHAUSTED for a message of more bytes."""
        if size > self.message_bytes:
            fix = "ask for less, or send it in several calls"
            raise Refused("RESOURCE_EXHAUSTED", f"a message of {size} bytes, {self.message_bytes} at most (--message-mib): {fix}")


def key_of(method: str, request_id: str) -> str:
    """Under which the answer of a call is kept. INVALID_ARGUMENT for an id that is none."""
    if not request_id or len(request_id) > 200 or not request_id.isprintable():
        fix = "send 1 to 200 printable characters, a new id for every change and the same one when you repeat it"
        raise Refused("INVALID_ARGUMENT", f"request_id {request_id[:40]!r}: {fix}")
    return f"{method}/{request_id}"


def named(what: str, value: str) -> str:
    """``value``. INVALID_ARGUMENT for an empty name or one of more than 500 characters."""
    if not value or len(value) > 500:
        raise Refused("INVALID_ARGUMENT", f"{what} is {'empty' if not value else 'longer than 500 characters'}: give its name")
    return value
