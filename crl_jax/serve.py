"""``crl serve``: one role's model behind a server, in a process of its own.

Owns: the order in which things start and stop. Promises: a port, host or token that cannot be used is found before the model is loaded;
what a lone request runs is compiled before requests are accepted; SIGINT and SIGTERM end the process with code 0. Does not: know the
protocols (``serving.http``, ``serving.jetstream_server``).
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import pathlib
import sys
from typing import Literal

import jax

from crl_jax.build import keep_compiled_programs
from crl_jax.config.parse import ConfigError
from crl_jax.config.schema import Config
from crl_jax.host_memory import keep_freed_memory
from crl_jax.records import SamplingParams
from crl_jax.served_role import ServedRole, Source, load_role
from crl_jax.serving.access import check_open_to
from crl_jax.serving.engine import SlotEngine
from crl_jax.serving.sampler import EngineSampler, Sampler
from crl_jax.token_file import read_token

Protocol = Literal["openai", "jetstream"]
CLOSE_TIMEOUT_S = 5.0


@dataclasses.dataclass(frozen=True)
class ServeOptions:
    """Where to listen and what to allow. ``queue``: completions in flight at most, 0 for four times the slots; ``timeout_s`` bounds one
    completion; ``weights_folder``: where new weights may be published from (None: nowhere).
    """

    host: str = "127.0.0.1"
    port: int = 8000
    token_file: pathlib.Path | None = None
    protocol: Protocol = "openai"
    queue: int = 0
    timeout_s: float = 600.0
    weights_folder: pathlib.Path | None = None


def main(config: Config, role: str, source: Source, options: ServeOptions) -> int:
    """Serves until a signal comes. Raises errors a person can mend: ConfigError, CheckpointError, AccessError, AddressError."""
    _check(source, options)
    token = read_token(options.token_file)
    check_open_to(options.host, token)
    keep_compiled_programs(config.run.compile_cache)
    if jax.default_backend() == "cpu":
        keep_freed_memory()
    if options.protocol == "jetstream":
        from crl_jax.serve_jetstream import serve_jetstream  # imports JetStream

        return serve_jetstream(config, role, source, options, token)
    return asyncio.run(_serve_http(config, role, source, options, token))


def _check(source: Source, options: ServeOptions) -> None:
    if not 0 <= options.port < 2**16:
        raise ConfigError(f"--port {options.port}: a port is 1 to 65535, or 0 for a free one")
    if options.queue < 0 or not 0 < options.timeout_s < math.inf:
        raise ConfigError(f"--queue {options.queue} must be 0 (four times the slots) or more, --timeout-s {options.timeout_s:g} above 0")
    if source.step is not None and source.run is None:
        raise ConfigError("--step names a checkpoint of a run: say which with --run FOLDER")
    if options.weights_folder is not None and options.protocol != "openai":
        raise ConfigError("--weights-folder goes with --protocol openai: JetStream's protocol cannot publish weights")
    if options.weights_folder is not None and not options.weights_folder.is_dir():
        raise ConfigError(f"--weights-folder {options.weights_folder} is no folder: make it, or correct the name")


def announce(served: ServedRole, url: str, token: str) -> None:
    """One line when requests are accepted."""
    guarded = "token required" if token else "no token, this machine only"
    print(f"crl serve: {served.name} ({served.model.name}, weights version {served.version}) at {url} ({guarded})", flush=True)


async def warm_up(engine: SlotEngine, sampler: Sampler) -> None:
    """Compiles what a lone request needs: its input in every chunk size. Prompts begin differently, so that none is shared."""
    for i, chunk in enumerate(engine.chunk_buckets):
        await sampler.complete([i % engine.config.vocab_size] * min(chunk + 1, engine.max_length - 1), SamplingParams(1))


async def _serve_http(config: Config, role: str, source: Source, options: ServeOptions, token: str) -> int:
    from crl_jax.serving.http import server  # imports aiohttp

    address = server.Address(options.host, options.port)
    with server.bound(address) as socket:
        served = load_role(config, role, source)
        engine = SlotEngine(served.model, **served.engine_options)
        sampler = EngineSampler(
            engine,
            served.params,
            version=served.version,
            host_bytes=served.host_bytes,
            request_timeout_s=options.timeout_s,
            close_timeout_s=CLOSE_TIMEOUT_S,
            drain_timeout_s=served.drain_timeout_s,
        )
        try:
            await warm_up(engine, sampler)
            front = server.front(
                sampler,
                served.codec,
                role,
                token=token,
                queue=options.queue or 4 * engine.max_slots,
                constrained=served.trie is not None,
                weights=None if options.weights_folder is None else (options.weights_folder, served.load),
            )
            await server.serve(front, socket, ready=lambda host, port: announce(served, f"http://{host}:{port}/v1", token))
        finally:
            try:
                await sampler.aclose()
            except TimeoutError:  # a dispatch that takes longer ends with the process
                print(f"crl serve: the engine was still busy after {CLOSE_TIMEOUT_S:g} s", file=sys.stderr)
    return 0
