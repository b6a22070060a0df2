"""``crl serve ROLE --protocol jetstream``: the role's model behind JetStream's orchestrator and its gRPC service.

Owns: the order in which things start and stop in this process, which JetStream ends when one of its threads raises. Promises: as ``serve``.
Does not: take requests' sampling parameters (the protocol has none): the recipe's are used.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from crl_jax.config.schema import Config
from crl_jax.records import SamplingParams
from crl_jax.seeds import derive_seed
from crl_jax.served_role import ServedRole, Source, load_role
from crl_jax.serving import jetstream_server
from crl_jax.serving.jetstream_driver import ServedEngine, ServingDriver, Tokens
from crl_jax.serving.signals import stop_event

if TYPE_CHECKING:
    from crl_jax.serve import ServeOptions

_GRACE_S = 3.0  # for calls in flight at the end
_STOP_S = 5.0  # for JetStream's threads


def serve_jetstream(config: Config, role: str, source: Source, options: ServeOptions, token: str) -> int:
    """Serves until a signal comes. Raises errors a person can mend."""
    return asyncio.run(_serve(config, role, source, options, token))


async def _serve(config: Config, role: str, source: Source, options: ServeOptions, token: str) -> int:
    from crl_jax.serve import announce

    server, port = jetstream_server.bind(options.host, options.port, token)
    served = load_role(config, role, source)
    engine = _engine(config, served)
    service, driver = jetstream_server.make_service(
        [engine], [engine], served.params, served.codec, queue_limit=options.queue or 4 * engine.max_slots
    )
    try:
        await _warm_up(service)
        jetstream_server.add_service(server, service)
        await server.start()
        with stop_event() as stop:
            announce(served, f"grpc://{options.host}:{port}", token)
            await stop.wait()
        await server.stop(_GRACE_S)
    finally:
        _stop(driver)
    return 0


def _engine(config: Config, served: ServedRole) -> ServedEngine:
    sampling = (config.actor if served.name == "actor" else config.extractor).sampling
    defaults = SamplingParams(
        served.engine_options["max_length"], sampling.temperature, sampling.top_p, sampling.top_k, tuple(served.codec.stop_ids)
    )
    seed = derive_seed(config.run.seed, served.name, "jetstream")
    return ServedEngine(served.model, defaults=defaults, tokenizer=Tokens(served.codec.stop_ids), seed=seed, **served.engine_options)


async def _warm_up(service: jetstream_server.Orchestrator) -> None:
    """Compiles what a short prompt needs."""
    pb2 = jetstream_server.pb2
    request = pb2.DecodeRequest(token_content=pb2.DecodeRequest.TokenContent(token_ids=[0, 0]), max_tokens=1)
    async for _ in service.Decode(request, _NoCall()):
        pass


class _NoCall:
    """The context of a call nobody made: without one JetStream warns that it runs offline."""

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """It never ends early."""
        del callback


def _stop(driver: ServingDriver) -> None:
    """Ends JetStream's threads. One in a long step would keep the process alive (not all are daemons), so it ends without it."""
    stopping = threading.Thread(target=driver.stop, daemon=True)
    stopping.start()
    stopping.join(_STOP_S)
    if stopping.is_alive():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
