"""Errors as OpenAI's API shows them.

Owns: ``ApiError`` and its body. Promises: the message says what to do. Does not: decide when.
"""

from __future__ import annotations

from typing import Any

_TYPES = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error"}


class ApiError(Exception):
    """What a client gets instead of an answer. ``retry_after_s``: when it may try again, sent as the header of that name."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, retry_after_s: int | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.retry_after_s = status, message, param, code, retry_after_s

    def body(self) -> dict[str, Any]:
        """The JSON object of the answer."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 and self.status != 429 else "server_error")
        kind = "rate_limit_error" if self.status == 429 else kind
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        """Headers that go with it."""
        found = {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}
        return found | ({"WWW-Authenticate": "Bearer"} if self.status == 401 else {})
