"""The servers a role's configuration names: ``actor.server``, ``extractor.server``.

Owns: how each is connected to. Promises: one whose model is shorter than the role's sequences, or that refuses, is a ConfigError that names
the key. Does not: decide how long to wait for a server, or what comes of one that is away (``serving.spread``).
"""

from __future__ import annotations

import contextlib
import functools
import pathlib
from collections.abc import Iterator, Mapping

from crl_jax.config.parse import ConfigError
from crl_jax.config.roles import RoleConfig
from crl_jax.serving.remote import RemoteSampler
from crl_jax.serving.remote_edge import RemoteError, RemoteUnavailable, Retry
from crl_jax.serving.remote_weights import Posts, SharedFolder
from crl_jax.serving.spread import Connect
from crl_jax.token_file import read_token

Hook = SharedFolder | Posts


def token_of(role: RoleConfig) -> str:
    """What its servers want to be sent, empty for nothing. Raises ConfigError when the file cannot be read."""
    return read_token(pathlib.Path(role.server.token_file) if role.server.token_file else None)


def ways(
    name: str,
    role: RoleConfig,
    *,
    vocab_size: int,
    retry: Retry,
    request_timeout_s: float,
    connect_timeout_s: float,
    hooks: Mapping[str, Hook] | None = None,
) -> dict[str, Connect]:
    """How to connect to each of the servers of the role called ``name``, by url. ``hooks`` publish to each of them.

    A way raises ConfigError for a server that cannot be used, RemoteUnavailable and TimeoutError for one that is not there.
    """
    token = token_of(role)

    async def connect(url: str) -> RemoteSampler:
        hook = None if hooks is None else hooks[url]
        with _as_config_error(name):
            sampler = await RemoteSampler.connect(
                url,
                model=role.server.model,
                vocab_size=vocab_size,
                token=token,
                publish=hook,
                republish=None if hook is None else hook.again,
                logprobs_of=role.server.logprobs,
                retry=retry,
                request_timeout_s=request_timeout_s,
                connect_timeout_s=connect_timeout_s,
            )
        if sampler.max_length < role.max_length:
            await sampler.aclose()
            wrong = f"{role.max_length}, but the server takes {sampler.max_length} tokens: make them equal"
            raise ConfigError(f"`{name}.max_length`: {wrong}")
        return sampler

    return {url: functools.partial(connect, url) for url in role.server.urls}


@contextlib.contextmanager
def _as_config_error(name: str) -> Iterator[None]:
    try:
        yield
    except RemoteUnavailable:
        raise
    except RemoteError as error:
        if getattr(error, "status", 0) >= 500:  # it has failed, and may be started again
            raise
        raise ConfigError(f"`{name}.server.url`: {error}") from error
