"""The token that a server and its clients share.

Owns: reading it from a file, so that it is in no command line and no configuration. Does not: compare tokens (``serving.access``).
"""

from __future__ import annotations

import pathlib

from crl_jax.config.parse import ConfigError


def read_token(path: pathlib.Path | None) -> str:
    """The first line of the file; empty without a file. Raises ConfigError for a file that cannot be read or is empty."""
    if path is None:
        return ""
    try:
        token = path.read_text(encoding="utf-8").partition("\n")[0].strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"token file {path} cannot be read: {error}") from error
    if not token:
        raise ConfigError(f"token file {path} has no token in its first line")
    return token
