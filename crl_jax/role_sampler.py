"""Which sampler stands behind a role: an engine in this process, a server, or several.

Owns: that choice. Promises: each samples from the role's own weights as version 0 when it is returned. Does not: decide when it ends.
"""

from __future__ import annotations

import pathlib

from crl_jax.config.parse import ConfigError
from crl_jax.config.roles import RoleConfig
from crl_jax.lookup import RoleParts
from crl_jax.models.params import Params
from crl_jax.processes import Processes
from crl_jax.role_settings import engine_options
from crl_jax.rollout.shell import Shell
from crl_jax.serving.constraint import ActionTrie
from crl_jax.serving.publisher import Serving
from crl_jax.serving.sampler import EngineSampler, Sampler
from crl_jax.sharding.reshard import make_copy, make_reshard, on_own_part, own_part, serving_layout
from crl_jax.sharding.together import Together

CONNECT_TIMEOUT_S = 60.0


def open_sampler(
    name: str,
    role: RoleConfig,
    parts: RoleParts,
    trie: ActionTrie | None,
    shell: Shell,
    *,
    request_timeout_s: float,
    processes: Processes | None = None,
) -> tuple[Sampler, Serving]:
    """The sampler of the role called ``name`` and how its weights are to be published; ``processes``: those of the job.

    Raises ConfigError for a server that cannot be used, or whose model is shorter than the role's sequences.
    """
    if role.server.url:
        return _on_servers(name, role, parts, shell, request_timeout_s), Serving(parts.mesh, role.serve_dtype)
    from crl_jax.serving.jetstream_engine import JetStreamEngine  # imports JetStream, so only where an engine is made

    engine = JetStreamEngine(parts.model, trie=trie, **engine_options(role, own_part(parts.serve_mesh)))
    serving = Serving(parts.serve_mesh, role.serve_dtype, serving_layout(parts.mesh))
    sampler = EngineSampler(
        engine,
        served_params(parts, serving, processes),
        host_bytes=role.host_cache_mib * 2**20,
        request_timeout_s=request_timeout_s,
        drain_timeout_s=role.publish.drain_timeout_s if role.publish.drain else 0.0,
        role=name,
    )
    return sampler, serving


def served_params(parts: RoleParts, serving: Serving, processes: Processes | None = None) -> Params:
    """A copy of the role's first weights as its sampler wants them, on this process's devices."""
    same = serving.mesh == parts.mesh
    copy = make_copy(serving.dtype, serving.layout) if same else make_reshard(parts.model, serving.mesh, serving.dtype)
    meet = processes.meet if processes is not None and processes.count > 1 else None
    served = Together(copy, meet, "the program that brings the first weights")(parts.params)
    return on_own_part(served, own_part(serving.mesh))


def _on_servers(name: str, role: RoleConfig, parts: RoleParts, shell: Shell, request_timeout_s: float) -> Sampler:
    from crl_jax.role_server import Hook, token_of, ways  # imports aiohttp
    from crl_jax.serving.remote_edge import RemoteError, Retry
    from crl_jax.serving.remote_weights import Posts, SharedFolder, WeightFiles
    from crl_jax.serving.spread import SpreadSampler

    server, urls = role.server, role.server.urls
    if not server.weights_folder:
        fix = "name a folder both can read, and start the server with --weights-folder on it"
        raise ConfigError(f"`{name}.server.weights_folder`: the server must get this run's weights: {fix}")
    folder, token = pathlib.Path(server.weights_folder), token_of(role)
    hooks: dict[str, Hook] = {url: Posts(url, token=token, timeout_s=request_timeout_s) for url in urls}
    if len(urls) == 1:
        hooks = {urls[0]: SharedFolder(urls[0], folder, name, token=token, timeout_s=request_timeout_s)}
    connect = ways(
        name,
        role,
        vocab_size=parts.model.vocab_size,
        retry=Retry(attempts=server.attempts),
        request_timeout_s=request_timeout_s,
        connect_timeout_s=CONNECT_TIMEOUT_S,
        hooks=hooks,
    )

    async def connected() -> Sampler:
        if len(urls) == 1:
            return await connect[urls[0]]()
        spread = SpreadSampler(connect, files=WeightFiles(folder, name))
        try:
            await spread.connected()
        except BaseException:
            await spread.aclose()
            raise
        return spread

    try:
        sampler = shell.call(connected(), CONNECT_TIMEOUT_S + 5, f"connecting to {server.url}")
    except (RemoteError, TimeoutError) as error:
        raise ConfigError(f"`{name}.server.url`: {error}") from error
    try:
        sampler.publish(make_copy(role.serve_dtype)(parts.params), 0)
    except BaseException:
        shell.call(sampler.aclose(), 30.0, f"leaving {server.url}")
        raise
    return sampler
